"""A page store in a dictionary, which can be told to fail in every way that a store may."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvgraph.kv.tiers.open import StoreOpener
from kvgraph.kv.tiers.store import PageStore, StoreStats


class MemoryStore:
    """Keeps what it is given, unless `fails(call)` says that this call fails.

    `call` is "contains" (claims to hold everything), "read" (a miss, `out` is garbage), "write" or
    "clear" (the store misses and drops until it succeeds). `content` is what of a record its key
    names.
    """

    def __init__(
        self,
        name: str = "disk",
        fails: Callable[[str], bool] | None = None,
        content: Callable[[bytes], bytes] = bytes,
    ) -> None:
        self.name = name
        self.fails = fails or (lambda call: False)
        self.content = content
        self.pages: dict[bytes, bytes] = {}
        self.calls: list[str] = []
        self.reads = self.writes = 0
        self.is_closed = self.to_clear = False

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        self.calls.append("contains")
        self.try_to_clear()
        held = () if self.to_clear else self.pages
        return [key in held or self.fails("contains") for key in keys]

    def read(self, key: bytes, out: memoryview) -> bool:
        self.calls.append("read")
        self.try_to_clear()
        record = None if self.to_clear else self.pages.get(key)
        if record is None or len(record) != len(out) or self.fails("read"):
            out[:] = b"\x7f" * len(out)
            return False
        out[:] = record
        self.reads += 1
        return True

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        self.calls.append("write")
        self.try_to_clear()
        if self.to_clear or self.fails("write"):
            return False
        record = b"".join(parts)
        held = self.pages.setdefault(key, record)
        assert self.content(held) == self.content(record), "a key names its content"
        self.writes += 1
        return True

    def touch(self, keys: Sequence[bytes]) -> None:
        self.calls.append("touch")

    def flush(self) -> None:
        self.calls.append("flush")

    def clear(self) -> None:
        self.to_clear = True
        self.try_to_clear()

    def try_to_clear(self) -> None:
        if self.to_clear and not self.fails("clear"):
            self.pages.clear()
            self.to_clear = False

    def stats(self) -> StoreStats:
        return StoreStats(
            num_pages=1000, num_used_pages=len(self.pages), read=self.reads, written=self.writes
        )

    def close(self) -> None:
        self.is_closed = True


def opener(store: PageStore) -> StoreOpener:
    """What opens a store that is open already, whatever the model."""
    return lambda fingerprint, page_bytes: store
