"""Which page is reallocated first: what the block pool's and radix tree's users rely on elsewhere.

The cases follow the behaviour that vLLM's `test_prefix_caching.py`, `test_kv_cache_utils.py` and
SGLang's `test_radix_cache_unit.py` check, in pages of 16 tokens and a pool of 10.
"""

from __future__ import annotations

from typing import Any

import pytest

from kvgraph.errors import InsufficientPagesError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.kv.test_kv_prefix import serve
from tests.support.builders import decode, make_manager, snapshot, start

SIZE = 16
COMMON = [token for token in range(3) for _ in range(SIZE)]
"""Three full pages."""


def make_pool(pages: int = 10, **changes: Any) -> PagedKVCacheManager:
    return make_manager(pages, **{"page_size": SIZE, "enable_prefix_caching": True} | changes)


def prefill(manager: PagedKVCacheManager, name: str, tokens: Any, **changes: Any) -> TextContext:
    """A request behind its prefill, which still runs."""
    ctx = start(manager, name, tokens, **changes)
    ctx.update(1)
    manager.step([ctx])
    return ctx


def queue(manager: PagedKVCacheManager) -> list[int]:
    """Pages in the order in which they are reallocated."""
    return list(manager._replicas[0].leaves[0].pool.free_pages())


def hit(manager: PagedKVCacheManager, tokens: Any, **changes: Any) -> int:
    """Cached tokens that a request of these tokens would take."""
    replica = manager._replicas[0]
    _, digests = replica.settings.identities(TextContext("probe", tokens, **changes))
    return replica.prefixes.joint(digests) * replica.settings.page_size


def test_a_cached_prompt_outlives_requests_that_hold_one_page_at_a_time() -> None:
    manager = make_pool(80)
    prompt = range(1024)
    serve(manager, "prompt", [*prompt, 7])
    for i in range(256):
        serve(manager, f"r{i}", [i])
    assert hit(manager, [*prompt, 8]) == 1024
    assert manager.get_metrics_aggregated().evictions == 0


def test_partial_pages_then_unused_ones_then_cached_ones_tail_first() -> None:
    manager = make_pool()
    prefill(manager, "a", COMMON + [3] * 7)
    assert manager.get_req_blocks("a") == [0, 1, 2, 3]
    b = prefill(manager, "b", COMMON + [3] * 5)
    assert b.cached_prefix_length == 48
    assert manager.get_req_blocks("b") == [0, 1, 2, 4]
    assert manager.num_free_blocks() == 5
    manager.release("a")
    manager.release("b")
    assert queue(manager) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    c = start(manager, "c", COMMON + [3] * 6)
    assert c.cached_prefix_length == 48
    assert manager.get_req_blocks("c") == [0, 1, 2, 4]
    manager.release("c")
    start(manager, "d", [99] * 160)
    assert manager.get_req_blocks("d") == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    assert manager.get_metrics_aggregated().evictions == 3


def test_cached_pages_are_evicted_in_the_order_of_their_release() -> None:
    manager = make_pool()
    prefill(manager, "a", range(87))  # 5 full pages, 1 partial
    prefill(manager, "b", range(87, 87 + 48))
    manager.release("a")
    assert queue(manager) == [5, 9, 4, 3, 2, 1, 0]
    manager.release("b")
    assert queue(manager) == [5, 9, 4, 3, 2, 1, 0, 8, 7, 6]
    c = start(manager, "c", range(35))
    assert c.cached_prefix_length == 32
    assert manager.get_req_blocks("c") == [0, 1, 5]
    assert queue(manager) == [9, 4, 3, 2, 8, 7, 6]


def test_a_hit_makes_the_whole_path_young_again() -> None:
    manager = make_pool(7)
    serve(manager, "a", range(33))
    serve(manager, "b", range(100, 133))
    serve(manager, "a2", range(33))
    start(manager, "c", [7] * 64)
    assert (hit(manager, range(33)), hit(manager, range(100, 133))) == (32, 16)


