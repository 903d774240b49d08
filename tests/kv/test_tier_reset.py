"""After `reset_prefix_cache` nothing from before it is hit, whatever was on its way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgraph.errors import StoreError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers.connector import Move
from kvgraph.kv.tiers.host import HostStore
from kvgraph.kv.tiers.tiered import TieredConnector
from tests.kv.test_tier_model import Unthreaded
from tests.support.builders import decode, make_manager, make_params, start
from tests.support.stores import MemoryStore, opener

PROMPT = range(13)
"""Three full pages and a token."""


def make(*stores: MemoryStore, host_pages: int = 8) -> PagedKVCacheManager:
    return Unthreaded(
        make_params(enable_prefix_caching=True),
        None,
        10,
        host_pages,
        enable_runtime_checks=True,
        max_batch_size=3,
        stores=[opener(store) for store in stores],
    )


def connector(manager: PagedKVCacheManager) -> Any:
    assert manager._tiers is not None
    return manager._tiers.connector


def work(manager: PagedKVCacheManager) -> None:
    while connector(manager).work():
        pass


def prefill(manager: PagedKVCacheManager, name: str) -> TextContext:
    ctx = start(manager, name, PROMPT)
    ctx.update(1)
    manager.step([ctx])
    return ctx


def offered(*stores: MemoryStore) -> PagedKVCacheManager:
    """A manager whose offloads of a released request's pages are queued."""
    manager = make(*stores)
    prefill(manager, "a")
    manager.release("a")
    return manager


def ask(manager: PagedKVCacheManager, name: str) -> TextContext:
    """A claimed request for which the tiers have answered."""
    ctx = TextContext(name, PROMPT)
    manager.claim(name)
    manager.prefetch([ctx])
    work(manager)
    assert manager.prefetch([ctx]) == [True]
    return ctx


def loading(*stores: MemoryStore) -> tuple[PagedKVCacheManager, TextContext]:
    """A request whose load from the host tier is queued."""
    manager = offered(*stores)
    work(manager)
    manager.poll()
    evict(manager)
    ctx = ask(manager, "b")
    manager.alloc(ctx)
    assert manager.is_loading("b")
    return manager, ctx


def begin(manager: PagedKVCacheManager) -> Callable[[], None]:
    """The next copy: what the copier's thread does from here on."""
    copy: Callable[[], None] = connector(manager)._take_copy()
    return copy


def evict(manager: PagedKVCacheManager) -> None:
    """The device loses what no request holds."""
    pool = manager._replicas[0].leaves[0].pool
    pool.drop(pool.take(pool.num_free))


def assert_forgotten(manager: PagedKVCacheManager, name: str = "probe") -> None:
    work(manager)
    manager.poll()
    ctx = ask(manager, name)
    manager.alloc(ctx)
    assert (ctx.cached_prefix_length, manager.is_loading(name)) == (0, False)
    assert manager.get_num_used_host_pages() == 0


def test_an_offload_that_is_queued() -> None:
    store = MemoryStore()
    manager = offered(store)
    manager.reset_prefix_cache()
    assert_forgotten(manager)
    assert not store.pages
    assert manager.get_metrics_aggregated().offload_dropped == 0


def test_an_offload_that_is_being_copied() -> None:
    store = MemoryStore()
    manager = offered(store)
    copy = begin(manager)
    manager.reset_prefix_cache()
    assert not manager._replicas[0].leaves[0].pool.index
    copy()
    assert_forgotten(manager)
    assert not store.pages


def test_an_offload_that_waits_for_the_store() -> None:
    store = MemoryStore()
    manager = offered(store)
    begin(manager)()
    manager.reset_prefix_cache()
    work(manager)
    assert not store.pages


@pytest.mark.parametrize("progress", ["queued", "being copied", "landed unseen"])
def test_a_load_ends_as_if_it_had_failed(progress: str) -> None:
    manager, ctx = loading()
    job = (lambda: None) if progress == "queued" else begin(manager)
    if progress == "landed unseen":
        job()
    manager.reset_prefix_cache()
    if progress == "being copied":
        job()
    work(manager)
    assert manager.poll() == {"b": False}
    assert (ctx.processed_length, ctx.active_length, ctx.cached_prefix_length) == (0, 13, 0)
    assert manager.get_req_blocks("b") == []
    assert_forgotten(manager)
    manager.alloc(ctx)
    assert (ctx.cached_prefix_length, manager.is_loading("b")) == (0, False)


def test_a_load_of_a_released_request() -> None:
    manager, _ = loading()
    copy = begin(manager)
    manager.release("b")
    manager.reset_prefix_cache()
    copy()
    assert_forgotten(manager)


def test_a_load_that_is_void_holds_no_other_request_back() -> None:
    manager, _ = loading()
    other = TextContext("c", PROMPT)
    manager.claim("c")
    assert manager.prefetch([other]) == [False]
    manager.reset_prefix_cache()
    assert manager.prefetch([other]) == [True]


def test_an_answer_from_before_is_void() -> None:
    store = MemoryStore()
    manager = offered(store)
    work(manager)
    manager.poll()
    evict(manager)
    ctx = ask(manager, "b")
    manager.reset_prefix_cache()
    manager.alloc(ctx)
    assert not manager.is_loading("b")
    assert manager.get_metrics_aggregated().load_failures == 0


def test_a_waiting_request_is_asked_for_again() -> None:
    manager = offered(MemoryStore())
    work(manager)
    manager.poll()
    evict(manager)
    waiting = ask(manager, "b")
    manager.reset_prefix_cache()
    prefill(manager, "c")
    manager.release("c")
    work(manager)
    manager.poll()
    evict(manager)
    manager.prefetch([waiting])
    work(manager)
    manager.alloc(waiting)
    assert manager.is_loading("b")


