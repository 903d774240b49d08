"""Pages of a disk store, as its tests write and read them."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from kvgraph.kv.tiers.disk.store import DiskStore

MODEL, OTHER = sha256(b"model").digest(), sha256(b"other").digest()
SIZE = 8192
KEYS = [sha256(f"key {i}".encode()).digest() for i in range(64)]


def page(i: int, size: int = SIZE) -> bytes:
    return (KEYS[i] * (size // 32 + 1))[:size]


def opened(
    folder: Path, pages: int = 100, model: bytes = MODEL, page_bytes: int = SIZE
) -> DiskStore:
    return DiskStore(folder, pages * SIZE, model, page_bytes)


def put(store: DiskStore, *which: int) -> None:
    for i in which:
        assert store.write(KEYS[i], [memoryview(page(i))])


def got(store: DiskStore, i: int, size: int = SIZE) -> bytes | None:
    """The page as read into poisoned memory."""
    out = bytearray(b"\xff" * size)
    return bytes(out) if store.read(KEYS[i], memoryview(out)) else None


def held(store: DiskStore) -> list[int]:
    return [i for i, is_here in enumerate(store.contains(KEYS)) if is_here]


def all_right(store: DiskStore, count: int) -> list[bool]:
    """Which of the first pages are served; none may be wrong."""
    found = [got(store, i) for i in range(count)]
    assert all(content in (None, page(i)) for i, content in enumerate(found))
    return [content is not None for content in found]


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvgraph-*/*.pages"))


def put_or_drop(store: DiskStore) -> None:
    for i in range(40, 48):
        store.write(KEYS[i], [memoryview(page(i))])
    store.flush()
