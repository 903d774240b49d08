"""The disk tier's index: what is free has no blocks on the disk, whatever was evicted for what."""

from __future__ import annotations

import random
from hashlib import sha256
from pathlib import Path

import pytest

from kvgraph.kv.tiers.disk.folder import PrivateFolder
from kvgraph.kv.tiers.disk.index import Index, NewPage
from kvgraph.kv.tiers.disk.slabs import Slot

BLOCK = 4096
LIMIT = 20 * BLOCK
STRIDES = (BLOCK, 2 * BLOCK, 5 * BLOCK)
MODEL = sha256(b"model").digest()
OWNERS = ("one", "two")


class Disk:
    """An index over slots whose blocks are counted: claiming takes them, `give_back` frees them."""

    def __init__(self, folder: Path) -> None:
        self.blocks: set[Slot] = set()
        self.claimed: list[tuple[Slot, str]] = []
        self.time = 0
        self.index = Index(
            PrivateFolder(folder, "index"), MODEL, self.blocks.discard, lambda: False
        )

    def claim(self, stride: int, count: int, owner: str = "one", limit: int = LIMIT) -> list[Slot]:
        slots, _ = self.index.claim(stride, count, limit, owner)
        self.blocks.update(slots)
        self.claimed += [(slot, owner) for slot in slots]
        return slots

    def publish(self, slot: Slot, owner: str = "one") -> None:
        self.time += 1
        key = sha256(f"page {self.time}".encode()).digest()
        published, _ = self.index.publish([NewPage(slot, key, 9, key, self.time)], owner)
        assert published == 1
        self.claimed.remove((slot, owner))

    def release(self, owner: str) -> None:
        self.index.release([owner])
        self.claimed = [each for each in self.claimed if each[1] != owner]

    def taken(self) -> set[Slot]:
        rows = self.index._db.execute(
            "SELECT stride, slot FROM slots WHERE key IS NOT NULL OR owner IS NOT NULL"
        )
        return {Slot(*row) for row in rows}


def test_a_page_evicted_for_its_like_is_the_slot_that_is_claimed(tmp_path: Path) -> None:
    """Though another slot of that size is free: else the evicted one would keep its blocks."""
    disk = Disk(tmp_path)
    for slot in disk.claim(2 * BLOCK, 2, limit=4 * BLOCK):
        disk.publish(slot)
    disk.publish(*disk.claim(BLOCK, 1, limit=4 * BLOCK))  # the first goes, and leaves a free slot
    disk.publish(*disk.claim(2 * BLOCK, 1, limit=4 * BLOCK))  # the second goes
    assert disk.blocks == disk.taken()
    assert sum(slot.stride for slot in disk.blocks) <= 4 * BLOCK


def test_pages_evicted_for_their_like_beyond_need_give_their_blocks_back(tmp_path: Path) -> None:
    """A process with a smaller limit evicts more than it claims."""
    disk = Disk(tmp_path)
    for slot in disk.claim(BLOCK, 20):
        disk.publish(slot)
    assert len(disk.claim(BLOCK, 1, limit=4 * BLOCK)) == 1
    assert disk.blocks == disk.taken()
    assert sum(slot.stride for slot in disk.blocks) == 4 * BLOCK


@pytest.mark.parametrize("seed", range(8))
def test_free_slots_have_no_blocks_after_any_calls(seed: int, tmp_path: Path) -> None:
    disk, rng = Disk(tmp_path), random.Random(seed)
    evicting = 0
    for _ in range(250):
        action, owner = rng.random(), rng.choice(OWNERS)
        if action < 0.5:
            before = disk.taken()
            slots = disk.claim(rng.choice(STRIDES), rng.randint(1, 3), owner)
            evicting += bool(before - disk.taken() or (before & set(slots)))
        elif action < 0.9 and disk.claimed:
            disk.publish(*rng.choice(disk.claimed))
        elif action < 0.96:
            disk.release(owner)
        elif action < 0.98:
            disk.index.shrink(rng.randint(0, LIMIT))
        else:
            disk.index.clear()
        assert disk.blocks == disk.taken()
        assert sum(slot.stride for slot in disk.blocks) <= LIMIT
    assert evicting > 5
