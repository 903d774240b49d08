"""What the managers' bookkeeping and the tiers tell each other.

    ask -> (alloc: fresh pages, a load starts) -> poll: landed, or rolled back to computing
    commit -> offload -> poll: the pages may be reallocated again

Pages that a transfer copies from or to are pinned until it ends. After a reset transfers that
began before it end as if they had failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvgraph.errors import InsufficientPagesError
from kvgraph.kv.leaf import Leaf
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.requests import RequestID, TextContext
from kvgraph.kv.tiers.asked import Asked
from kvgraph.kv.tiers.connector import Connector, Move, Transfer
from kvgraph.kv.tiers.place import Place
from kvgraph.kv.tiers.store import page_key

if TYPE_CHECKING:
    from kvgraph.kv.replica import Replica
    from kvgraph.kv.rows import Row

T = TypeVar("T")


class Arrival(NamedTuple):
    """A page to come: position `at` of the row in leaf `leaf`."""

    leaf: int
    at: int
    page: int
    digest: bytes


class Loading:
    """A row whose first pages are on their way; `row` is None once it was released."""

    __slots__ = ("arrivals", "ctx", "epoch", "hit", "replica", "row", "transfer")

    def __init__(
        self,
        replica: Replica,
        row: Row,
        ctx: TextContext,
        arrivals: list[Arrival],
        transfer: Transfer,
        hit: int,
    ) -> None:
        self.replica = replica
        self.epoch = replica.hits.epoch
        self.row: Row | None = row
        self.ctx = ctx
        self.arrivals = arrivals
        self.transfer = transfer
        self.hit = hit  # pages of the row that will be known content

    @property
    def is_outdated(self) -> bool:
        """Whether the cache was reset since the load began."""
        return self.epoch is not self.replica.hits.epoch


class Tiering:
    """One connector behind all replicas of a manager; `places[replica][leaf]` are their pools."""

    def __init__(
        self,
        connector: Connector,
        leaves: Mapping[Place, Leaf],
        places: Sequence[Sequence[Place]],
    ) -> None:
        self.connector = connector
        self.places = places
        self._leaves = leaves
        self._loading: dict[Transfer, Loading] = {}
        self._coming: Counter[bytes] = Counter()  # digests of the pages being loaded
        self._offers: list[Move] = []
        self._ended: dict[RequestID, bool] = {}
        self._metrics_before = KVCacheMetrics()

    def rebuilt(self, replicas: Sequence[Replica]) -> Tiering:
        """The same tiers behind `replicas` that know of no transfer; metrics go on."""
        leaves = {
            place: leaf
            for own, replica in zip(self.places, replicas, strict=True)
            for place, leaf in zip(own, replica.leaves, strict=True)
        }
        fresh = Tiering(self.connector, leaves, self.places)
        fresh._metrics_before = self._metrics_before
        for replica in replicas:
            replica.tiers = fresh
        return fresh

    # -- before alloc

    def ask(self, replica: Replica, contexts: Sequence[TextContext]) -> list[bool]:
        """Whether `alloc` can know what to load; False while the tiers are looking.

        Also False while the first page that the device lacks is being loaded for another request.
        """
        due = [question for ctx in contexts if (question := self._due(replica, ctx))]
        if due:
            sizes = [place.record_size for place in self.places[replica.index]]
            lookups = self.connector.lookup([question.wanted(sizes) for question in due])
            for question, lookup in zip(due, lookups, strict=True):
                question.lookup = lookup
        return [self._is_ready(replica, ctx) for ctx in contexts]

    def _due(self, replica: Replica, ctx: TextContext) -> Asked | None:
        """What to ask about the context now, if anything; the context keeps it."""
        if ctx.asked is not None and ctx.asked.epoch is replica.hits.epoch:
            asked = ctx.asked = ctx.asked.newest()
            hit = replica.hits.joint(asked.digests)
            if asked.length == ctx.current_length and hit >= asked.hit:
                if asked.is_old():
                    asked.renewal = self._question(replica, ctx)
                    return asked.renewal
                return None
        ctx.asked = self._question(replica, ctx)
        return ctx.asked

    def _question(self, replica: Replica, ctx: TextContext) -> Asked:
        _, digests = replica.settings.identities(ctx)
        hit = replica.hits.joint(digests)
        keys = []
        for leaf, place in zip(replica.leaves, self.places[replica.index], strict=True):
            # What the device has behind the hit it may lose unnoticed; less of the hit is noticed.
            behind = digests[replica.hits.first_visible(leaf, hit) : hit]
            wanted = [digest for digest in behind if digest not in leaf.pool.index]
            wanted += digests[hit:]
            keys.append({page_key(digest, place.leaf, place.shards): digest for digest in wanted})
        return Asked(replica.hits.epoch, ctx.current_length, digests, hit, keys)

    def _is_ready(self, replica: Replica, ctx: TextContext) -> bool:
        asked = ctx.asked
        assert asked is not None, "asked just now"
        if not asked.is_answered():
            return False
        hit = replica.hits.joint(asked.digests)
        return hit == len(asked.digests) or asked.digests[hit] not in self._coming

    def planned(self, plan: Callable[[], T]) -> T:
        """`plan()`, once the tiers have given up the pages that they hold if it needs them."""
        while True:
            try:
                return plan()
            except InsufficientPagesError:
                if not self.connector.yield_pages():
                    raise
                self.settle()

    # -- loads

    def start(
        self,
        replica: Replica,
        row: Row,
        ctx: TextContext,
        wanted: Sequence[Sequence[int]],
        hit: int,
    ) -> None:
        """Take pages for the positions `wanted[leaf]` of the row, and load them."""
        arrivals = []
        moves = []
        for i, (leaf, positions) in enumerate(zip(replica.leaves, wanted, strict=True)):
            place = self.places[replica.index][i]
            pages = leaf.pool.take(len(positions))
            leaf.pool.pin(pages)
            for at, page in zip(positions, pages, strict=True):
                digest = row.digests[at]
                replica.point(row, i, at, page)
                arrivals.append(Arrival(i, at, page, digest))
                moves.append(Move(page_key(digest, place.leaf, place.shards), place, page))
        self._coming.update(arrival.digest for arrival in arrivals)
        transfer = self.connector.load(moves)
        row.loading = Loading(replica, row, ctx, arrivals, transfer, hit)
        self._loading[transfer] = row.loading

    def forget(self, row: Row) -> None:
        """The row is released; its pages may be on their way, or have ended unseen by `poll`."""
        self._ended.pop(row.request_id, None)
        if row.loading is not None:
            row.loading.row = None
            self.connector.cancel(row.loading.transfer)

    # -- offloads

    def offer(self, replica: Replica, i: int, page: int, digest: bytes) -> None:
        """A page of leaf `i` was committed."""
        place = self.places[replica.index][i]
        self._offers.append(Move(page_key(digest, place.leaf, place.shards), place, page))

    def offload_offers(self) -> None:
        """After a step: queue what it committed."""
        if self._offers:
            for move in self.connector.offload(self._offers):
                self._leaves[move.place].pool.pin([move.page])
            self._offers = []

    def touch(self, replica: Replica, row: Row) -> None:
        """The row's committed pages were used: its prefix most of all."""
        keys = [
            page_key(digest, place.leaf, place.shards)
            for i, place in enumerate(self.places[replica.index])
            for digest in reversed(row.digests[row.passed[i] : row.committed])
        ]
        self.connector.touch(keys)

    # -- what ended

    def poll(self) -> dict[RequestID, bool]:
        """Requests whose load ended since the last call: True if they can run on.

        The others own no page any more and have processed nothing; `alloc` computes them.
        """
        self.settle()
        ended, self._ended = self._ended, {}
        return ended

    def settle(self) -> None:
        """Do what `poll` does, and keep its answer for it."""
        for transfer in self.connector.poll():
            if transfer.is_load:
                self._end_load(self._loading.pop(transfer))
            for move in transfer.moves:
                self._leaves[move.place].pool.unpin([move.page])

    def _end_load(self, loading: Loading) -> None:
        row, ok = loading.row, loading.transfer.ok and not loading.is_outdated
        if not loading.is_outdated:
            self._coming -= Counter(arrival.digest for arrival in loading.arrivals)
        if row is not None:
            row.loading = None
            self._ended[row.request_id] = ok
        if ok:
            self._land(loading)
        elif row is not None:
            self._roll_back(loading, row)

    def _land(self, loading: Loading) -> None:
        """Publish the pages, of a released row too: their content is right all the same."""
        replica, row = loading.replica, loading.row
        for i, at, page, digest in reversed(loading.arrivals):
            pool = replica.leaves[i].pool
            if row is None:
                pool.publish(page, digest)
            else:
                known = pool.commit(page, digest)
                if known != page:
                    replica.point(row, i, at, known)
        if row is not None:
            replica.land(row, loading.hit, len(loading.arrivals))

    def _roll_back(self, loading: Loading, row: Row) -> None:
        loading.replica.roll_back(row)
        loading.ctx.rewind()
        epoch, length = loading.replica.hits.epoch, loading.ctx.current_length
        loading.ctx.asked = Asked.nothing(epoch, length, len(row.pages))

    def reset(self) -> None:
        """After the pools forgot: empty the tiers, and end what is on its way, unpublished."""
        self._offers = []
        self._coming.clear()
        for transfer in self._loading:
            self.connector.cancel(transfer)
        self.connector.reset()

    # -- metrics

    def read_metrics(self) -> KVCacheMetrics:
        """What the tiers did since the last reset."""
        return self.connector.metrics() - self._metrics_before

    def reset_metrics(self) -> None:
        self._metrics_before = replace(self.connector.metrics(), inflight_ops=0)
