"""An engine whose calls are interrupted anywhere goes on as if they had not been.

The session of these tests keeps tokens in the pool, in place of K and V, and its logits are a
function of the tokens that it reads back: a page of another request changes what is generated.
"""

from __future__ import annotations

import gc
import signal
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from linecache import getline
from pathlib import Path
from random import Random
from time import perf_counter
from types import CodeType
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.kv.pool.checks import verify
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.sessions.base import Session
from tests.support.faults import failing

FAULTS = (RuntimeError, KeyboardInterrupt, MemoryError)
PACKAGE = str(Path(kvgraph.__file__).parent)
STEP = Engine.step.__code__
Line = tuple[str, int]
Said = dict[str, list[Token]]

# Prompts that share pages, chunks, a pool that runs dry, and every kind of sampling and end, forced
# tokens.
OPTIONS: dict[str, Any] = {"num_pages": 6, "max_batch_size": 4, "max_batch_tokens": 24}
SHARED = list(range(100, 145))
REQUESTS = {
    "greedy": ([*SHARED, 5], SamplingParams(max_new_tokens=6, ignore_eos=True)),
    "seeded": ([*SHARED, 6], SamplingParams(max_new_tokens=4, temperature=0.9, seed=3)),
    "top-p": ([7] * 14, SamplingParams(max_new_tokens=8, temperature=1.5, top_p=0.9, seed=4)),
    "long": (list(range(300, 360)), SamplingParams(max_new_tokens=3, temperature=1, seed=5)),
    "stops": ([9, 8], SamplingParams(max_new_tokens=12, stop_token_ids=(1725,))),
    "asks": (
        list(range(200, 220)),
        SamplingParams(
            max_new_tokens=7,
            temperature=0.5,
            seed=6,
            min_p=0.01,
            repetition_penalty=1.3,
            frequency_penalty=0.5,
            min_new_tokens=2,
            stop=(" needs", " values\ufffd c"),  # held back over three tokens
            logprobs=2,
            prompt_logprobs=1,
        ),
    ),
    "guided": (
        list(range(66, 76)),
        SamplingParams(
            max_new_tokens=20,
            temperature=1,
            seed=7,
            guided_regex=r'\{"name":"[ab]{2}","first":1[0-9]\}',
        ),
    ),
}
TIERS = pytest.mark.parametrize(
    "options", [{}, {"total_num_host_pages": 8}], ids=["pool", "host tier"]
)


