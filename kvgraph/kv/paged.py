"""The paged cache manager: requests own pages of a pool that stays outside the graph.

    claim -> (alloc_batch -> runtime_inputs -> [session runs] -> ctx.update -> step)* -> release

Bookkeeping is one pass over the batch per call; pages are touched only where they change.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from kvgraph.contract.devices import Device
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.inputs import (
    BatchCharacteristics,
    KVCacheInputs,
    SessionInterface,
)
from kvgraph.contract.params import KVCacheParamInterface, KVCacheStrategy
from kvgraph.contract.symbols import KVCacheInputSymbols
from kvgraph.errors import RequestError
from kvgraph.kv.arguments import at_replica, per_replica, require_steps, require_unclaimed
from kvgraph.kv.build import make_replicas, make_settings, open_tiering, require_sizes
from kvgraph.kv.checks import verify
from kvgraph.kv.growth import Plan
from kvgraph.kv.leaf import ReplicaBuffers, require_params
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.memory import most_pages
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.pages import PagePool
from kvgraph.kv.replica import Replica
from kvgraph.kv.requests import Batches, RequestID, TextContext
from kvgraph.kv.rows import Resolved, Row
from kvgraph.kv.slots import Slots, no_slots
from kvgraph.kv.tiering import Tiering
from kvgraph.kv.tiers.exchange import LeafPages, adopted_pages, held_pages
from kvgraph.kv.tiers.open import StoreOpener, fingerprint_of
from kvgraph.kv.tiers.place import Place, place_of
from kvgraph.kv.tiers.store import StoreStats, page_key
from kvgraph.kv.trees import nested


class PagedKVCacheManager(KVCacheManager):
    """Paged KV cache of one or more data-parallel replicas, each of one or more shards.

    - `params`: one cache, or a tree of caches (`MultiKVCacheParams`) behind each request
    - `session` owns memory: `session.allocate(symbol, sizes)`; None: lazily zeroed host memory
    - `total_num_pages`: usable pages of each replica (of each leaf, or by leaf path); the null
      page is extra
    - `max_batch_size`: requests that one replica can hold claimed at once
    - `identity`: of the model, part of every page's identity; default: the session's
    - `max_seq_len`: longest context in tokens; default: what the pool holds
    - `enable_runtime_checks`: verify all bookkeeping after every call (slow)
    - `total_num_host_pages`: pages of the host tier, which all replicas share (of each leaf, or by
      leaf path)
    - `stores`, `sources`: what opens the tiers below the host, fastest first; `stores` are written
      through, `sources` only read

    With tiers a first `alloc` may find pages that are not on the device: the request is held
    (`is_loading`) until `poll` says that they have landed. Page counts of a tree are sums over its
    leaves.
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
        if next(iter(params.leaves.values())).cache_strategy is KVCacheStrategy.PAGED:
            require_params(session, params)
        sizes = require_sizes(
            params, total_num_pages, total_num_host_pages, max_batch_size, max_seq_len
        )
        has_tiers = bool(stores or sources) or any(sizes.host_pages.values())
        identity = identity or (session.identity if session is not None else b"")
        settings = make_settings(params, sizes, identity, has_tiers=has_tiers)
        super().__init__(params, max_batch_size, sizes.max_seq_len, session=session, is_ragged=True)
        self.enable_runtime_checks = enable_runtime_checks
        self.total_num_pages = sum(sizes.pages.values())
        self.total_num_host_pages = sum(sizes.host_pages.values())
        self.identity = identity
        self._paths = list(params.leaves)
        self._claimed: dict[RequestID, Row] = {}
        self._turn = 0
        self._replicas = make_replicas(params, session, sizes, settings)
        self._tiers: Tiering | None = None
        if has_tiers:
            places = [self.places(replica.index) for replica in self._replicas]
            self._tiers = open_tiering(
                self._replicas,
                places,
                sizes.host_pages,
                stores,
                sources,
                threads=self._tier_threads,
            )
            weakref.finalize(self, self._tiers.connector.close)

    # -- lifecycle

    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        replica = self._replica_to_claim(request_id, replica_idx)
        self._claimed[request_id] = replica.open_row(request_id)
        self._verify()

    def alloc_dummy(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Claim a row that points at the null page, to pad a batch.

        It takes no page, alloc and step do nothing on it, and nothing of it is ever committed.
        """
        replica = self._replica_to_claim(request_id, replica_idx)
        self._claimed[request_id] = replica.open_dummy(request_id)
        self._verify()

    def alloc(
        self, data: TextContext, replica_idx: int = 0, *, num_steps: int = 1, lookahead: int = 0
    ) -> None:
        replica = at_replica(self._replicas, replica_idx, "alloc")
        extra = require_steps(num_steps, lookahead)
        row = replica.row_of(data.request_id, self._claimed, "alloc")
        if data.processed_length + data.active_length + extra > row.limit:
            if self._tiers is None:
                plan = replica.planner.plan([(data, row)], extra)
            else:
                plan = self._tiers.planned(lambda: replica.planner.plan([(data, row)], extra))
            replica.apply(plan)
        self._verify()

    def alloc_batch(self, batches: Batches, *, num_steps: int = 1, lookahead: int = 0) -> None:
        extra = require_steps(num_steps, lookahead)
        resolved = self._resolve(batches, "alloc_batch")
        if self._tiers is None:
            plans = _plans(resolved, extra)
        else:
            plans = self._tiers.planned(lambda: _plans(resolved, extra))
        for replica, plan in plans:
            if plan is not None:
                replica.apply(plan)
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
                resolved,
                replica.measure(resolved, extra, max_cache_length, batch_characteristics),
            )
            for replica, resolved in self._resolve(batches, "runtime_inputs")
        ]
        self._turn = turn = 1 - self._turn
        filled = [replica.fill(turn, resolved, extents) for replica, resolved, extents in measured]
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
        for replica, resolved in self._resolve(batches, "step"):
            replica.step(resolved)
        self._verify()

    def release(self, request_id: RequestID, replica_idx: int = 0) -> None:
        replica = at_replica(self._replicas, replica_idx, "release")
        row = replica.row_of(request_id, self._claimed, "release")
        del self._claimed[request_id]
        replica.close_row(row)
        self._verify()

    def reset_prefix_cache(self) -> None:
        """Forget every committed page, and empty the tiers.

        A page that a live request holds is forgotten when the last such request releases it; until
        then other requests may take it as their prefix. A copy that has begun is discarded when it
        ends, and a request that waits for a load is computed. Bound prefixes stay, and so does what
        other models keep in a shared store.
        """
        for replica in self._replicas:
            replica.reset_prefix_cache()
        if self._tiers is not None:
            self._tiers.reset()
        self._verify()

    def rebuild(self) -> None:
        if self._tiers is not None:
            self._tiers.connector.drain()
        replicas = [replica.rebuilt() for replica in self._replicas]
        tiers = None if self._tiers is None else self._tiers.rebuilt(replicas)
        self._claimed, self._replicas, self._tiers = {}, replicas, tiers
        self._verify()

    # -- tiers

    def prefetch(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> list[bool]:
        replica = at_replica(self._replicas, replica_idx, "prefetch")
        if self._tiers is None:
            return [True] * len(contexts)
        return self._tiers.ask(replica, contexts)

    def is_loading(self, request_id: RequestID) -> bool:
        row = self._claimed.get(request_id)
        return row is not None and row.loading is not None

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

    # -- queries: they change nothing

    def contains(self, request_id: RequestID, replica_idx: int = 0) -> bool:
        row = self._claimed.get(request_id)
        return row is not None and row.replica.index == replica_idx

    def get_req_blocks(
        self, request_id: RequestID, replica_idx: int = 0, leaf: str | None = None
    ) -> list[int]:
        """Page ids in the order of tokens, the null page where a window has passed.

        `leaf` is the path in a tree; by default its first leaf.
        """
        replica = at_replica(self._replicas, replica_idx, "get_req_blocks")
        row = replica.row_of(request_id, self._claimed, "get_req_blocks")
        return list(row.pages[0 if leaf is None else self._leaf_index(leaf)])

    def num_free_blocks(self, replica_idx: int = 0) -> int:
        """Pages that no request holds; cached ones among them."""
        return sum(pool.num_free for pool in self._pools(replica_idx, "num_free_blocks"))

    def total_num_blocks(self, replica_idx: int = 0) -> int:
        """Usable pages."""
        return sum(pool.num_pages for pool in self._pools(replica_idx, "total_num_blocks"))

    @property
    def max_context_length(self) -> int:
        """Tokens that a row's lookup entries reach, in every leaf: no context is longer."""
        return min(replica.max_width for replica in self._replicas) * self.params.page_size

    def require_room(self, request_id: RequestID, tokens: int, chunk: int) -> None:
        """RequestError if a lone request of `tokens` tokens needs more pages than there are.

        A leaf with a window holds at most what the queries of a chunk see.
        """
        for (path, leaf), pool in zip(self.params.leaves.items(), self._pools(0, ""), strict=True):
            leaf = replace(leaf, page_size=self._replicas[0].settings.page_size)
            needed = most_pages(leaf, tokens, chunk)
            if needed > pool.num_pages:
                where = f" of leaf {path!r}" if path else ""
                raise RequestError(
                    f"request {request_id!r}: expected at most {pool.num_pages} pages from the "
                    f"pool{where}, got {tokens + 1} tokens (prompt and output) that need {needed}"
                )

    def has_room(self, ctx: TextContext, replica_idx: int = 0) -> bool:
        return self.get_pct_used_blocks_after_allocation(ctx, replica_idx) <= 100

    def coming_pages(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> set[bytes]:
        replica = at_replica(self._replicas, replica_idx, "coming_pages")
        if not replica.settings.prefix_caching:
            return set()
        size, claimed = replica.settings.page_size, self._claimed
        coming = set[bytes]()
        for ctx in contexts:
            first, end = ctx.processed_length, ctx.processed_length + ctx.active_length
            row = replica.row_of(ctx.request_id, claimed, "coming_pages")
            coming.update(row.digests[first // size : ceildiv(end, size)])
        return coming

    def missing_page(self, ctx: TextContext, replica_idx: int = 0) -> bytes | None:
        replica = at_replica(self._replicas, replica_idx, "missing_page")
        if not replica.settings.prefix_caching:
            return None
        digests = replica.settings.identities(ctx)[1]
        hit = replica.hits.joint(digests)
        return digests[hit] if hit < len(digests) else None

    def get_num_pages(self, replica_idx: int = 0) -> int:
        """Usable pages."""
        return self.total_num_blocks(replica_idx)

    def get_num_used_pages(self, replica_idx: int = 0) -> int:
        """Pages that requests hold."""
        return sum(pool.num_used for pool in self._pools(replica_idx, "get_num_used_pages"))

    def get_num_host_pages(self, replica_idx: int = 0) -> int:
        """Pages that the host tier has room for; all replicas share it."""
        return self._tier("host", replica_idx, "get_num_host_pages").num_pages

    def get_num_used_host_pages(self, replica_idx: int = 0) -> int:
        """Pages that the host tier holds."""
        return self._tier("host", replica_idx, "get_num_used_host_pages").num_used_pages

    def get_num_disk_pages(self, replica_idx: int = 0) -> int:
        """Pages (of the largest leaf) that the disk tier's limit allows."""
        return self._tier("disk", replica_idx, "get_num_disk_pages").num_pages

    def get_num_used_disk_pages(self, replica_idx: int = 0) -> int:
        """Pages of this model that the disk tier holds."""
        return self._tier("disk", replica_idx, "get_num_used_disk_pages").num_used_pages

    @property
    def host_committed_block_pct(self) -> float:
        """Share of the host tier's pages that hold known content, 0 to 1; 0 without one."""
        used, total = self.get_num_used_host_pages(), self.get_num_host_pages()
        return used / total if total else 0.0

    def tier_stats(self) -> dict[str, StoreStats]:
        """Figures of each tier by name: "host", then the stores below it; empty without tiers."""
        return {} if self._tiers is None else self._tiers.connector.stats()

    def get_pct_used_blocks_after_allocation(self, ctx: TextContext, replica_idx: int = 0) -> float:
        """Percent of pages held after `alloc(ctx)`, above 100 if it would fail.

        Prefix hits are counted as `alloc` would take them. Of a tree: its fullest leaf.
        """
        replica = at_replica(self._replicas, replica_idx, "get_pct_used_blocks_after_allocation")
        row = self._claimed.get(ctx.request_id)
        if row is not None and row.replica is not replica:
            replica.row_of(ctx.request_id, self._claimed, "get_pct_used_blocks_after_allocation")
        return replica.pct_used_after(ctx, row)

    def page_identities(self, ctx: TextContext) -> list[bytes]:
        """Digests of the full pages of `ctx` that do not hold its last token; 32 bytes each.

        The same in every process that serves the same model, layout, adapter, seed and salt.
        """
        return self._replicas[0].settings.identities(ctx)[1]

    @property
    def fingerprint(self) -> bytes:
        """Of model and layout: what tells pages in files and stores apart; 32 bytes."""
        return fingerprint_of(self._replicas[0].settings.identity)

    def committed_pages(
        self, ctx: TextContext, replica_idx: int = 0
    ) -> dict[str, dict[bytes, npt.NDArray[np.uint8]]]:
        """Copies of the pages that start `ctx`: per leaf, bytes by key in the tiers.

        Those that the device holds, and a request with these tokens would take as its prefix.
        """
        found = {}
        with self.held_pages(ctx, replica_idx) as leaves:
            for place, digests, pages in leaves:
                records = [np.empty(place.record_size, np.uint8) for _ in pages]
                place.copy_out(pages, records)
                keys = [page_key(digest, place.leaf, place.shards) for digest in digests]
                found[place.leaf] = dict(zip(keys, records, strict=True))
        return found

    def places(self, replica_idx: int = 0) -> list[Place]:
        """Where the pages of each leaf of a replica lie."""
        leaves = at_replica(self._replicas, replica_idx, "places").leaves
        return [
            place_of(leaf, path, self.params.n_shards, self.session)
            for path, leaf in zip(self._paths, leaves, strict=True)
        ]

    def held_pages(
        self, ctx: TextContext, replica_idx: int = 0
    ) -> AbstractContextManager[list[LeafPages]]:
        """The committed pages that start `ctx`, per leaf; none is reallocated within the scope."""
        replica = at_replica(self._replicas, replica_idx, "held_pages")
        digests = replica.settings.identities(ctx)[1]
        hit = replica.hits.joint(digests)
        visible = [replica.hits.visible(leaf, digests, hit) for leaf in replica.leaves]
        return held_pages(replica.leaves, self.places(replica_idx), visible)

    def adopted_pages(
        self, digests: Sequence[Sequence[bytes]], replica_idx: int = 0
    ) -> AbstractContextManager[list[LeafPages]]:
        """Free pages for those of `digests[leaf]` that the device lacks, to be filled in the scope.

        At its end they are committed and free; after an error they are free as before.
        InsufficientPagesError if too few are free.
        """
        leaves = at_replica(self._replicas, replica_idx, "adopted_pages").leaves
        return adopted_pages(leaves, self.places(replica_idx), digests)

    def get_device_buffer(self, replica_idx: int = 0) -> ReplicaBuffers:
        """The replica's raw pools, for transfers: `.all_buffers`."""
        leaves = at_replica(self._replicas, replica_idx, "get_device_buffer").leaves
        return ReplicaBuffers(
            [buffer for leaf in leaves for shard in leaf.shards for buffer in shard.all_buffers]
        )

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> Sequence[KVCacheInputSymbols]:
        return self.params.get_symbolic_inputs(devices, num_layers)

    def input_symbols(self) -> Sequence[KVCacheInputSymbols]:
        return self.get_symbolic_inputs()

    def get_metrics_aggregated(self) -> KVCacheMetrics:
        """Sum over all replicas, and what the tiers did."""
        total = sum((replica.read_metrics() for replica in self._replicas), KVCacheMetrics())
        return total if self._tiers is None else total + self._tiers.read_metrics()

    def reset_metrics(self) -> None:
        for replica in self._replicas:
            replica.reset_metrics()
        if self._tiers is not None:
            self._tiers.reset_metrics()

    def _tier(self, name: str, replica_idx: int, call: str) -> StoreStats:
        at_replica(self._replicas, replica_idx, call)
        return self.tier_stats().get(name, StoreStats())

    # -- checks of arguments

    @cached_property
    def _slots(self) -> Slots:
        raise no_slots(self)

    def _replica_to_claim(self, request_id: RequestID, replica_idx: int) -> Replica:
        replica = at_replica(self._replicas, replica_idx, "claim")
        row = self._claimed.get(request_id)
        require_unclaimed(request_id, None if row is None else row.replica.index)
        return replica

    def _pools(self, replica_idx: int, call: str) -> list[PagePool]:
        return [leaf.pool for leaf in at_replica(self._replicas, replica_idx, call).leaves]

    def _leaf_index(self, path: str) -> int:
        if path not in self._paths:
            raise RequestError(f"leaf: expected one of {self._paths}, got {path!r}")
        return self._paths.index(path)

    def _resolve(
        self, batches: Batches | Sequence[TextContext], call: str
    ) -> list[tuple[Replica, Resolved]]:
        replicas, claimed = self._replicas, self._claimed
        given = per_replica(batches, len(replicas), call)
        return [
            (replica, replica.resolve(batch, claimed, call))
            for replica, batch in zip(replicas, given, strict=True)
        ]

    def _verify(self) -> None:
        if self.enable_runtime_checks:
            verify(self._replicas, self._claimed.values())


def _plans(
    resolved: Sequence[tuple[Replica, Resolved]], extra: int
) -> list[tuple[Replica, Plan | None]]:
    return [(replica, replica.planner.plan_batch(batch, extra)) for replica, batch in resolved]
