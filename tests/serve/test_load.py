"""What a server measures of its engine, and who may join its queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgraph import Engine, KVCacheParams, SamplingParams
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.stats import EngineStats, RequestStats
from kvgraph.serve.errors import ServeError
from kvgraph.serve.facts import EngineFacts, facts_of
from kvgraph.serve.load import Admission, Load, LoadMeter, Place
from kvgraph.serve.options import ServeOptions


@pytest.mark.parametrize("idle", [0.0, 8 * 3600.0])
@pytest.mark.parametrize("queue", ["num_running", "num_waiting"])
def test_the_time_between_ends_is_time_at_work(
    monkeypatch: pytest.MonkeyPatch, queue: str, idle: float
) -> None:
    """The first measurement counts as it is; a queue alone is work, as a tier may be slow."""
    now, left = 0.0, 0

    def stats() -> EngineStats:
        return EngineStats(**{"num_running": 0, "num_waiting": 0, **NONE, queue: left})

    monkeypatch.setattr("kvgraph.serve.load.perf_counter", lambda: now)
    engine: Any = SimpleNamespace(stats=stats, kv=None)
    meter = LoadMeter(engine)
    for _ in range(3):
        now += idle
        for left in (1, 0):  # it ends with its second step
            meter.before_step()
            now += 1
            meter.after_step([Token("a", 5, "a", None if left else "stop")])
        assert meter.load.finish_seconds == 2


NONE = {"generated_tokens": 0, "num_preemptions": 0, "num_failed_requests": 0, "num_repairs": 0}


def test_ends_that_come_more_often_are_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("kvgraph.serve.load.perf_counter", lambda: now)
    engine: Any = SimpleNamespace(stats=lambda: EngineStats(1, 0, **NONE), kv=None)
    meter = LoadMeter(engine)
    for seconds, found in ((10, 10), (10, 10), (5, 9.5)):
        meter.before_step()
        now += seconds
        meter.after_step([Token("a", 5, "a", "stop")])
        assert meter.load.finish_seconds == pytest.approx(found)


def test_a_slot_counts_as_one_page(compiled: Callable[..., Path]) -> None:
    """Its pages are those of `EngineStats.num_pages`."""
    engine = Engine(compiled("tiny-llama", cache="continuous"), num_threads=1, max_batch_size=2)
    facts = facts_of(engine)
    assert (facts.num_pages, facts.page_size) == (2, engine.model.max_seq_len)


def test_more_choices_than_a_queue_holds_wait_for_no_empty_server(engine: Engine) -> None:
    """Where none waits they are let through, as by an empty server: else they never came in."""
    facts, stats = facts_of(engine), engine.stats()
    admission = Admission(facts, ServeOptions(max_queued_requests=4), lambda: Load(stats))
    many = [[5]] * (facts.max_batch_size + 5)
    admission.require_room(many)
    place = admission.enter([5] * 3)
    with pytest.raises(ServeError, match="queue: expected at most 4 requests"):
        admission.require_room(many)
    admission.start(place)  # it runs
    admission.require_room(many)
    for _ in range(facts.max_batch_size - 1):
        admission.start(admission.enter([5] * 3))
    admission.require_room([[5]] * 4)  # all rows are taken
    with pytest.raises(ServeError, match="queue: expected at most 4 requests"):
        admission.require_room([[5]] * 5)


PAGE = 16
LEAF = KVCacheParams(dtype="float32", n_kv_heads=1, head_dim=8, num_layers=1, page_size=PAGE)


class Short:
    """An admission of an engine of 64 rows whose free pages a test sets; `most` requests wait."""

    def __init__(self, most: int, *free: int, leaves: tuple[KVCacheParams, ...] = (LEAF,)) -> None:
        self.free, self.measured = free, 0.0
        facts = EngineFacts(100, 2048, 64, 512, PAGE, True, 50, leaves)
        self.admission = Admission(facts, ServeOptions(max_queued_requests=most), self._load)

    def _load(self) -> Load:
        stats = EngineStats(0, 0, **NONE)
        return Load(stats, free_pages=self.free, measured=self.measured)

    def accepted(self, prompts: Iterable[list[int]], salt: bytes = b"") -> list[Place]:
        """Places of the prompts that come, one after the other, up to the first refused one."""
        places = []
        for prompt in prompts:
            try:
                self.admission.require_room([prompt], salt)
            except ServeError as error:
                assert error.status == 429
                assert error.retry_after
                break
            places.append(self.admission.enter(prompt, salt))
        return places


def prompts_of(pages: int) -> Iterable[list[int]]:
    """200 prompts of `pages` pages that share none."""
    return ([5 + number] * (pages * PAGE) for number in range(200))


@pytest.mark.parametrize(
    ("most", "free", "pages", "accepted"),
    [(1, 17, 1, 18), (1, 17, 2, 9), (0, 17, 2, 8), (64, 1000, 2, 128), (1, 1000, 2, 65)],
)
def test_requests_wait_behind_the_rows_and_the_free_pages(
    most: int, free: int, pages: int, accepted: int
) -> None:
    assert len(Short(most, free).accepted(prompts_of(pages))) == accepted


def test_a_preempted_request_counts_as_running() -> None:
    """Requests that have started are preempted: none of them takes a place of the queue."""
    short = Short(2, 6)
    for place in short.accepted(prompts_of(1)):
        place.stats = RequestStats(started=1.0)
    short.measured, short.free = 2.0, (0,)
    assert len(short.accepted(prompts_of(1))) == 2


def test_pages_that_were_taken_since_the_measurement() -> None:
    short = Short(0, 4)
    first, *others = short.accepted(prompts_of(1))
    assert len(others) == 3
    short.measured = 1.0
    first.stats = RequestStats(started=2.0)
    assert not short.accepted(prompts_of(1)), "its page and those of the others are taken"
    for place in others:
        short.admission.start(place)
        short.admission.leave(place)
    assert len(short.accepted(prompts_of(1))) == 3


@pytest.mark.parametrize(("salts", "accepted"), [((b"a", b"a"), 21), ((b"a", b"b"), 11)])
def test_pages_that_prompts_share_count_once(salts: tuple[bytes, bytes], accepted: int) -> None:
    """The first one of a salt needs 11 pages, and each further one its last page."""
    short = Short(1, 30)
    prompts = [[5] * (10 * PAGE) + [number] for number in range(60)]
    assert len(short.accepted(prompts[:1], salts[0])) == 1
    assert len(short.accepted(prompts[1:], salts[1])) == accepted - 1


def test_pages_of_prompts_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that come together count like those that come one after the other."""
    prompts = [[5] * (10 * PAGE) + [number] for number in range(6)]
    one_by_one, together = Short(1, 30), Short(1, 30)
    expected = [place.pages for place in one_by_one.accepted(prompts, b"a")]
    compared: list[int] = []

    def page(prompt: Sequence[int], number: int, size: int) -> Sequence[int]:
        compared.append(number)
        return prompt[number * size : (number + 1) * size]

    monkeypatch.setattr("kvgraph.serve.load._page", page)
    places = together.admission.admit(prompts, b"a")
    assert [place.pages for place in places] == expected
    assert compared == [number for number in range(10) for _ in "ab"] * 5
    assert together.admission.num_open == together.admission.num_queued == 6
    with pytest.raises(ServeError, match="queue: expected at most 1 requests"):
        together.admission.admit(list(prompts_of(9)))
    assert together.admission.num_open == 6


