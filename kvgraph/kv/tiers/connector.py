"""Interface that moves pages between the device and the tiers below it, for a manager.

Order of a step: load, offload, run. Only calls that say so wait for a copy or for I/O. No call
raises for a tier that fails: its pages are misses.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import NamedTuple, Protocol

from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.store import StoreStats


class Move(NamedTuple):
    """One page of a leaf's pools, and its key in the tiers."""

    key: bytes
    pools: LeafPools
    page: int


class Lookup:
    """Look-up of `keys` (key, record size). `present`: keys that the tiers hold, complete once
    `done`; pages may still be missing when they are loaded.

    Before `done`, `present` has the keys of the tiers that answered so far. It is replaced, never
    changed in place, since another thread may read it.
    """

    __slots__ = ("done", "keys", "present")

    def __init__(self, keys: Sequence[tuple[bytes, int]] = ()) -> None:
        self.keys = keys
        self.present: Set[bytes] = frozenset()
        self.done = not keys

    def add(self, found: Set[bytes]) -> None:
        self.present = self.present | {key for key, _ in self.keys if key in found}

    def so_far(self) -> Lookup:
        """A finished look-up with the keys that are present now."""
        answer = Lookup()
        answer.present = self.present
        return answer


class Transfer:
    """Moves that end together: a load or an offload. `landed`: number of a load's first pages that
    were loaded."""

    __slots__ = ("is_cancelled", "is_load", "landed", "moves")

    def __init__(self, moves: Sequence[Move], *, is_load: bool) -> None:
        self.moves = moves
        self.is_load = is_load
        self.landed = 0
        self.is_cancelled = False

    @property
    def ok(self) -> bool:
        """Whether this is a load and all its pages were loaded."""
        return self.is_load and self.landed == len(self.moves)


class Connector(Protocol):
    """The tiers as a manager uses them, from one thread."""

    def lookup(self, asked: Sequence[Sequence[tuple[bytes, int]]]) -> list[Lookup]:
        """Look up, for each request, which pages (key, record size) could be loaded.

        A look-up is done at once if no store must be asked; all others are asked together.
        """

    def load(self, moves: Sequence[Move]) -> Transfer:
        """Start copies of pages to the device, in order; the transfer is `ok` if all succeed.

        The caller keeps the pages held until `poll` returns the transfer.
        """

    def cancel(self, transfer: Transfer) -> None:
        """End a load soon, because no request waits for it any more."""

    def offload(self, moves: Sequence[Move]) -> list[Move]:
        """Queue copies of committed pages; return the moves that were queued.

        The caller keeps these pages held until `poll` returns them. Other pages are in the tiers
        already, or are dropped and counted.
        """

    def has_settled(self, keys: Collection[bytes]) -> bool:
        """Whether no page of these keys is queued for a tier, or being copied or written to one."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """Mark pages as used; the last key becomes the most recently used one."""

    def poll(self) -> Sequence[Transfer]:
        """Transfers that ended since the last call."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `poll` has a transfer to return or a look-up is done.

        Returns False after the timeout, or if closed.
        """

    def yield_pages(self) -> bool:
        """Free pages that transfers hold, because the device lacks pages; False if none holds any.

        Waits for running copies; drops offloads that wait for slots.
        """

    def drain(self) -> None:
        """End and forget every load and offload: `poll` returns none of them.

        Waits for running copies; drops the rest.
        """

    def reset(self) -> None:
        """Empty every tier except the bound prefixes; return when they are empty.

        No page that was offloaded or loaded before is held afterwards. Queued offloads end here;
        running transfers go on, and `poll` returns them.
        """

    def require_open(self, call: str) -> None:
        """Raise StoreError about `call` if the stores are closed, so that it cannot reach them."""

    def metrics(self) -> KVCacheMetrics:
        """Counters of copies and I/O since the start; `inflight_ops` is the current number."""

    def stats(self) -> dict[str, StoreStats]:
        """Figures of each tier by its name, from the host down."""

    def close(self) -> None:
        """Finish queued work, end the threads and close the stores. Idempotent.

        Queued work has 10 seconds; the rest is dropped and counted. As soon as it is called,
        look-ups find nothing, loads fail and offloads are refused. In a fork it does nothing.
        """

    def drop_queued(self) -> None:
        """Refuse offloads, and drop and count queued copies and writes: `close` waits for none."""

    def abandon(self) -> None:
        """Close without waiting; a finaliser may call it in any thread."""