class Recalling(Session):
    """Logits of a row are random numbers whose seed is all that its pages say of its context."""

    def _run(self, arrays: list[Any]) -> Any:
        tokens, offsets, indices, pool, cached, table, _ = arrays
        slots = pool[:, 0, 0, :, 0, 0]
        size = slots.shape[1]
        for b, first in enumerate(cached):
            for at, token in enumerate(tokens[offsets[b] : offsets[b + 1]], int(first)):
                slots[table[b, at // size], at % size] = token + 1
        rows = np.searchsorted(offsets, indices, side="right") - 1
        logits = []
        for row, index in zip(rows, indices, strict=True):
            length = int(cached[row] + index - offsets[row] + 1)
            context = slots[table[row]].reshape(-1)[:length]
            seed = zlib.crc32(np.ascontiguousarray(context).tobytes())
            logits.append(np.random.default_rng(seed).normal(size=self._vocab))
        return np.array(logits, np.float32)


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture(scope="module")
def undisturbed(artifact: Artifact) -> Said:
    engine = make_engine(artifact)
    submit_all(engine)
    said, _ = drain(engine)
    assert engine.scheduler.preemptions > 0
    assert [tokens[-1].finish_reason for tokens in said.values()] == ["length"] * 4 + ["stop"] * 3
    assert_whole(engine)
    return said


def make_engine(artifact: Artifact, **options: Any) -> Engine:
    return Engine(artifact, session=Recalling(artifact), **OPTIONS, **options)


def submit_all(engine: Engine) -> None:
    for name, (prompt, sampling) in REQUESTS.items():
        engine.submit(prompt, sampling, request_id=name)


class Fault:
    """Raises `kind` at the `turn`-th time that `line` runs, once."""

    def __init__(self, line: Line, turn: int, kind: type[BaseException]) -> None:
        self.line, self.turn, self.kind = line, turn, kind

    def __call__(self, line: Line) -> None:
        if line == self.line:
            self.turn -= 1
            if self.turn == 0:
                raise self.kind("injected")


def drain(engine: Engine, fault: Fault | None = None) -> tuple[Said, int]:
    """What each request says until all have ended, and how many steps failed."""
    said: Said = {name: [] for name in REQUESTS}
    failures = 0
    while engine.busy:
        try:
            with nullcontext() if fault is None or failures else traced(fault, fault.line[0]):
                tokens = engine.step()
        except FAULTS:
            failures += 1
            continue
        for token in tokens:
            said[token.request_id].append(token)
    return said, failures


@contextmanager
def traced(seen: Callable[[Line], None], folder: str = PACKAGE) -> Iterator[None]:
    """Tell `seen` of each line of a folder or file before it runs; what it raises is raised there.

    Not of `step` itself: it calls what is told of, and then hands the tokens over without a call.
    """

    def trace(frame: Any, event: str, _: Any) -> Any:
        code = frame.f_code
        if event == "line":
            seen((code.co_filename, frame.f_lineno))
        elif event == "call":
            return trace if code.co_filename.startswith(folder) and code is not STEP else None
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(None)


def lines_of(call: Callable[[], Any]) -> Counter[Line]:
    """How often each line of the package runs in `call`."""
    counts: Counter[Line] = Counter()
    with traced(lambda line: counts.update([line])):
        call()
    return Counter({line: times for line, times in counts.items() if makes_a_call(*line)})


def makes_a_call(file: str, number: int) -> bool:
    """False of lines that give a lock or a turn back: no interrupt comes before they have."""
    text = getline(file, number)
    return "with self._lock" not in text and "turns.running" not in text


def assert_as_undisturbed(said: Said, undisturbed: Said, kind: type[BaseException]) -> None:
    """Every token of every request; but where a text could not be made, that ended its request."""
    for name, tokens in said.items():
        error = tokens[-1].error
        if error and kind is RuntimeError:
            assert error.endswith("from the tokenizer, got injected")
            tokens = tokens[:-1]
            assert tokens == undisturbed[name][: len(tokens)]
        else:
            assert tokens == undisturbed[name]


def assert_whole(engine: Engine) -> None:
    """Nothing is queued or held; every page and every row is back."""
    kv: Any = engine.kv
    assert not engine.busy
    assert not engine.scheduler.busy
    while kv.get_metrics_aggregated().inflight_ops:
        kv.wait(0.01)
    kv.poll()
    assert kv.num_free_blocks() == kv.total_num_blocks()
    assert not kv._claimed
    verify(kv._replicas, ())


# -- at every line


@TIERS
def test_a_fault_at_every_line_of_a_step(
    artifact: Artifact, undisturbed: Said, options: dict[str, Any]
) -> None:
    """One engine meets them all: what it lost of its pages or rows would add up."""
    with make_engine(artifact, **options) as engine:
        submit_all(engine)
        counts = lines_of(lambda: drain(engine))
        assert len(counts) > 400
        random, struck = Random(0), 0
        for at, (line, times) in enumerate(counts.items()):
            fault = Fault(line, random.randint(1, times), FAULTS[at % 3])
            submit_all(engine)
            said, failures = drain(engine, fault)
            struck += failures
            assert_as_undisturbed(said, undisturbed, fault.kind)
            assert_whole(engine)
        assert struck > 0.7 * len(counts)
        assert engine.repairs > 0.3 * len(counts)


def test_a_fault_at_every_line_of_a_repair(
    artifact: Artifact, undisturbed: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a step that has happened, and whose requests do not have all of its tokens yet."""
    engine = make_engine(artifact)

    def broken() -> Said:
        """Tokens of three steps, before a fourth that is interrupted."""
        submit_all(engine)
        said: Said = {name: [] for name in REQUESTS}
        for token in engine.step() + engine.step() + engine.step():
            said[token.request_id].append(token)
        with monkeypatch.context() as patch:
            patch.setattr(engine.kv, "step", failing(engine.kv.step, 0, MemoryError("injected")))
            with pytest.raises(MemoryError):
                engine.step()
        return said

    broken()
    lines = lines_of(engine._settle)
    drain(engine)
    assert len(lines) > 80
    for line in lines:
        said = broken()
        with traced(Fault(line, 1, KeyboardInterrupt), line[0]), pytest.raises(KeyboardInterrupt):
            engine.step()
        rest, _ = drain(engine)
        assert {name: said[name] + rest[name] for name in REQUESTS} == undisturbed
        assert_whole(engine)


# -- by signals, at any time


class OutOfTimeError(Exception):
    """As a time limit's handler raises it."""


class Alarms:
    """Real signals that raise `error` once, within a call of the engine."""

    def __init__(self, within: CodeType, error: type[BaseException] = KeyboardInterrupt) -> None:
        self.within, self.error = within, error
        self.is_armed = False

    def __call__(self, _: int, frame: Any) -> None:
        while frame is not None and self.is_armed:
            if frame.f_code is self.within:
                raise self.error
            frame = frame.f_back
        if self.is_armed:
            signal.setitimer(signal.ITIMER_REAL, 1e-4)

    @contextmanager
    def after(self, seconds: float) -> Iterator[None]:
        """Without garbage collection: an interrupt in a callback of it is lost (hypothesis has
        one)."""
        before = signal.signal(signal.SIGALRM, self)
        gc.disable()
        self.is_armed = True
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            self.is_armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            gc.enable()


def shortest(call: Callable[[], Any]) -> float:
    """Seconds of the fastest of three calls: in the others the machine may have stood still."""
    spans = []
    for _ in range(3):
        start = perf_counter()
        call()
        spans.append(perf_counter() - start)
    return min(spans)


@TIERS
def test_interrupted_steps(artifact: Artifact, undisturbed: Said, options: dict[str, Any]) -> None:
    random, failures = Random(1), 0
    alarms = Alarms(STEP)
    with make_engine(artifact, **options) as engine:

        def steps() -> None:
            submit_all(engine)
            drain(engine)

        whole = shortest(steps)
        for _ in range(250):
            submit_all(engine)
            with alarms.after(random.uniform(1e-5, whole)):
                said, failed = drain(engine)
            failures += failed
            assert said == undisturbed
            assert_whole(engine)
    assert failures > 20


def test_interrupted_generate_and_stream(artifact: Artifact, undisturbed: Said) -> None:
    """They leave no request behind, and other requests lose no token."""
    random, failures = Random(2), {KeyboardInterrupt: 0, OutOfTimeError: 0}
    engine = make_engine(artifact)
    prompt, sampling = REQUESTS["seeded"]
    few = SamplingParams(max_new_tokens=6)
    calls: list[tuple[CodeType, Callable[[], Any]]] = [
        (Engine._generate.__code__, lambda: engine.generate([prompt, [3] * 30], few)),
        (Engine.stream.__code__, lambda: list(engine.stream(prompt, few))),
    ]
    spans = [shortest(call) for _, call in calls]
    for at in range(200):
        within, call = calls[at % 2]
        error = list(failures)[at // 2 % 2]
        engine.submit(prompt, sampling, request_id="seeded")
        with Alarms(within, error).after(random.uniform(1e-5, spans[at % 2])):
            try:
                call()
            except error:
                failures[error] += 1
        said, _ = drain(engine)
        assert said["seeded"] == undisturbed["seeded"]
        assert_whole(engine)
    assert min(failures.values()) > 15


# -- where a call of the manager fails


@pytest.mark.parametrize("call", ["claim", "alloc", "alloc_batch", "runtime_inputs", "step"])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_manager_that_fails(
    artifact: Artifact, undisturbed: Said, call: str, kind: type[BaseException]
) -> None:
    """At its first calls, one after the other."""
    engine = make_engine(artifact)
    method = getattr(engine.kv, call)
    for at in range(4):
        setattr(engine.kv, call, failing(method, at, kind("injected")))
        submit_all(engine)
        assert drain(engine) == (undisturbed, 1)
        assert_whole(engine)