def test_the_shortest_leaf_counts() -> None:
    window = replace(LEAF, window_size=PAGE + 1)
    assert len(Short(1, 100, 6, leaves=(LEAF, window)).accepted(prompts_of(2))) == 4
    assert len(Short(1, 6, 100, leaves=(window, LEAF)).accepted(prompts_of(2))) == 4


def test_more_choices_than_pages_wait_for_one_that_can_start() -> None:
    short = Short(1, 3)
    many = [[5 + number] * PAGE for number in range(20)]
    short.admission.require_room(many)
    running = short.admission.enter([1])
    running.stats = RequestStats(started=-1.0)
    short.admission.start(running)
    short.admission.require_room(many)
    short.free = (0,)
    with pytest.raises(ServeError, match="got 20 and 320 more to 0"):
        short.admission.require_room(many)
    short.admission.leave(running)
    short.admission.require_room(many)


def test_an_engine_that_preempts_has_no_free_pages(artifact: Path) -> None:
    """Free pages are for the preempted request, which comes before the queue."""
    engine = Engine(artifact, num_threads=1, num_pages=4)
    meter = LoadMeter(engine)
    assert meter.load.free_pages == (4,)
    endless = SamplingParams(max_tokens=40, ignore_eos=True)
    for token in (5, 6):
        engine.submit([token] * 20, endless)
    while not engine.stats().num_preemptions:
        assert engine.busy
        meter.before_step()
        meter.after_step(engine.step())
    assert engine.stats().num_free_pages
    assert meter.load.free_pages == (0,)
    while engine.busy:
        meter.after_step(engine.step())
    assert meter.load.free_pages == (4,)
    engine.close()
