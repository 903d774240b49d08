"""The host tier: slots of one slab, least recently used out first.

    free ---reserve---> pinned, unseen ---publish---> held (pinned or not) ---evict---> free
                                  '--------unpin, where it was not published-----------^

A slot is pinned while a copy to or from it runs. Besides the tier's own pages the slab has staging
slots, through which pages pass between the device and the stores below.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.contract.not_copyable import NotCopyable

Bytes = npt.NDArray[np.uint8]


class Slot:
    """Memory for one record, `data [record size]`. `pins`: number of copies from or to it."""

    __slots__ = ("data", "is_held", "key", "pins", "shelf")

    def __init__(self, shelf: Shelf, data: Bytes) -> None:
        self.shelf = shelf
        self.data = data
        self.key = b""
        self.pins = 0
        self.is_held = False


class Shelf:
    """Slots of one record size; at most `pages` of them are held at a time."""

    def __init__(self, size: int, pages: int, staging: int, slab: Bytes) -> None:
        self.size = size
        self.pages = pages
        self.held: OrderedDict[bytes, Slot] = OrderedDict()  # oldest first
        self._slab = slab
        self._unused = pages + staging  # slots that were never handed out
        self._free: list[Slot] = []

    def take(self) -> Slot | None:
        """Take a free slot, or the oldest held slot that is not pinned; None if there is none."""
        if self._free:
            return self._free.pop()
        if self._unused:
            self._unused -= 1
            start = self._unused * self.size
            return Slot(self, self._slab[start : start + self.size])
        return self.evict()

    def give(self, slot: Slot) -> None:
        self._free.append(slot)

    def evict(self) -> Slot | None:
        slot = next((slot for slot in self.held.values() if not slot.pins), None)
        if slot is not None:
            del self.held[slot.key]
            slot.is_held = False
        return slot


class HostStore(NotCopyable):
    """Pages in host memory, by key. Not thread-safe: the connector's lock guards it.

    `pages`, `staging`: numbers of slots by record size. `allocate(nbytes)` allocates the slab.
    Memory is only touched when slots are used.
    """

    def __init__(
        self,
        pages: Mapping[int, int],
        staging: Mapping[int, int],
        allocate: Callable[[int], Bytes],
    ) -> None:
        counts = {size: pages.get(size, 0) + staging.get(size, 0) for size in {**pages, **staging}}
        slab = allocate(sum(size * count for size, count in counts.items()))
        self.num_pages = sum(pages.values())
        self.evicted = 0
        self._shelves: dict[int, Shelf] = {}
        self._reserved: dict[bytes, Slot] = {}
        start = 0
        for size, count in counts.items():
            own = slab[start : start + size * count]
            held = pages.get(size, 0)
            self._shelves[size] = Shelf(size, held, count - held, own)
            start += size * count

    @property
    def num_used_pages(self) -> int:
        return sum(len(shelf.held) for shelf in self._shelves.values())

    @property
    def nbytes(self) -> int:
        """Bytes of the pages held."""
        return sum(len(shelf.held) * shelf.size for shelf in self._shelves.values())

    def has(self, key: bytes, size: int) -> bool:
        return key in self._shelves[size].held

    def knows(self, key: bytes, size: int) -> bool:
        """Whether the page is held, or a copy to its slot is running."""
        return key in self._shelves[size].held or key in self._reserved

    def is_coming(self, key: bytes) -> bool:
        """Whether a copy of the page to a slot is running."""
        return key in self._reserved

    def reserve(self, key: bytes, size: int) -> Slot | None:
        """Take a pinned slot to fill, which no look-up finds yet. None if all slots are pinned, or
        if `key` is known."""
        if self.knows(key, size):
            return None
        shelf = self._shelves[size]
        held = len(shelf.held)
        slot = shelf.take()
        if slot is None:
            return None
        self.evicted += held - len(shelf.held)
        slot.key, slot.pins = key, 1
        self._reserved[key] = slot
        return slot

    def publish(self, slot: Slot) -> None:
        """Add a filled slot to the tier as its youngest page, if the tier has room."""
        shelf = slot.shelf
        del self._reserved[slot.key]
        if len(shelf.held) >= shelf.pages:
            oldest = shelf.evict() if shelf.pages else None
            if oldest is None:
                return
            self.evicted += 1
            shelf.give(oldest)
        shelf.held[slot.key] = slot
        slot.is_held = True

    def abandon(self, slot: Slot) -> None:
        """Free a reserved slot that was not filled with a page."""
        del self._reserved[slot.key]
        self.unpin(slot)

    def pin(self, key: bytes, size: int) -> Slot | None:
        """Pin the slot that holds `key` and make it the youngest; None if no slot holds it."""
        shelf = self._shelves[size]
        slot = shelf.held.get(key)
        if slot is not None:
            slot.pins += 1
            shelf.held.move_to_end(key)
        return slot

    def unpin(self, slot: Slot) -> None:
        slot.pins -= 1
        if not slot.pins and not slot.is_held:
            slot.shelf.give(slot)

    def pin_only(self, slots: Iterable[Slot]) -> None:
        """Set the pins of `slots` to one and of all other slots to none."""
        for shelf in self._shelves.values():
            for slot in shelf.held.values():
                slot.pins = 0
        for slot in slots:
            slot.pins = 1

    def touch(self, keys: Sequence[bytes]) -> None:
        """Make these pages the youngest, the last key the youngest of all."""
        for key in keys:
            for shelf in self._shelves.values():
                if key in shelf.held:
                    shelf.held.move_to_end(key)

    def clear(self) -> None:
        """Remove all pages. Pinned slots become free when they are unpinned."""
        for shelf in self._shelves.values():
            for slot in shelf.held.values():
                slot.is_held = False
                if not slot.pins:
                    shelf.give(slot)
            shelf.held.clear()
