"""Bookkeeping that starts over: whatever was interrupted, nothing of it is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.devices import Device
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.kv.test_tier_reset import loading, work
from tests.runtime.test_faults import Fault, lines_of, traced
from tests.support.builders import make_manager, make_params, start
from tests.support.stores import MemoryStore, opener

CPU = (Device("cpu"),)
TREE = {"full": make_params(), "window": make_params(window_size=6)}
KINDS: dict[str, Callable[[], Any]] = {
    "paged": make_manager,
    "prefix caching": lambda: make_manager(enable_prefix_caching=True),
    "two replicas": lambda: make_manager(dp=2),
    "tree": lambda: PagedKVCacheManager(
        MultiKVCacheParams.from_params(TREE), None, 10, enable_runtime_checks=True, max_batch_size=4
    ),
    "continuous": lambda: ContinuousBatchingKVCacheManager(
        make_params(), 4, 16, 2, CPU, None, True
    ),
    "padded": lambda: PaddedKVCacheManager(make_params(), 4, 16, 2, CPU, None),
    "null": lambda: NullKVCacheManager(make_params(), 4, 16, 2, CPU, None, 0, 4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_starts_over(kind: str) -> None:
    """All rows are claimed, twice; what is free at the end is what was free at the start."""
    manager = KINDS[kind]()
    before = free_of(manager)
    for _ in range(2):
        contexts = [start(manager, f"r{i}", [5, 6, 7, 8, 9]) for i in range(4)]
        for context in contexts:
            context.update(7)
        manager.step([contexts, []] if kind == "two replicas" else [contexts])
        manager.rebuild()
        assert not any(manager.contains(context.request_id) for context in contexts)
        assert free_of(manager) == before


def free_of(manager: Any) -> Any:
    free = manager.num_free_blocks
    return free() if callable(free) else free


def test_the_cache_is_empty_and_the_counters_go_on() -> None:
    manager = make_manager(pages=4, enable_prefix_caching=True)
    for tokens in (range(9), range(9), range(20, 36)):
        context = start(manager, "r", list(tokens))
        context.update(1)
        manager.step([context])
        manager.release("r")
    start(manager, "live", range(20, 33))
    before = manager.get_metrics_aggregated()
    assert before.cache_tokens > 8
    assert before.evictions > 0
    manager.rebuild()
    assert start(manager, "r", range(20, 33)).cached_prefix_length == 0
    after = manager.get_metrics_aggregated()
    assert (after.cache_tokens, after.evictions) == (before.cache_tokens, before.evictions)
    assert after.input_tokens == before.input_tokens + 13


def test_copies_of_tiers_end_before_their_pages_are_free() -> None:
    """A load and an offload in the middle, and more that wait: none lands later."""
    opened, inside = threading.Event(), threading.Semaphore(0)
    opened.set()
    manager = PagedKVCacheManager(
        make_params(enable_prefix_caching=True),
        None,
        12,
        8,
        enable_runtime_checks=True,
        max_batch_size=4,
        stores=[opener(MemoryStore())],
    )
    assert manager._tiers is not None
    connector: Any = manager._tiers.connector
    copy = connector._copy

    def gated(*args: Any, **kwargs: Any) -> None:
        inside.release()
        assert opened.wait(30)
        copy(*args, **kwargs)

    connector._copy = gated
    committed(manager, range(9))
    while manager.get_metrics_aggregated().inflight_ops:
        manager.wait(0.01)
        manager.poll()
    manager._replicas[0].reset_prefix_cache()  # of the device alone
    while inside.acquire(blocking=False):
        pass
    opened.clear()
    loading = TextContext("loading", range(9))
    manager.claim("loading")
    while not all(manager.prefetch([loading])):
        manager.wait(1)
    manager.alloc(loading)
    assert manager.is_loading("loading")
    assert inside.acquire(timeout=30)
    committed(manager, range(50, 59))
    thread = threading.Thread(target=manager.rebuild)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive(), "it waits for the copy that goes on"
    opened.set()
    thread.join(30)
    assert not thread.is_alive()
    assert manager.poll() == {}
    assert manager.num_free_blocks() == 12
    pools = [buffer.handle for buffer in manager.get_device_buffer().all_buffers]
    for pool in pools:
        pool[...] = 7
    while manager.get_metrics_aggregated().inflight_ops:
        manager.wait(0.01)
    assert all((pool == 7).all() for pool in pools)
    assert all(not slot.pins for shelf in shelves(connector) for slot in shelf.held.values())
    manager.close()


def test_what_waits_for_the_copier_is_dropped() -> None:
    manager, _ = loading(MemoryStore())
    manager.rebuild()
    work(manager)
    assert (manager.poll(), manager.num_free_blocks()) == ({}, 10)


def committed(manager: PagedKVCacheManager, tokens: range) -> None:
    """A request of these tokens came and went."""
    context = start(manager, f"r{tokens[0]}", tokens)
    context.update(1)
    manager.step([context])
    manager.release(context.request_id)


def shelves(connector: Any) -> Any:
    return connector._host._shelves.values()


@pytest.mark.parametrize("batch", ["the same", "the one before"])
def test_a_fault_at_every_line_of_runtime_inputs(batch: str) -> None:
    """Then a row gets a page: both sets of index tensors are right in the next two calls."""

    def batches() -> tuple[PagedKVCacheManager, list[TextContext], list[TextContext]]:
        """A manager, the batch of its last two calls, and another with the same requests."""
        manager = make_manager(pages=20)
        before = [start(manager, f"r{i}", [i] * (3 + 4 * i)) for i in range(3)]
        for _ in range(2):
            manager.runtime_inputs([before], max_cache_length=16)
        return manager, before, [before[2], before[1]]

    manager, before, now = batches()
    lines = lines_of(lambda: manager.runtime_inputs([now], max_cache_length=16))
    assert len(lines) > 40
    for line in lines:
        manager, before, now = batches()
        with traced(Fault(line, 1, KeyboardInterrupt), line[0]), pytest.raises(KeyboardInterrupt):
            manager.runtime_inputs([now], max_cache_length=16)
        manager.alloc(before[2], lookahead=4)
        again = now if batch == "the same" else before
        for _ in range(2):
            assert_inputs(manager, again)


def assert_inputs(manager: PagedKVCacheManager, batch: list[TextContext]) -> None:
    (record,) = manager.runtime_inputs([batch], max_cache_length=16).inputs
    assert np.asarray(record.cache_lengths).tolist() == [0] * len(batch)
    table = np.asarray(record.lookup_table).tolist()
    for row, context in zip(table, batch, strict=True):
        pages = manager.get_req_blocks(context.request_id)
        assert row == (pages + [20] * len(row))[: len(row)]
