"""What a manager's bookkeeping and its tiers tell each other while requests come and go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers import workers
from tests.kv.test_tier_lookups import stored
from tests.kv.test_tier_reset import PROMPT, ask, evict, loading, offered, work
from tests.support.builders import start
from tests.support.stores import MemoryStore


def test_a_load_that_ended_keeps_nobody_waiting() -> None:
    manager = stored(MemoryStore())
    manager.alloc(ask(manager, "b"))
    work(manager)
    assert manager.poll() == {"b": True}
    manager.release("b")
    evict(manager)
    again = TextContext("c", PROMPT)
    manager.prefetch([again])
    work(manager)
    assert manager.prefetch([again]) == [True]


def test_a_load_that_ended_unseen_is_not_told_of_a_released_request() -> None:
    manager, _ = loading(MemoryStore())
    work(manager)
    assert manager._tiers is not None
    manager._tiers.settle()  # as an `alloc` does that is short of pages
    manager.release("b")
    assert manager.poll() == {}


@pytest.mark.parametrize(("seconds", "reads"), [(0.4, 3), (0.6, 2)])
def test_of_a_load_that_is_too_slow_the_rest_is_not_read(
    monkeypatch: pytest.MonkeyPatch, seconds: float, reads: int
) -> None:
    """On a clock that the store moves."""
    now = 50.0

    def takes(call: str) -> bool:
        nonlocal now
        now += seconds * workers.GRACE_SECONDS
        return False

    monkeypatch.setattr(workers, "time", SimpleNamespace(monotonic=lambda: now))
    store = MemoryStore(fails=takes)
    manager = stored(store)
    manager.alloc(ask(manager, "b"))
    work(manager)
    assert (manager.poll(), store.reads) == ({"b": reads == 3}, reads)


def test_of_a_load_whose_request_left_the_rest_is_not_read() -> None:
    def leaves(call: str) -> bool:
        if call == "read" and manager.contains("b"):
            manager.release("b")
        return False

    store = MemoryStore(fails=leaves)
    manager = stored(store)
    manager.alloc(ask(manager, "b"))
    work(manager)
    assert (manager.poll(), store.reads) == ({}, 1)
    assert manager.num_free_blocks() == 10


def test_pages_that_are_being_offloaded_are_found_in_a_full_pool() -> None:
    """No copy is given up for them: they are not free, so they cost nothing."""
    manager = offered()
    start(manager, "x", range(100, 124))
    assert manager._replicas[0].leaves[0].pool.num_free == 1
    assert start(manager, "b", PROMPT).cached_prefix_length == 12
    assert manager.get_metrics_aggregated().offload_dropped == 0