def test_a_request_of_a_later_epoch_is_loaded_again() -> None:
    manager, ctx = loading()
    manager.reset_prefix_cache()
    work(manager)
    manager.poll()
    manager.alloc(ctx)
    ctx.update(1)
    manager.step([ctx])
    manager.release("b")
    work(manager)
    manager.poll()
    evict(manager)
    again = ask(manager, "c")
    manager.alloc(again)
    assert manager.is_loading("c")


def test_pages_of_a_live_request_are_not_hit() -> None:
    manager = make()
    prefill(manager, "a")
    manager.reset_prefix_cache()
    assert len(manager.get_req_blocks("a")) == 4
    assert start(manager, "b", PROMPT).cached_prefix_length == 0
    manager.release("b")
    manager.release("a")
    assert_forgotten(manager)


@pytest.mark.parametrize("chunk", [4, 6])
def test_a_live_request_commits_nothing_more(chunk: int) -> None:
    """Neither the page that the reset cuts, nor those computed over older ones."""
    store = MemoryStore()
    manager = make(store)
    ctx = TextContext("a", PROMPT)
    ctx.active_length = chunk
    manager.claim("a")
    manager.alloc(ctx)
    ctx.update()
    manager.step([ctx])
    manager.reset_prefix_cache()
    assert not manager.coming_pages([ctx])
    manager.alloc(ctx)
    decode(manager, ctx, *range(1, 6))
    assert ctx.processed_length == 17
    assert manager.committed_digests() == []
    manager.release("a")
    assert_forgotten(manager)
    assert not store.pages


def test_a_live_request_that_is_preempted_commits_again() -> None:
    manager = make()
    ctx = prefill(manager, "a")
    manager.reset_prefix_cache()
    manager.release("a")
    ctx.rewind()
    manager.claim("a")
    manager.alloc(ctx)
    assert ctx.cached_prefix_length == 0
    ctx.update(1)
    manager.step([ctx])
    assert start(manager, "b", PROMPT).cached_prefix_length == 12


@pytest.mark.parametrize("window", [4, 8])
def test_a_live_request_commits_nothing_behind_its_window(window: int) -> None:
    manager = make_manager(page_size=4, window_size=window, enable_prefix_caching=True)
    ctx = prefill(manager, "a")
    manager.reset_prefix_cache()
    manager.alloc(ctx)
    decode(manager, ctx, *range(2, 9))
    assert manager.committed_digests() == []
    assert len(set(manager.get_req_blocks("a"))) < len(manager.get_req_blocks("a"))


def test_a_store_that_cannot_be_emptied_misses_until_it_is() -> None:
    fails = True
    store = MemoryStore(fails=lambda call: call == "clear" and fails)
    manager = offered(store)
    work(manager)
    manager.poll()
    manager.reset_prefix_cache()
    assert len(store.pages) == 3
    assert_forgotten(manager)
    fails = False
    assert_forgotten(manager, "again")
    assert not store.pages


def test_stores_that_are_closed() -> None:
    """They cannot be emptied, so nothing is."""
    store = MemoryStore()
    manager = offered(store)
    work(manager)
    manager.close()
    held = manager.committed_digests()
    with pytest.raises(StoreError, match=r"^reset_prefix_cache: expected tiers that are open, got"):
        manager.reset_prefix_cache()
    assert manager.committed_digests() == held != []
    assert len(store.pages) == 3


def test_a_closed_manager_without_stores() -> None:
    manager = offered()
    work(manager)
    manager.close()
    manager.reset_prefix_cache()
    assert manager.committed_digests() == []
    assert manager.get_num_used_host_pages() == 0


def test_pages_that_a_transfer_brings() -> None:
    manager = make()
    digests = manager.page_identities(TextContext("a", PROMPT))
    with manager.adopted_pages([digests]):
        manager.reset_prefix_cache()
        assert manager.num_free_blocks() == 7
    assert manager.num_free_blocks() == 10
    assert_forgotten(manager)
    with manager.adopted_pages([digests]):
        pass
    assert start(manager, "b", PROMPT).cached_prefix_length == 12


def test_pages_that_a_transfer_sends() -> None:
    manager = offered()
    with manager.held_pages(TextContext("x", PROMPT)) as leaves:
        manager.reset_prefix_cache()
        assert len(leaves[0].pages) == 3
        assert manager.num_free_blocks() == 7
    assert_forgotten(manager)


def test_the_rest_of_a_load_does_not_come_back_to_the_host() -> None:
    """Its pages are read before the store's thread empties the stores."""
    pools = make().leaf_pools()[0]
    resetting: list[threading.Thread] = []

    class Slow(MemoryStore):
        def read(self, key: bytes, out: memoryview) -> bool:
            if not resetting:
                resetting.append(threading.Thread(target=tiers.reset))
                resetting[0].start()
                while not tiers._generation:
                    time.sleep(0.001)
            return super().read(key, out)

    size = pools.record_size
    store = Slow()
    store.pages = {bytes([i]) * 32: bytes(size) for i in range(2)}
    host = HostStore({size: 4}, {size: 2}, lambda nbytes: np.zeros(nbytes, np.uint8))
    tiers = TieredConnector(host, [store], largest=size, max_offloads=9, max_writes=9)
    tiers.load([Move(key, pools, page) for page, key in enumerate(store.pages)])
    assert tiers.wait(30)
    assert tiers.poll()[0].ok
    resetting[0].join(30)
    assert (tiers.stats()["host"].num_used_pages, len(store.pages)) == (0, 0)
    tiers.close()
