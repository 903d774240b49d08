"""What a server measures of its engine, and who may join its queue."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgraph import Engine
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.stats import EngineStats
from kvgraph.serve.errors import ServeError
from kvgraph.serve.facts import facts_of
from kvgraph.serve.load import Admission, Load, LoadMeter
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
    engine: Any = SimpleNamespace(stats=stats)
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
    engine: Any = SimpleNamespace(stats=lambda: EngineStats(1, 0, **NONE))
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
    most = facts.max_batch_size + 5
    admission.require_room(most, 0)
    admission.enter(3)
    with pytest.raises(ServeError, match="queue: expected at most 4 requests"):
        admission.require_room(most, 0)
    admission.start(3)  # it runs
    admission.require_room(most, 0)
    for _ in range(facts.max_batch_size - 1):
        admission.enter(3)
        admission.start(3)
    admission.require_room(4, 0)  # all rows are taken
    with pytest.raises(ServeError, match="queue: expected at most 4 requests"):
        admission.require_room(5, 0)
