"""What the tiers were asked for a request: kept by its id until it runs, or is given up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers import lookup
from tests.kv.test_tier_reset import PROMPT, ask, connector, evict, make, prefill, work
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


def test_what_the_host_holds_is_loaded_though_a_store_does_not_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the store is not asked again."""
    monkeypatch.setattr(lookup, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(lookup, "ANSWER_SECONDS", -1.0)
    store = MemoryStore()
    manager = make(store)
    prefill(manager, "a")
    manager.release("a")
    work(manager)
    manager.poll()
    evict(manager)
    longer = TextContext("b", [*PROMPT, *range(50, 63)])
    manager.claim("b")
    for _ in range(3):
        assert manager.prefetch([longer]) == [True]
    manager.alloc(longer)
    assert manager.is_loading("b")
    work(manager)
    assert manager.poll() == {"b": True}
    assert longer.cached_prefix_length == 12
    assert store.calls.count("contains") == 1


def test_what_a_store_holds_is_known_before_the_next_one_answers() -> None:
    first, last = (bytes([i]) * 32 for i in range(2))
    known: list[set[bytes]] = []

    class Last(MemoryStore):
        def contains(self, keys: Sequence[bytes]) -> list[bool]:
            known.append(set(asked.present))
            return super().contains(keys)

    stores = MemoryStore("disk"), Last("remote")
    manager = make(*stores)
    size = manager.leaf_pools()[0].record_size
    for store, key in zip(stores, (first, last), strict=True):
        store.pages[key] = bytes(size)
    (asked,) = connector(manager).lookup([[(first, size), (last, size)]])
    work(manager)
    assert (known, asked.present, asked.done) == ([{first}], {first, last}, True)
