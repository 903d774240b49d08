"""Connects the bookkeeping of a manager's replicas with the tiers.

    ask -> (alloc: fresh pages, a load starts) -> poll: landed, or rolled back to computing
    commit -> offload -> poll: the pages may be reallocated again

Pages that a transfer copies from or to are pinned until it ends. After a reset, transfers that
began before the reset end as if they had failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from kvgraph.errors import InsufficientPagesError
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.pool.replica import Committed, PageLoad, Replica
from kvgraph.kv.pool.rows import Phase, Row
from kvgraph.kv.requests import RequestID, TextContext
from kvgraph.kv.tiers.connector import Connector, Move, Transfer
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.lookup import TierLookup
from kvgraph.kv.tiers.store import page_key

T = TypeVar("T")


class Loading:
    """A running load. `is_released`: the request of its row was released."""

    __slots__ = ("epoch", "is_released", "load", "replica", "transfer")

    def __init__(self, replica: Replica, load: PageLoad, transfer: Transfer) -> None:
        self.replica = replica
        self.epoch = replica.prefixes.epoch
        self.load = load
        self.transfer = transfer
        self.is_released = False

    @property
    def is_outdated(self) -> bool:
        """Whether the cache was reset since the load began."""
        return self.epoch is not self.replica.prefixes.epoch


class TierBridge:
    """One connector for all replicas of a manager; `pools[replica][leaf]` hold their pages."""

    def __init__(
        self,
        connector: Connector,
        replicas: Sequence[Replica],
        pools: Sequence[Sequence[LeafPools]],
    ) -> None:
        self.connector = connector
        self.pools = pools
        self._replicas = replicas
        self._leaves = {
            own: leaf
            for of_replica, replica in zip(pools, replicas, strict=True)
            for own, leaf in zip(of_replica, replica.leaves, strict=True)
        }
        self._lookups: dict[RequestID, TierLookup] = {}
        self._loading: dict[Transfer, Loading] = {}
        self._coming: Counter[bytes] = Counter()  # digests of the pages being loaded
        self._ended: dict[RequestID, bool] = {}
        self._metrics_before = KVCacheMetrics()

    def rebuilt(self, replicas: Sequence[Replica]) -> TierBridge:
        """A bridge from the same tiers to new `replicas`, without transfers; metrics are kept."""
        fresh = TierBridge(self.connector, replicas, self.pools)
        fresh._metrics_before = self._metrics_before
        return fresh

    # -- before alloc

    def ask(self, replica_idx: int, contexts: Sequence[TextContext]) -> list[bool]:
        """For each request, whether `alloc` can plan its loads; False during a look-up.

        Also False while the first page that the device lacks is being loaded for another request.
        """
        replica = self._replicas[replica_idx]
        due = [lookup for ctx in contexts if (lookup := self._due(replica, ctx))]
        if due:
            sizes = [own.record_size for own in self.pools[replica_idx]]
            answers = self.connector.lookup([lookup.wanted(sizes) for lookup in due])
            for lookup, answer in zip(due, answers, strict=True):
                lookup.answer = answer
        return [self._is_ready(replica, ctx) for ctx in contexts]

    def loadable(self, replica_idx: int, ctx: TextContext) -> list[set[bytes]] | None:
        """Digests, per leaf, of the pages that the tiers hold; None without a valid answer."""
        lookup = self._lookup_of(ctx)
        epoch = self._replicas[replica_idx].prefixes.epoch
        return None if lookup is None or not lookup.is_valid(epoch) else lookup.present()

    def _lookup_of(self, ctx: TextContext) -> TierLookup | None:
        """The request's look-up; None if there is none, or if it is of another context."""
        lookup = self._lookups.get(ctx.request_id)
        return lookup if lookup is not None and lookup.ctx is ctx else None

    def _due(self, replica: Replica, ctx: TextContext) -> TierLookup | None:
        """The look-up to ask the tiers now for the context; None if no new one is needed."""
        lookup = self._lookup_of(ctx)
        if lookup is not None and lookup.epoch is replica.prefixes.epoch:
            lookup = self._lookups[ctx.request_id] = lookup.newest()
            hit = replica.prefixes.joint(lookup.digests)
            if lookup.length == ctx.current_length and hit >= lookup.hit:
                if lookup.is_old():
                    lookup.renewal = self._lookup(replica, ctx)
                    return lookup.renewal
                return None
        self._forget_the_gone()
        lookup = self._lookups[ctx.request_id] = self._lookup(replica, ctx)
        return lookup

    def _lookup(self, replica: Replica, ctx: TextContext) -> TierLookup:
        _, digests = replica.settings.identities(ctx)
        hit = replica.prefixes.joint(digests)
        keys = []
        for leaf, own in zip(replica.leaves, self.pools[replica.index], strict=True):
            # All pages after the hit are asked for, also those on the device, which it may lose
            # unnoticed. `_due` notices if the hit itself becomes shorter.
            behind = digests[replica.prefixes.first_visible(leaf, hit) : hit]
            wanted = [digest for digest in behind if digest not in leaf.pool.index]
            wanted += digests[hit:]
            keys.append({page_key(digest, own.leaf, own.shards): digest for digest in wanted})
        return TierLookup(ctx, replica.prefixes.epoch, digests, hit, keys)

    def _forget_the_gone(self) -> None:
        """Drop look-ups of dead contexts: a request that is never claimed is never released."""
        self._lookups = {
            request_id: lookup
            for request_id, lookup in self._lookups.items()
            if lookup.ctx is not None
        }

    def _is_ready(self, replica: Replica, ctx: TextContext) -> bool:
        lookup = self._lookups[ctx.request_id]
        if not lookup.is_answered():
            return False
        hit = replica.prefixes.joint(lookup.digests)
        return hit == len(lookup.digests) or lookup.digests[hit] not in self._coming

    def planned(self, plan: Callable[[], T]) -> T:
        """Return `plan()`; if it lacks pages, make the tiers give up pages and try again."""
        while True:
            try:
                return plan()
            except InsufficientPagesError:
                if not self.connector.yield_pages():
                    raise
                self.settle()

    # -- loads

    def start(self, replica_idx: int, loads: Sequence[PageLoad]) -> None:
        """Start the loads that `Replica.apply` returned."""
        for load in loads:
            moves = [
                self._move(replica_idx, leaf, page, digest)
                for leaf, _, page, digest in load.arrivals
            ]
            self._coming.update(arrival.digest for arrival in load.arrivals)
            transfer = self.connector.load(moves)
            self._loading[transfer] = Loading(self._replicas[replica_idx], load, transfer)

    def release(self, row: Row, freed: Sequence[Sequence[bytes]]) -> None:
        """Forget a released row. `freed`: digests of its freed pages, per leaf.

        Its load may be running, or have ended before `poll` returned it. A request without pages
        keeps its look-up: after a failed load it says that nothing can be loaded, so that the
        request is computed.
        """
        self._ended.pop(row.request_id, None)
        if row.phase is Phase.LOADING:
            self._release_load(row)
        if row.phase is not Phase.CLAIMED:
            self._lookups.pop(row.request_id, None)
        self._touch(row.replica_idx, freed)

    def _release_load(self, row: Row) -> None:
        for loading in self._loading.values():
            if loading.load.row is row:
                loading.is_released = True
                self.connector.cancel(loading.transfer)

    def _touch(self, replica_idx: int, freed: Sequence[Sequence[bytes]]) -> None:
        """Mark pages as used; the start of a prefix becomes the most recently used page."""
        self.connector.touch(
            [
                page_key(digest, own.leaf, own.shards)
                for own, digests in zip(self.pools[replica_idx], freed, strict=True)
                for digest in reversed(digests)
            ]
        )

    # -- offloads

    def offload(self, replica_idx: int, committed: Sequence[Committed]) -> None:
        """Queue copies of the pages that a step committed, and pin the pages that were queued."""
        if committed:
            moves = [self._move(replica_idx, *page) for page in committed]
            for move in self.connector.offload(moves):
                self._leaves[move.pools].pool.pin([move.page], is_offload=True)

    def _move(self, replica_idx: int, leaf: int, page: int, digest: bytes) -> Move:
        own = self.pools[replica_idx][leaf]
        return Move(page_key(digest, own.leaf, own.shards), own, page)

    # -- what ended

    def poll(self) -> dict[RequestID, bool]:
        """Requests with a load that ended since the last call: True if they can run on.

        The others own no page any more and have no processed tokens; `alloc` computes them, from
        the first page that was not loaded.
        """
        self.settle()
        ended, self._ended = self._ended, {}
        return ended

    def settle(self) -> None:
        """Process ended transfers, and keep the results for the next `poll`."""
        for transfer in self.connector.poll():
            if transfer.is_load:
                self._end_load(self._loading.pop(transfer))
            for move in transfer.moves:
                pool = self._leaves[move.pools].pool
                pool.unpin([move.page], is_offload=not transfer.is_load)

    def _end_load(self, loading: Loading) -> None:
        replica, load = loading.replica, loading.load
        landed = 0 if loading.is_outdated else loading.transfer.landed
        ok = loading.transfer.ok and not loading.is_outdated
        if not loading.is_outdated:
            self._coming -= Counter(arrival.digest for arrival in load.arrivals)
        if loading.is_released:
            replica.adopt(load, landed)
            return
        self._ended[load.row.request_id] = ok
        if ok:
            replica.land(load)
        else:
            replica.roll_back(load, landed)
            load.ctx.rewind()
            nothing = TierLookup.nothing(load.ctx, replica.prefixes.epoch, len(replica.leaves))
            self._lookups[load.row.request_id] = nothing

    def reset(self) -> None:
        """Empty the tiers and cancel all loads, after the pools un-committed all pages."""
        self._coming.clear()
        for transfer in self._loading:
            self.connector.cancel(transfer)
        self.connector.reset()

    # -- metrics

    def read_metrics(self) -> KVCacheMetrics:
        """Counters of the tiers since the last reset."""
        return self.connector.metrics() - self._metrics_before

    def reset_metrics(self) -> None:
        self._metrics_before = replace(self.connector.metrics(), inflight_ops=0)
