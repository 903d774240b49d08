"""The pool of pages by itself, and the integrity check that watches over it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from kv.builders import make_manager, start

from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pages import PagePool


def test_the_queue_is_in_release_order() -> None:
    pool = PagePool(4)
    assert pool.take(3) == [0, 1, 2]
    pool.drop([2, 0])
    assert list(pool.free_pages()) == [3, 2, 0]
    pool.hold([2])
    assert list(pool.free_pages()) == [3, 0]
    pool.drop([2])
    assert pool.take(3) == [3, 0, 2]


def test_a_page_held_again_and_again_does_not_grow_the_queue() -> None:
    pool = PagePool(8)
    for _ in range(10_000):
        pool.hold([5, 3])
        pool.drop([3, 5])
    assert len(pool._queue) <= 3 * 8 + 64
    assert list(pool.free_pages()) == [0, 1, 2, 4, 6, 7, 3, 5]
    assert pool.take(8) == [0, 1, 2, 4, 6, 7, 3, 5]


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
    manager._replicas[0].leaves[0].pool._queue.popleft()


def share_a_page(manager: PagedKVCacheManager) -> None:
    manager._claimed["a"].pages[0][0] = manager._claimed["b"].pages[0][0]


def forget_a_commit(manager: PagedKVCacheManager) -> None:
    manager._replicas[0].leaves[0].pool.index.clear()


def change_a_lookup_row(manager: PagedKVCacheManager) -> None:
    manager._replicas[0].leaves[0].table[manager._claimed["a"].index, 0] = 9


def change_a_staged_row(manager: PagedKVCacheManager) -> None:
    for staging in manager._replicas[0]._staging:
        staging._tables[0][0] = 9


@pytest.mark.parametrize(
    "damage",
    [lose_a_page, share_a_page, forget_a_commit, change_a_lookup_row, change_a_staged_row],
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