def test_pages_that_are_hit_are_not_taken_for_the_rest_of_the_request() -> None:
    manager = make_pool(2)
    serve(manager, "a", range(16))
    serve(manager, "b", range(50, 66))
    c = start(manager, "c", [*range(16), *range(70, 80)])
    assert c.cached_prefix_length == 16
    assert manager.get_req_blocks("c") == [0, 1]
    assert manager.get_metrics_aggregated().evictions == 1


def test_pages_of_a_live_request_are_never_evicted() -> None:
    manager = make_pool(6)
    prefill(manager, "a", range(33))
    for i in range(20):
        serve(manager, f"r{i}", [i] * 40)
    assert hit(manager, range(33)) == 32


def test_a_reallocated_page_has_no_content_until_it_is_full_again() -> None:
    manager = make_pool(1)
    first = start(manager, "a", range(15))
    first.update(15)
    manager.step([first])
    manager.release("a")
    b = start(manager, "b", range(15))
    assert b.cached_prefix_length == 0
    pool = manager._replicas[0].leaves[0].pool
    assert pool.digests == [None]
    manager.release("b")


def test_decode_commits_a_page_when_it_is_full() -> None:
    manager = make_pool()
    pool = manager._replicas[0].leaves[0].pool
    ctx = prefill(manager, "a", COMMON + [3] * 7)
    manager.alloc(ctx)
    decode(manager, ctx, *range(8))
    assert (len(pool.index), len(manager.get_req_blocks("a"))) == (3, 4)
    decode(manager, ctx, 8, 9)
    assert (len(pool.index), len(manager.get_req_blocks("a"))) == (4, 5)
    assert pool.digests[manager.get_req_blocks("a")[-1]] is None


def test_an_alloc_that_fails_leaves_the_pages_that_it_would_have_hit() -> None:
    manager = make_pool()
    prefill(manager, "a", [*COMMON, 1])
    serve(manager, "b", [*COMMON, *COMMON, 1])
    prefill(manager, "c", [7] * SIZE * 2)
    before = snapshot(manager)
    long = TextContext("d", COMMON * 4)
    with pytest.raises(InsufficientPagesError, match="'d'"), manager.reserve([[long]]):
        pass
    state = snapshot(manager)
    assert state["replicas"] == before["replicas"]
    assert long.cached_prefix_length == 0


def test_without_prefix_caching_nothing_is_hit() -> None:
    manager = make_pool(4, enable_prefix_caching=False)
    serve(manager, "a", range(40))
    assert start(manager, "b", range(64)).cached_prefix_length == 0
    with pytest.raises(InsufficientPagesError):
        start(manager, "c", range(4))


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_hits_end_at_a_page_edge_and_where_prompts_part(page_size: int) -> None:
    manager = make_pool(40, page_size=page_size)
    serve(manager, "a", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    serve(manager, "b", [1, 2, 9, 10, 11])
    assert hit(manager, [1, 2, 3, 4, 999, 1000]) == 4
    assert hit(manager, [1, 2, 3, 4, 5, 6, 777, 888]) == 6 // page_size * page_size
    assert hit(manager, [1, 2, 9, 10, 11]) == 4
    assert hit(manager, [2, 3, 4, 5, 6]) == 0


def test_equal_pages_at_different_places_are_different_content() -> None:
    manager = make_pool(page_size=4)
    first, second = manager.page_identities(TextContext("a", [1, 2, 3, 4] * 2 + [5]))
    assert first != second


def test_pages_behind_a_window_leave_tail_first() -> None:
    manager = make_pool(window_size=SIZE + 1)
    prefill(manager, "a", range(5 * SIZE))
    assert manager.get_req_blocks("a") == [10, 10, 10, 10, 4]
    assert queue(manager) == [5, 6, 7, 8, 9, 3, 2, 1, 0]
