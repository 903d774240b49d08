"""The paged cache manager: requests own pages of a pool that stays outside the graph.

    claim -> (alloc_batch -> runtime_inputs -> [session runs] -> ctx.update -> step)* -> release

Bookkeeping is one pass over the batch per call; pages are touched only where they change.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property

from kvgraph.contract.inputs import BatchCharacteristics, KVCacheInputs, SessionInterface
from kvgraph.contract.params import KVCacheParamInterface, KVCacheStrategy
from kvgraph.contract.synonyms import also_named
from kvgraph.errors import ParamsError
from kvgraph.kv.build import make_replicas, make_settings, nested, open_bridge, require_sizes
from kvgraph.kv.pool.batch import BatchRows
from kvgraph.kv.pool.checks import verify
from kvgraph.kv.pool.journal import Event
from kvgraph.kv.pool.leaf import require_params
from kvgraph.kv.pool.plan import AllocPlan, Loadable
from kvgraph.kv.pool.replica import Replica
from kvgraph.kv.pool.rows import row_of
from kvgraph.kv.pool.slots import Slots, no_slots
from kvgraph.kv.queries import PagedQueries
from kvgraph.kv.requests import (
    Batches,
    RequestID,
    TextContext,
    at_replica,
    per_replica,
    require_context,
    require_key,
    require_steps,
    require_unclaimed,
)
from kvgraph.kv.tiers.open import StoreOpener

OTHER_MANAGERS = {
    KVCacheStrategy.CONTINUOUS: "ContinuousBatchingKVCacheManager",
    KVCacheStrategy.PADDED: "PaddedKVCacheManager",
}
"""Managers of caches that are not paged, by the cache's strategy."""


