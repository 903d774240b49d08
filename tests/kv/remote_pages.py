"""Pages of a remote store, as its tests write and read them."""

from __future__ import annotations

from hashlib import sha256

from kvgraph.kv.tiers.remote import RemoteStore

MODEL, OTHER = sha256(b"model").digest(), sha256(b"other").digest()
SIZE = 20_000
KEYS = [sha256(f"key {i}".encode()).digest() for i in range(64)]


def page(i: int, size: int = SIZE) -> bytes:
    return (KEYS[i] * (size // 32 + 1))[:size]


def put(store: RemoteStore, *which: int) -> list[bool]:
    return [store.write(KEYS[i], [memoryview(page(i))]) for i in which]


def got(store: RemoteStore, i: int, size: int = SIZE) -> bytes | None:
    """The page as read into poisoned memory."""
    out = bytearray(b"\xff" * size)
    return bytes(out) if store.read(KEYS[i], memoryview(out)) else None


def name(i: int) -> bytes:
    return f"kvgraph-1:{MODEL.hex()[:32]}:".encode() + KEYS[i]


def recover(store: RemoteStore) -> None:
    """As if the pause were over."""
    store._usable_at = store._writable_at = 0.0
