"""The host tier's slots: never more pages than it may hold, never one that somebody copies."""

from __future__ import annotations

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvgraph.kv.tiers.host import HostStore, Slot

SIZES = (8, 24)


def make(pages: dict[int, int], staging: dict[int, int] | None = None) -> HostStore:
    return HostStore(pages, staging or {}, lambda nbytes: np.zeros(nbytes, np.uint8))


def put(host: HostStore, key: bytes, size: int = 8) -> Slot | None:
    slot = host.reserve(key, size)
    if slot is not None:
        host.publish(slot)
        host.unpin(slot)
    return slot


def test_the_least_recently_used_page_goes_first() -> None:
    host = make({8: 3})
    for key in (b"a", b"b", b"c"):
        put(host, key)
    host.touch([b"a"])
    put(host, b"d")
    assert [host.has(key, 8) for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]
    pinned = host.pin(b"c", 8)
    assert pinned is not None
    put(host, b"e")
    put(host, b"f")
    assert host.has(b"c", 8), "pinned"
    host.unpin(pinned)
    assert (host.num_used_pages, host.nbytes, host.evicted) == (3, 24, 3)


def test_a_page_that_was_copied_is_the_youngest() -> None:
    host = make({8: 2})
    for key in (b"a", b"b"):
        put(host, key)
    pinned = host.pin(b"a", 8)
    assert pinned is not None
    host.unpin(pinned)
    put(host, b"c")
    assert [host.has(key, 8) for key in (b"a", b"b", b"c")] == [True, False, True]


def test_a_page_is_seen_once_it_is_published() -> None:
    host = make({8: 2})
    slot = host.reserve(b"a", 8)
    assert slot is not None
    assert (host.has(b"a", 8), host.knows(b"a", 8)) == (False, True)
    assert host.pin(b"a", 8) is None
    assert host.reserve(b"a", 8) is None, "it is on its way"
    host.abandon(slot)
    assert not host.knows(b"a", 8)
    assert put(host, b"a") is not None
    assert host.reserve(b"a", 8) is None, "it is here"


def test_no_slot_is_taken_from_under_a_copy() -> None:
    host = make({8: 2})
    slots = [host.reserve(key, 8) for key in (b"a", b"b")]
    assert all(slots)
    assert host.reserve(b"c", 8) is None


def test_without_pages_slots_are_only_staging() -> None:
    host = make({8: 0}, {8: 1})
    slot = host.reserve(b"a", 8)
    assert slot is not None
    host.publish(slot)
    assert (host.num_pages, host.num_used_pages, host.has(b"a", 8)) == (0, 0, False)
    assert host.reserve(b"b", 8) is None
    host.unpin(slot)
    assert host.reserve(b"b", 8) is slot


class Slots(RuleBasedStateMachine):
    """Random use; every filled slot keeps what was put into it while it is held or pinned."""

    @initialize(pages=st.tuples(st.integers(0, 3), st.integers(0, 3)), staging=st.integers(1, 2))
    def build(self, pages: tuple[int, int], staging: int) -> None:
        self.pages = dict(zip(SIZES, pages, strict=True))
        self.host = make(self.pages, dict.fromkeys(SIZES, staging))
        self.most = {size: count + staging for size, count in self.pages.items()}
        self.filling: list[Slot] = []
        self.pinned: list[Slot] = []

    @rule(key=st.integers(1, 9), size=st.sampled_from(SIZES))
    def reserve(self, key: int, size: int) -> None:
        slot = self.host.reserve(bytes([key, size]), size)
        if slot is not None:
            assert slot not in self.filling + self.pinned
            assert len(slot.data) == size
            slot.data[:] = key
            self.filling.append(slot)

    @rule(ok=st.booleans(), keep=st.booleans())
    def finish(self, ok: bool, keep: bool) -> None:
        if self.filling:
            slot = self.filling.pop(0)
            if not ok:
                self.host.abandon(slot)
                return
            self.host.publish(slot)
            if keep:
                self.pinned.append(slot)
            else:
                self.host.unpin(slot)

    @rule(key=st.integers(1, 9), size=st.sampled_from(SIZES))
    def pin(self, key: int, size: int) -> None:
        slot = self.host.pin(bytes([key, size]), size)
        if slot is not None:
            self.pinned.append(slot)

    @rule()
    def unpin(self) -> None:
        if self.pinned:
            self.host.unpin(self.pinned.pop(0))

    @rule()
    def clear(self) -> None:
        self.host.clear()
        assert self.host.num_used_pages == 0

    @rule(key=st.integers(1, 9))
    def touch(self, key: int) -> None:
        self.host.touch([bytes([key, size]) for size in SIZES])

    @invariant()
    def content_stays(self) -> None:
        if not hasattr(self, "host"):
            return
        held = [slot for s in self.host._shelves.values() for slot in s.held.values()]
        for slot in {*held, *self.filling, *self.pinned}:
            assert (slot.data == slot.key[0]).all()
        for size, shelf in self.host._shelves.items():
            assert len(shelf.held) <= self.pages[size]
            in_use = {s for s in [*held, *self.filling, *self.pinned] if s.shelf is shelf}
            assert len(in_use) + len(shelf._free) + shelf._unused == self.most[size]
            assert not in_use & set(shelf._free)


TestSlots = Slots.TestCase
TestSlots.settings = settings(max_examples=100, stateful_step_count=40)