class PagedKVCacheManager(PagedQueries):
    """Paged KV cache of one or more data-parallel replicas, each of one or more shards.

    - `params`: one cache, or a tree of caches (`MultiKVCacheParams`) behind each request
    - `session` owns memory: `session.allocate(symbol, sizes)`; None: lazily zeroed host memory
    - `total_num_pages`: usable pages of each replica (of each leaf, or by leaf path); the null
      page is extra
    - `max_batch_size`: requests that one replica can hold claimed at once
    - `identity`: identity of the model, part of every page's identity; default: the session's
    - `max_seq_len`: longest context in tokens; default: as many as the pool holds
    - `enable_runtime_checks`: verify all bookkeeping after every call (slow)
    - `total_num_host_pages`: pages of the host tier, which all replicas share (of each leaf, or by
      leaf path)
    - `stores`, `sources`: openers of the tiers below the host, fastest first; pages are written to
      all `stores`, and `sources` are only read

    With tiers a first `alloc` may find pages that are not on the device: the request is held
    (`is_loading`) until `poll` returns that they are loaded. Page counts of a tree are sums over
    its leaves.
    """

    _tier_threads = True

    def __init__(
        self,
        params: KVCacheParamInterface,
        session: SessionInterface | None,
        total_num_pages: int | Mapping[str, int],
        total_num_host_pages: int | Mapping[str, int] = 0,
        enable_runtime_checks: bool = False,
        *,
        max_batch_size: int,
        identity: bytes = b"",
        max_seq_len: int | None = None,
        stores: Sequence[StoreOpener] = (),
        sources: Sequence[StoreOpener] = (),
    ) -> None:
        self._require_params(params, session)
        sizes = require_sizes(
            params, total_num_pages, total_num_host_pages, max_batch_size, max_seq_len
        )
        has_tiers = bool(stores or sources) or any(sizes.host_pages.values())
        identity = identity or (session.identity if session is not None else b"")
        settings = make_settings(params, sizes, identity, has_tiers=has_tiers)
        super().__init__(
            params, sizes.max_batch_size, sizes.max_seq_len, session=session, is_ragged=True
        )
        self.enable_runtime_checks = enable_runtime_checks
        self.total_num_pages = sum(sizes.pages.values())
        self.total_num_host_pages = sum(sizes.host_pages.values())
        self.identity = identity
        self._paths = list(params.leaves)
        self._claimed = {}
        self._followed: dict[int, list[Event]] = {}
        self._turn = 0
        self._replicas = make_replicas(params, session, sizes, settings)
        self._tiers = None
        if has_tiers:
            self._tiers = open_bridge(
                self._replicas,
                [self.leaf_pools(replica.index) for replica in self._replicas],
                sizes.host_pages,
                stores,
                sources,
                threads=self._tier_threads,
            )
            weakref.finalize(self, self._tiers.connector.abandon)

    def _require_params(
        self, params: KVCacheParamInterface, session: SessionInterface | None
    ) -> None:
        """Raise ParamsError unless `params` are of a paged cache and fit the session's artifact."""
        strategy = next(iter(params.leaves.values())).cache_strategy
        if strategy is not KVCacheStrategy.PAGED:
            raise ParamsError(
                f"cache_strategy: expected paged for PagedKVCacheManager, got {strategy}; use "
                f"{OTHER_MANAGERS[strategy]}"
            )
        require_params(session, params)

    # -- lifecycle

    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        replica = self._replica_to_claim(request_id, replica_idx)
        self._claimed[request_id] = replica.open_row(request_id)
        self._verify()

    def alloc_dummy(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Claim a row that points at the null page, to pad a batch.

        It takes no page, alloc and step have no effect on it, and none of its pages is committed.
        """
        replica = self._replica_to_claim(request_id, replica_idx)
        self._claimed[request_id] = replica.open_dummy(request_id)
        self._verify()

    def alloc(
        self, data: TextContext, replica_idx: int = 0, *, num_steps: int = 1, lookahead: int = 0
    ) -> None:
        replica = at_replica(self._replicas, replica_idx, "alloc")
        extra = require_steps(num_steps, lookahead)
        require_context(data, "alloc")
        row = row_of(data.request_id, self._claimed, replica_idx, "alloc")
        if data.processed_length + data.active_length + extra > row.limit:
            tiers, planner = self._tiers, replica.planner
            if tiers is None:
                plan = planner.plan([(data, row)], extra)
            else:
                plan = tiers.planned(lambda: planner.plan([(data, row)], extra, tiers.loadable))
            planner.widen(plan)
            loads = replica.apply(plan)
            if tiers is not None:
                tiers.start(replica_idx, loads)
        self._verify()

    def alloc_batch(self, batches: Batches, *, num_steps: int = 1, lookahead: int = 0) -> None:
        extra = require_steps(num_steps, lookahead)
        resolved = self._resolve(batches, "alloc_batch")
        tiers = self._tiers
        if tiers is None:
            plans = _plans(resolved, extra)
        else:
            plans = tiers.planned(lambda: _plans(resolved, extra, tiers.loadable))
        for replica, plan in plans:  # of all replicas, before anything changes
            replica.planner.widen(plan)
        for replica, plan in plans:
            loads = replica.apply(plan)
            if tiers is not None:
                tiers.start(replica.index, loads)
        self._verify()

    def runtime_inputs(
        self,
        batches: Batches,
        *,
        max_cache_length: int | None = None,
        batch_characteristics: BatchCharacteristics | None = None,
        num_steps: int = 1,
    ) -> KVCacheInputs:
        extra = require_steps(num_steps)
        measured = [
            (
                replica,
                rows,
                replica.batch.measure(rows, extra, max_cache_length, batch_characteristics),
            )
            for replica, rows in self._resolve(batches, "runtime_inputs")
        ]
        self._turn = turn = 1 - self._turn
        filled = [replica.batch.fill(turn, rows, extents) for replica, rows, extents in measured]
        for replica, _, (lengths, longest_new, *_) in measured:
            if longest_new == 1 or len(lengths) > 1:  # a prompt alone is not delayed
                for leaf in replica.leaves:
                    leaf.touch_ahead(len(lengths))
        leaves = [
            KVCacheInputs([record for records in filled for record in records[i]])
            for i in range(len(self._paths))
        ]
        self._verify()
        return (
            leaves[0]
            if self._paths == [""]
            else nested(dict(zip(self._paths, leaves, strict=True)))
        )

    def runtime_inputs_for_leaf(
        self,
        batches: Batches,
        *,
        max_cache_length: int | None = None,
        batch_characteristics: BatchCharacteristics | None = None,
    ) -> KVCacheInputs:
        """`runtime_inputs` of a single cache; AssertionError for a tree."""
        assert self._paths == [""], f"expected a single cache, got a tree of {self._paths}"
        return self.runtime_inputs(
            batches,
            max_cache_length=max_cache_length,
            batch_characteristics=batch_characteristics,
        )

    def step(self, batches: Batches | Sequence[TextContext]) -> None:
        # Without `also_named`'s synonym: every decode step calls it.
        for replica, rows in self._resolve(batches, "step"):
            if replica.needs_step and (awake := rows.awake()):
                committed = replica.step(awake)
                if self._tiers is not None:
                    self._tiers.offload(replica.index, committed)
        self._verify()

    @also_named(seq_id="request_id")
    def release(self, request_id: RequestID, replica_idx: int = 0) -> None:
        replica = at_replica(self._replicas, replica_idx, "release")
        row = row_of(request_id, self._claimed, replica_idx, "release")
        del self._claimed[request_id]
        freed = replica.close_row(row)
        if self._tiers is not None:
            self._tiers.release(row, freed)
        self._verify()

    def reset_prefix_cache(self) -> None:
        """Un-commit every page, and empty the tiers.

        A claimed request keeps its pages and runs on, but no other request can take them, or its
        later pages. A copy that has begun is discarded when it ends. A request that waits for a
        load is computed instead. Bound prefixes stay, and so do other models' pages in a shared
        store. StoreError after `close` if there are stores; then nothing changes.
        """
        if self._tiers is not None:
            self._tiers.connector.require_open("reset_prefix_cache")
        for replica in self._replicas:
            replica.reset_prefix_cache()
        if self._tiers is not None:
            self._tiers.reset()
        self._verify()

    def follow(self, replica_idx: int = 0) -> None:
        """Record changes of the replica's committed pages from now on, for `events`.

        The first event is `PagesCleared`: pages that are committed already are not listed.
        """
        replica = at_replica(self._replicas, replica_idx, "follow")
        self._followed[replica_idx] = replica.follow()

    def events(self, replica_idx: int = 0) -> list[Event]:
        """Changes of the replica's committed pages since the last call, in order."""
        journal = self._followed.get(replica_idx)
        if not journal:
            return []
        events = journal[:]
        journal.clear()
        return events

    def followed(self, replica_idx: int = 0) -> tuple[int, int | None]:
        """Number of pages, and window in tokens (None without one), of the leaf in `events`."""
        leaf = at_replica(self._replicas, replica_idx, "followed").followed
        return leaf.pool.num_pages, leaf.window

    def committed_digests(self, replica_idx: int = 0) -> list[bytes]:
        """Digests of the pages that are committed now in the leaf of `events`, in no order."""
        replica = at_replica(self._replicas, replica_idx, "committed_digests")
        return list(replica.followed.pool.index)

    def drop_queued_pages(self) -> None:
        """Drop pages that are queued for tiers, so that `close` does not wait for them."""
        if self._tiers is not None:
            self._tiers.connector.drop_queued()

    def rebuild(self) -> None:
        if self._tiers is not None:
            self._tiers.connector.drain()
        replicas = [replica.rebuilt() for replica in self._replicas]
        tiers = None if self._tiers is None else self._tiers.rebuilt(replicas)
        self._claimed, self._replicas, self._tiers = {}, replicas, tiers
        for index in self._followed:
            self.follow(index)
        self._verify()

    # -- tiers

    def prefetch(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> list[bool]:
        at_replica(self._replicas, replica_idx, "prefetch")
        if self._tiers is None:
            return [True] * len(contexts)
        return self._tiers.ask(replica_idx, contexts)

    def poll(self) -> dict[RequestID, bool]:
        ended = {} if self._tiers is None else self._tiers.poll()
        self._verify()
        return ended

    def wait(self, timeout: float | None = None) -> bool:
        return self._tiers is None or self._tiers.connector.wait(timeout)

    def close(self) -> None:
        if self._tiers is not None:
            self._tiers.connector.close()

    # -- multistep

    def fetch(self, batch: Sequence[TextContext], num_steps: int = 1) -> Sequence[KVCacheInputs]:
        return self.runtime_inputs([batch], num_steps=num_steps).inputs

    # -- metrics

    def reset_metrics(self) -> None:
        for replica in self._replicas:
            replica.reset_metrics()
        if self._tiers is not None:
            self._tiers.reset_metrics()

    # -- checks of arguments

    @cached_property
    def _slots(self) -> Slots:
        raise no_slots(self)

    def _replica_to_claim(self, request_id: RequestID, replica_idx: int) -> Replica:
        replica = at_replica(self._replicas, replica_idx, "claim")
        require_key(request_id)
        row = self._claimed.get(request_id)
        require_unclaimed(request_id, None if row is None else row.replica_idx)
        return replica

    def _resolve(
        self, batches: Batches | Sequence[TextContext], call: str
    ) -> list[tuple[Replica, BatchRows]]:
        replicas, claimed = self._replicas, self._claimed
        given = per_replica(batches, len(replicas), call)
        return [
            (replica, replica.batch.resolve(batch, claimed, call))
            for replica, batch in zip(replicas, given, strict=True)
        ]

    def _verify(self) -> None:
        if self.enable_runtime_checks:
            verify(self._replicas, self._claimed.values())


def _plans(
    batches: Sequence[tuple[Replica, BatchRows]], extra: int, loadable: Loadable | None = None
) -> list[tuple[Replica, AllocPlan]]:
    """Plans of the replicas with rows that need pages; empty in most decode steps."""
    return [
        (replica, replica.planner.plan(lacking, extra, loadable))
        for replica, rows in batches
        if (lacking := rows.lacking(extra))
    ]
