"""Calls that overlap are refused, and disturb nothing; calls in turn are not."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.prefix import write_prefix
from kvgraph.runtime.sessions.onnxruntime import OnnxRuntimeSession

PROMPTS = [list(range(first, first + 20)) for first in (100, 200)]
FEW = SamplingParams(max_new_tokens=6, ignore_eos=True)


class Stopping(OnnxRuntimeSession):
    """Calls `meanwhile` in the middle of each step."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact, num_threads=1)
        self.meanwhile: Callable[[], Any] = lambda: None

    def _run(self, arrays: list[Any]) -> Any:
        self.meanwhile()
        return super()._run(arrays)


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture
def engine(artifact: Artifact) -> Engine:
    return Engine(artifact, session=Stopping(artifact), num_pages=40)


def tokens_of(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts, FEW)]


@contextmanager
def running(engine: Engine, call: Callable[[], Any]) -> Iterator[None]:
    """`call` is in the middle of a step of another thread."""
    inside, go_on = threading.Event(), threading.Event()

    def stop() -> None:
        inside.set()
        assert go_on.wait(60)

    engine.session.meanwhile = stop  # type: ignore[attr-defined]
    thread = threading.Thread(target=call)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        engine.session.meanwhile = lambda: None  # type: ignore[attr-defined]
        go_on.set()
        thread.join()


CALLS: dict[str, Callable[[Engine], Any]] = {
    "step": lambda engine: engine.step(),
    "submit": lambda engine: engine.submit([5]),
    "cancel": lambda engine: engine.cancel("mine"),
    "generate": lambda engine: engine.generate([[5]]),
    "stream": lambda engine: next(engine.stream([5])),
    "close": lambda engine: engine.close(),
    "write_prefix": lambda engine: write_prefix(engine, [5] * 20, "none.kvp"),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_overlaps_another_is_refused(engine: Engine, name: str) -> None:
    wanted = tokens_of(engine, PROMPTS)
    found: list[list[list[int]]] = []
    engine.submit(PROMPTS[0], FEW, request_id="mine")
    message = (
        rf"^Engine\.{name}: expected one call at a time, got one while `generate` of another "
        "thread runs; share it between threads in turn, with a lock$"
    )
    with running(engine, lambda: found.append(tokens_of(engine, PROMPTS))):
        for _ in range(2):
            with pytest.raises(RequestError, match=message):
                CALLS[name](engine)
    assert found == [wanted]
    assert [token.token_id for token in engine.step()] == wanted[0]
    assert not engine.busy


@pytest.mark.parametrize("name", sorted(CALLS.keys() - {"close"}))
def test_a_call_after_close_is_refused(engine: Engine, name: str) -> None:
    engine.submit(PROMPTS[0], FEW, request_id="mine")
    stream = engine.stream(PROMPTS[1], FEW)
    next(stream)
    engine.close()
    engine.close()
    message = rf"^Engine\.{name}: expected an open one, got one that was closed; open another one$"
    with pytest.raises(RequestError, match=message):
        CALLS[name](engine)
    with pytest.raises(RequestError, match=r"^Engine\.stream: expected an open one, got one that"):
        list(stream)


def test_a_call_from_within_a_call_is_refused(engine: Engine) -> None:
    """As a handler of a signal makes one."""
    refused: list[str] = []

    message = "`generate` of the same thread runs; make it after that call, not in a signal handler"

    def nested() -> None:
        with pytest.raises(RequestError, match=message) as error:
            engine.step()
        refused.append(str(error.value))

    wanted = tokens_of(engine, PROMPTS)
    engine.session.meanwhile = nested  # type: ignore[attr-defined]
    assert tokens_of(engine, PROMPTS) == wanted
    assert len(refused) == 6


def test_threads_in_turn(engine: Engine) -> None:
    """A thread for each step, and streams that two threads read by turns."""
    wanted = tokens_of(engine, PROMPTS)
    texts = [done.text for done in engine.generate(PROMPTS, FEW)]
    engine.submit(PROMPTS[0], FEW)
    found: list[Any] = []
    while engine.busy:
        thread = threading.Thread(target=lambda: found.extend(engine.step()))
        thread.start()
        thread.join()
    assert [token.token_id for token in found] == wanted[0]
    streams = [engine.stream(prompt, FEW) for prompt in PROMPTS]
    pieces: list[list[str]] = [[], []]

    def read(at: int) -> None:
        pieces[at].extend(filter(None, [next(streams[at], None)]))

    for turn in range(40):
        thread = threading.Thread(target=read, args=[turn % 2])
        thread.start()
        thread.join()
    assert ["".join(each) for each in pieces] == texts
    assert not engine.busy


def test_two_threads_that_try_again(artifact: Artifact) -> None:
    """Each call is refused, or right."""
    engine = Engine(artifact, num_pages=40, num_threads=1)
    wanted = tokens_of(engine, PROMPTS)
    found: list[tuple[int, list[int]]] = []
    refused: list[str] = []

    def work(at: int) -> None:
        done = 0
        while done < 30:
            try:
                found.append((at, tokens_of(engine, [PROMPTS[at]])[0]))
                done += 1
            except RequestError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=work, args=[at]) for at in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(tokens == wanted[at] for at, tokens in found)
    assert len(found) == 60
    assert refused
    assert not engine.busy


def test_a_stream_that_is_collected_during_a_call(engine: Engine) -> None:
    """Its request is cancelled, but not in the middle of the call."""
    wanted = tokens_of(engine, PROMPTS)
    left = [engine.stream(PROMPTS[1], FEW)]
    next(left[0])

    def collect() -> None:
        left.clear()
        gc.collect()
        assert len(engine.scheduler.running) == 2

    engine.submit(PROMPTS[0], FEW, request_id="mine")
    engine.session.meanwhile = collect  # type: ignore[attr-defined]
    tokens = engine.step()
    engine.session.meanwhile = lambda: None  # type: ignore[attr-defined]
    assert {token.request_id for token in tokens} == {"mine"}
    assert len(engine.scheduler.running) == 1
    while engine.busy:
        tokens += engine.step()
    assert [token.token_id for token in tokens] == wanted[0]
    assert engine.kv.num_free_blocks() == engine.kv.total_num_blocks()  # type: ignore[attr-defined]


def test_a_session_refuses_too(artifact: Artifact) -> None:
    """Two engines share one session; their steps may take turns, and may not overlap."""
    session = Stopping(artifact)
    engines = [Engine(artifact, session=session, num_pages=40) for _ in range(2)]
    wanted = tokens_of(engines[0], PROMPTS)
    found: list[list[list[int]]] = []
    overlapping = running(engines[0], lambda: found.append(tokens_of(engines[0], PROMPTS)))
    refused = pytest.raises(RequestError, match=r"^Session\.run: expected one call at a time, got")
    with overlapping, refused:
        tokens_of(engines[1], PROMPTS)
    assert found == [wanted]
    assert tokens_of(engines[1], PROMPTS) == wanted
