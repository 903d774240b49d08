"""What moves pages between the device and the tiers below it, as a manager sees it.

Order of a step: load, offload, run. Nothing here waits for a copy or for I/O but the calls that
say so, and nothing raises for a tier that fails: what it held is missed.
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
    """Which of `keys` (key, record size) the tiers hold: `present` once `done`; only advice.

    Until then `present` is what the tiers that answered hold; it is replaced, never changed, since
    another thread may read it.
    """

    __slots__ = ("done", "keys", "present")

    def __init__(self, keys: Sequence[tuple[bytes, int]] = ()) -> None:
        self.keys = keys
        self.present: Set[bytes] = frozenset()
        self.done = not keys

    def add(self, found: Set[bytes]) -> None:
        self.present = self.present | {key for key, _ in self.keys if key in found}

    def so_far(self) -> Lookup:
        """What is present now as an answer that is done."""
        answer = Lookup()
        answer.present = self.present
        return answer


class Transfer:
    """Moves that end together: a load, whose first `landed` pages landed, or an offload."""

    __slots__ = ("is_cancelled", "is_load", "landed", "moves")

    def __init__(self, moves: Sequence[Move], *, is_load: bool) -> None:
        self.moves = moves
        self.is_load = is_load
        self.landed = 0
        self.is_cancelled = False

    @property
    def ok(self) -> bool:
        """Whether all of a load's pages landed."""
        return self.is_load and self.landed == len(self.moves)


class Connector(Protocol):
    """What a manager asks of the tiers, from one thread."""

    def lookup(self, asked: Sequence[Sequence[tuple[bytes, int]]]) -> list[Lookup]:
        """For each request, which pages (key, record size) could be loaded.

        Done at once where no store is asked; those that are not are asked together.
        """

    def load(self, moves: Sequence[Move]) -> Transfer:
        """Copy pages to the device, in order: all of them, or the transfer is not `ok`.

        The caller keeps the pages held until `poll` returns the transfer.
        """

    def cancel(self, transfer: Transfer) -> None:
        """No request waits for this load any more: end it soon, landed or not."""

    def offload(self, moves: Sequence[Move]) -> list[Move]:
        """Queue copies of committed pages; returns those that it took.

        The caller keeps these pages held until `poll` returns them; the rest is known below
        already, or dropped and counted.
        """

    def has_settled(self, keys: Collection[bytes]) -> bool:
        """Whether no page of these keys is on its way down: the stores have it, or never will."""

    def touch(self, keys: Sequence[bytes]) -> None:
        """These pages were used; the last of them is the most precious."""

    def poll(self) -> Sequence[Transfer]:
        """What ended since the last call."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `poll` has something to return or a look-up is done.

        False: timed out, or closed.
        """

    def yield_pages(self) -> bool:
        """The device is short of pages: end what holds them, soonest. False if nothing does.

        Waits for copies that go on; drops offloads that wait for slots.
        """

    def drain(self) -> None:
        """End every load and offload, and forget them: `poll` tells of none of them.

        Waits for copies that go on; the rest is dropped.
        """

    def reset(self) -> None:
        """Empty every tier but the bound prefixes; returns when that is done.

        Nothing that was offloaded or loaded before is held after it. Queued offloads end here;
        transfers that have begun go on, and `poll` returns them.
        """

    def metrics(self) -> KVCacheMetrics:
        """Counters of copies and I/O since the start; `inflight_ops` is now's."""

    def stats(self) -> dict[str, StoreStats]:
        """Figures of each tier by its name, from the host down."""

    def close(self) -> None:
        """Finish what is queued, end the threads and close the stores. Idempotent.

        What is queued then has 10 seconds; what is left is dropped and counted. From its start on
        look-ups find nothing, loads fail and offloads are refused. In a fork it does nothing.
        """

    def drop_queued(self) -> None:
        """Take no more pages down, and drop and count those that wait: `close` waits for none."""

    def abandon(self) -> None:
        """As `close`, but return at once: a finaliser may call it, wherever it runs."""
