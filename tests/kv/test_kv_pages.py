"""The pool of pages by itself, and the integrity check that watches over it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.pages import PagePool
from kvgraph.kv.pool.rows import Phase
from tests.support.builders import make_manager, start


def cached_pool(pages: int, cached: int) -> PagePool:
    """Free pages, of which those below `cached` hold known content, released in this order."""
    pool = PagePool(pages)
    held = pool.take(cached)
    for page in held:
        pool.commit(page, bytes([page]))
    pool.drop(held)
    return pool


def free(pool: PagePool) -> list[int]:
    return list(pool.free_pages())


def test_cached_pages_join_the_tail_and_others_the_head() -> None:
    pool = cached_pool(6, 3)
    assert free(pool) == [3, 4, 5, 0, 1, 2]
    assert pool.take(2) == [3, 4]
    pool.drop([4, 3])
    assert free(pool) == [3, 4, 5, 0, 1, 2]
    pool.hold([0, 4])
    assert free(pool) == [3, 5, 1, 2]
    pool.drop([0, 4])
    assert pool.take(6) == [4, 3, 5, 1, 2, 0]
    assert (pool.num_free, pool.evictions, free(pool), pool.take(0)) == (0, 3, [], [])


def test_a_page_held_again_and_again_leaves_the_queue_whole() -> None:
    pool = cached_pool(8, 6)
    for _ in range(1000):
        pool.hold([5, 3])
        pool.drop([3, 5])
    assert free(pool) == pool.take(8) == [6, 7, 0, 1, 2, 4, 3, 5]


def test_a_pinned_page_keeps_its_place_and_is_not_taken() -> None:
    pool = cached_pool(4, 4)
    pool.pin([1, 1, 3])
    assert (pool.num_free, free(pool)) == (2, [0, 2])
    pool.unpin([1])
    pool.unpin([1])
    assert (pool.num_free, free(pool)) == (3, [0, 1, 2])
    pool.hold([3])
    pool.unpin([3])
    assert (pool.num_free, free(pool)) == (3, [0, 1, 2])


def test_a_pinned_page_whose_turn_comes_is_passed_over_until_its_copy_ends() -> None:
    pool = cached_pool(5, 5)
    pool.pin([0, 1, 3])
    assert pool.take(1) == [2]
    pool.unpin([0])
    assert free(pool) == [4, 0]
    pool.hold([1])
    pool.drop([1])
    pool.unpin([3, 1])
    assert free(pool) == [3, 4, 0, 1]


def test_pages_that_only_offloads_keep_can_be_had() -> None:
    pool = cached_pool(6, 5)
    pool.pin([0, 1, 2, 3], is_offload=True)
    pool.pin([1, 4])
    pool.hold([2])
    assert (pool.num_free, pool.num_obtainable) == (1, 3)
    pool.unpin([1])
    assert (pool.num_free, pool.num_obtainable) == (1, 4)
    pool.unpin([0, 1, 2, 3], is_offload=True)
    assert (pool.num_free, pool.num_obtainable) == (4, 4)


def test_a_page_published_after_its_copy_is_the_youngest() -> None:
    pool = cached_pool(3, 1)
    pages = pool.take(1)
    pool.pin(pages)
    pool.drop(pages)
    pool.publish(1, b"copied")
    pool.publish(1, bytes([0]))
    pool.unpin(pages)
    assert free(pool) == [2, 0, 1]
    assert pool.index == {bytes([0]): 0, b"copied": 1}


def test_forget_uncommits_pages_that_requests_and_copies_hold() -> None:
    pool = cached_pool(4, 4)
    pool.hold([0, 1, 1])
    pool.pin([1, 2])
    epoch = pool.epoch
    pool.forget()
    assert pool.epoch is not epoch
    assert (pool.index, pool.digests) == ({}, [None] * 4)
    assert (pool.refs, pool.num_free) == ([1, 2, 0, 0], 1)
    pool.drop([0, 1, 1])
    pool.unpin([1, 2])
    assert (pool.num_free, pool.evictions) == (4, 0)


def test_a_page_committed_after_forget_stays() -> None:
    pool = cached_pool(2, 1)
    pool.forget()
    pages = pool.take(2)
    pool.commit(pages[0], b"new")
    pool.drop(pages)
    assert pool.index == {b"new": pages[0]}


def test_reallocation_uncommits() -> None:
    pool = PagePool(2)
    first, second = pool.take(2)
    assert pool.commit(first, b"a") == first
    assert pool.commit(second, b"a") == first
    assert (pool.refs, pool.num_free) == ([2, 0], 1)
    pool.drop([first, first])
    assert pool.take(1) == [second]
    assert pool.index == {b"a": first}
    assert pool.take(1) == [first]
    assert (pool.index, pool.evictions) == ({}, 1)


def test_rows_widen_with_their_pages() -> None:
    manager = make_manager(pages=100, page_size=1)
    a, b = start(manager, "a", range(70)), start(manager, "b", [1])
    record = manager.runtime_inputs([[b, a]]).inputs[0]
    assert np.asarray(record.lookup_table).tolist() == [[70] + [100] * 69, list(range(70))]
    record = manager.runtime_inputs([[b]], max_cache_length=100).inputs[0]
    assert np.asarray(record.lookup_table).tolist() == [[70] + [100] * 99]


def lose_a_page(manager: PagedKVCacheManager) -> None:
    pool = manager._replicas[0].leaves[0].pool
    pool._after[-1] = pool._after[pool._after[-1]]


def share_a_page(manager: PagedKVCacheManager) -> None:
    manager._claimed["a"].pages[0][0] = manager._claimed["b"].pages[0][0]


def forget_a_commit(manager: PagedKVCacheManager) -> None:
    manager._replicas[0].leaves[0].pool.index.clear()


def change_a_lookup_row(manager: PagedKVCacheManager) -> None:
    manager._replicas[0].leaves[0].table[manager._claimed["a"].index, 0] = 9


def change_a_staged_row(manager: PagedKVCacheManager) -> None:
    for tensors in manager._replicas[0].batch._sets:
        tensors._tables[0][0] = 9


def change_a_phase(manager: PagedKVCacheManager) -> None:
    manager._claimed["a"].phase = Phase.CLAIMED


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_page,
        share_a_page,
        forget_a_commit,
        change_a_lookup_row,
        change_a_staged_row,
        change_a_phase,
    ],
)
def test_runtime_checks_find_damage(damage: Callable[[PagedKVCacheManager], None]) -> None:
    manager = make_manager(enable_prefix_caching=True)
    a, b = start(manager, "a", range(9)), start(manager, "b", range(50, 59))
    a.update(1)
    manager.step([a])
    for _ in range(2):
        manager.runtime_inputs([[a, b]])
    damage(manager)
    with pytest.raises(AssertionError):
        manager.alloc_batch([[a, b]])
