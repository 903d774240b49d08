"""What the tiers were asked for a request: kept by its id until it runs, or is given up."""

from __future__ import annotations

from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.kv.test_tier_reset import PROMPT, ask, evict, make, prefill, work
from tests.support.stores import MemoryStore


def stored(store: MemoryStore) -> PagedKVCacheManager:
    """A manager whose store alone holds the pages of `PROMPT`."""
    manager = make(store, host_pages=0)
    prefill(manager, "a")
    manager.release("a")
    work(manager)
    manager.poll()
    evict(manager)
    return manager


def test_a_request_that_is_given_up_before_its_claim_leaves_nothing() -> None:
    manager = stored(MemoryStore())
    given_up = TextContext("b", PROMPT)
    manager.prefetch([given_up])
    del given_up
    manager.prefetch([TextContext("c", PROMPT)])
    assert manager._tiers is not None
    assert manager._tiers._lookups.keys() == {"c"}


def test_another_request_of_the_same_id_is_asked_for() -> None:
    manager = stored(MemoryStore())
    given_up = TextContext("b", range(50, 63))
    manager.prefetch([given_up])
    work(manager)
    manager.alloc(ask(manager, "b"))
    assert manager.is_loading("b")


def test_a_request_whose_load_failed_is_computed_after_its_release() -> None:
    is_broken = False
    manager = stored(MemoryStore(fails=lambda call: call == "read" and is_broken))
    ctx = ask(manager, "b")
    is_broken = True
    manager.alloc(ctx)
    work(manager)
    assert manager.poll() == {"b": False}
    is_broken = False
    manager.release("b")
    manager.claim("b")
    assert manager.prefetch([ctx]) == [True]
    manager.alloc(ctx)
    assert not manager.is_loading("b")
