"""Queries of a paged manager about its requests, pages and tiers; a query changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from kvgraph.contract.devices import Device
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.symbols import KVCacheInputSymbols
from kvgraph.contract.synonyms import also_named
from kvgraph.errors import RequestError
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.memory import most_pages
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.kv.pool.journal import PageStored
from kvgraph.kv.pool.leaf import ReplicaBuffers
from kvgraph.kv.pool.pages import PagePool
from kvgraph.kv.pool.plan import Loadable
from kvgraph.kv.pool.replica import Replica
from kvgraph.kv.pool.rows import Phase, Row, row_of
from kvgraph.kv.requests import RequestID, TextContext, at_replica, require_key
from kvgraph.kv.tiers.bridge import TierBridge
from kvgraph.kv.tiers.exchange import LeafPages, adopted_pages, held_pages
from kvgraph.kv.tiers.leaf_pools import LeafPools, pools_of
from kvgraph.kv.tiers.open import fingerprint_of
from kvgraph.kv.tiers.store import StoreStats, page_key


class PagedQueries(KVCacheManager):
    """Queries of `PagedKVCacheManager`, a subclass that makes the state that they read."""

    _paths: list[str]
    _claimed: dict[RequestID, Row]
    _replicas: list[Replica]
    _tiers: TierBridge | None

    def is_loading(self, request_id: RequestID) -> bool:
        require_key(request_id)
        row = self._claimed.get(request_id)
        return row is not None and row.phase is Phase.LOADING

    @also_named(seq_id="request_id")
    def contains(self, request_id: RequestID, replica_idx: int = 0) -> bool:
        require_key(request_id)
        row = self._claimed.get(request_id)
        return row is not None and row.replica_idx == replica_idx

    def get_req_blocks(
        self, request_id: RequestID, replica_idx: int = 0, leaf: str | None = None
    ) -> list[int]:
        """Page ids in the order of tokens; the null page stands for pages behind a window.

        `leaf`: path in a tree; the default is its first leaf.
        """
        at_replica(self._replicas, replica_idx, "get_req_blocks")
        row = row_of(request_id, self._claimed, replica_idx, "get_req_blocks")
        return list(row.pages[0 if leaf is None else self._leaf_index(leaf)])

    def num_free_blocks(self, replica_idx: int = 0, leaf: str | None = None) -> int:
        """Number of pages that no request holds, cached pages included. Pages that are being
        offloaded to a tier count: a request that needs one ends its copy. Any thread may call it.

        `leaf`: path in a tree; the default is the sum over all leaves.
        """
        pools = self._pools(replica_idx, "num_free_blocks")
        if leaf is not None:
            pools = [pools[self._leaf_index(leaf)]]
        return sum(pool.num_obtainable for pool in pools)

    def total_num_blocks(self, replica_idx: int = 0) -> int:
        """Number of usable pages of a replica, summed over leaves."""
        return sum(pool.num_pages for pool in self._pools(replica_idx, "total_num_blocks"))

    @property
    def max_context_length(self) -> int:
        """Longest context in tokens: the narrowest leaf's lookup row has no entries beyond it."""
        return min(replica.batch.max_width for replica in self._replicas) * self.settings.page_size

    def require_room(self, request_id: RequestID, tokens: int, chunk: int) -> None:
        """Raise RequestError for more tokens than `max_seq_len`, or more pages than a pool has.

        In a leaf with a window a request holds at most the pages that the queries of a chunk see.
        """
        for (path, leaf), pool in zip(self.params.leaves.items(), self._pools(0, ""), strict=True):
            leaf = replace(leaf, page_size=self.settings.page_size)
            needed = most_pages(leaf, tokens, chunk)
            if needed > pool.num_pages:
                where = f" of leaf {path!r}" if path else ""
                raise RequestError(
                    f"request {request_id!r}: expected at most {pool.num_pages} pages from the "
                    f"pool{where}, got {tokens + 1} tokens (prompt and output) that need {needed}"
                )
        super().require_room(request_id, tokens, chunk)

    def has_room(self, ctx: TextContext, replica_idx: int = 0) -> bool:
        if not super().has_room(ctx, replica_idx):
            return False
        return self.get_pct_used_blocks_after_allocation(ctx, replica_idx) <= 100

    def coming_pages(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> set[bytes]:
        replica = at_replica(self._replicas, replica_idx, "coming_pages")
        if not replica.settings.prefix_caching:
            return set()
        size, claimed = replica.settings.page_size, self._claimed
        coming = set[bytes]()
        for ctx in contexts:
            first, end = ctx.processed_length, ctx.processed_length + ctx.active_length
            row = row_of(ctx.request_id, claimed, replica_idx, "coming_pages")
            if replica.commits(row):
                coming.update(row.digests[first // size : ceildiv(end, size)])
        return coming

    def missing_page(self, ctx: TextContext, replica_idx: int = 0) -> bytes | None:
        replica = at_replica(self._replicas, replica_idx, "missing_page")
        if not replica.settings.prefix_caching:
            return None
        digests = replica.settings.identities(ctx)[1]
        hit = replica.prefixes.joint(digests)
        return digests[hit] if hit < len(digests) else None

    def get_num_pages(self, replica_idx: int = 0) -> int:
        """Number of usable pages of a replica; the same as `total_num_blocks`."""
        return self.total_num_blocks(replica_idx)

    def get_num_used_pages(self, replica_idx: int = 0) -> int:
        """Number of pages that requests hold."""
        pools = self._pools(replica_idx, "get_num_used_pages")
        return sum(pool.num_pages - pool.num_obtainable for pool in pools)

    def get_num_host_pages(self, replica_idx: int = 0) -> int:
        """Number of pages of the host tier, which all replicas share."""
        return self._tier("host", replica_idx, "get_num_host_pages").num_pages

    def get_num_used_host_pages(self, replica_idx: int = 0) -> int:
        """Number of pages stored in the host tier."""
        return self._tier("host", replica_idx, "get_num_used_host_pages").num_used_pages

    def get_num_disk_pages(self, replica_idx: int = 0) -> int:
        """Number of pages, of the largest leaf, that the disk tier's limit allows."""
        return self._tier("disk", replica_idx, "get_num_disk_pages").num_pages

    def get_num_used_disk_pages(self, replica_idx: int = 0) -> int:
        """Number of pages of this model in the disk tier."""
        return self._tier("disk", replica_idx, "get_num_used_disk_pages").num_used_pages

    @property
    def host_committed_block_pct(self) -> float:
        """Share of the host tier's pages that hold known content, 0 to 1; 0 without a host tier."""
        used, total = self.get_num_used_host_pages(), self.get_num_host_pages()
        return used / total if total else 0.0

    def tier_stats(self) -> dict[str, StoreStats]:
        """Figures of each tier by name: "host", then the stores below it; empty without tiers."""
        return {} if self._tiers is None else self._tiers.connector.stats()

    def get_pct_used_blocks_after_allocation(self, ctx: TextContext, replica_idx: int = 0) -> float:
        """Percentage of pages in use after `alloc(ctx)`; above 100 if `alloc` would fail.

        Prefix hits are counted as `alloc` would take them. For a tree: of its fullest leaf.
        RequestError for more tokens than `max_seq_len`.
        """
        replica = at_replica(self._replicas, replica_idx, "get_pct_used_blocks_after_allocation")
        row = self._claimed.get(ctx.request_id)
        if row is not None:
            call = "get_pct_used_blocks_after_allocation"
            row = row_of(ctx.request_id, self._claimed, replica_idx, call)
        return replica.pct_used_after(ctx, row, self._loadable)

    def page_identities(self, ctx: TextContext) -> list[bytes]:
        """Digests of the full pages of `ctx` that do not hold its last token; 32 bytes each.

        They are equal in all processes with the same model, layout, adapter, seed and salt.
        """
        return self.settings.identities(ctx)[1]

    def tier_keys(self, ctx: TextContext, replica_idx: int = 0) -> list[bytes]:
        """Keys, in the tiers, of the full pages at the start of `ctx`; empty without tiers."""
        at_replica(self._replicas, replica_idx, "tier_keys")
        pools = () if self._tiers is None else self._tiers.pools[replica_idx]
        digests = self.page_identities(ctx)
        return [page_key(digest, own.leaf, own.shards) for own in pools for digest in digests]

    def has_settled(self, keys: Sequence[bytes]) -> bool:
        """Whether no page of these `tier_keys` is queued for a tier, or being copied or written.

        Any thread may call it.
        """
        return self._tiers is None or self._tiers.connector.has_settled(keys)

    @property
    def settings(self) -> PoolSettings:
        """Settings of page identities; its `identities` needs no pool."""
        return self._replicas[0].settings

    @property
    def fingerprint(self) -> bytes:
        """The 32-byte fingerprint of model and layout; it separates pages in files and stores."""
        return fingerprint_of(self.settings.identity)

    def committed_pages(
        self, ctx: TextContext, replica_idx: int = 0
    ) -> dict[str, dict[bytes, npt.NDArray[np.uint8]]]:
        """Copies of the pages at the start of `ctx`: per leaf, the bytes by key in the tiers.

        Only pages on the device that a request with these tokens would take as its prefix.
        """
        found = {}
        with self.held_pages(ctx, replica_idx) as leaves:
            for pools, digests, pages in leaves:
                records = [np.empty(pools.record_size, np.uint8) for _ in pages]
                pools.copy_out(pages, records)
                keys = [page_key(digest, pools.leaf, pools.shards) for digest in digests]
                found[pools.leaf] = dict(zip(keys, records, strict=True))
        return found

    def leaf_pools(self, replica_idx: int = 0) -> list[LeafPools]:
        """Memory of the pages of each leaf of a replica."""
        leaves = at_replica(self._replicas, replica_idx, "leaf_pools").leaves
        return [
            pools_of(leaf, path, self.params.n_shards, self.session)
            for path, leaf in zip(self._paths, leaves, strict=True)
        ]

    def held_pages(
        self, ctx: TextContext, replica_idx: int = 0
    ) -> AbstractContextManager[list[LeafPages]]:
        """Committed pages at the start of `ctx`, per leaf; none is reallocated within the scope."""
        replica = at_replica(self._replicas, replica_idx, "held_pages")
        digests = replica.settings.identities(ctx)[1]
        hit = replica.prefixes.joint(digests)
        visible = [replica.prefixes.visible(leaf, digests, hit) for leaf in replica.leaves]
        return held_pages(replica.leaves, self.leaf_pools(replica_idx), visible)

    def adopted_pages(
        self,
        digests: Sequence[Sequence[bytes]],
        replica_idx: int = 0,
        *,
        stored: Iterable[PageStored] = (),
    ) -> AbstractContextManager[list[LeafPages]]:
        """Take free pages for the `digests[leaf]` that the device lacks; fill them in the scope.

        At its end they are committed and free. `events` lists them, with parent and tokens if
        `stored` has them, otherwise by digest only. After an error they are free and not committed.
        InsufficientPagesError if too few pages are free.
        """
        leaves = at_replica(self._replicas, replica_idx, "adopted_pages").leaves
        return adopted_pages(leaves, self.leaf_pools(replica_idx), digests, stored)

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
        """Sum of the metrics of all replicas and of the tiers."""
        total = sum((replica.read_metrics() for replica in self._replicas), KVCacheMetrics())
        return total if self._tiers is None else total + self._tiers.read_metrics()

    def _tier(self, name: str, replica_idx: int, call: str) -> StoreStats:
        at_replica(self._replicas, replica_idx, call)
        return self.tier_stats().get(name, StoreStats())

    @property
    def _loadable(self) -> Loadable | None:
        return None if self._tiers is None else self._tiers.loadable

    def _pools(self, replica_idx: int, call: str) -> list[PagePool]:
        return [leaf.pool for leaf in at_replica(self._replicas, replica_idx, call).leaves]

    def _leaf_index(self, path: str) -> int:
        if path not in self._paths:
            raise RequestError(f"leaf: expected one of {self._paths}, got {path!r}")
        return self._paths.index(path)
