"""The paged cache manager: requests own pages of a pool that stays outside the graph.

    claim -> (alloc_batch -> runtime_inputs -> [session runs] -> ctx.update -> step)* -> release

Bookkeeping is one pass over the batch per call; pages are touched only where they change.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import cast

from kvgraph.contract.devices import Device
from kvgraph.contract.inputs import BatchCharacteristics, KVCacheInputs, Session
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.symbols import PagedCacheInputSymbols
from kvgraph.errors import ParamsError, RequestError, UnsupportedError
from kvgraph.kv.leaf import Leaf, allocate_shard, table_width
from kvgraph.kv.manager import Batches, KVCacheManager
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.replica import Replica, Settings, require_steps
from kvgraph.kv.requests import RequestID, TextContext
from kvgraph.kv.rows import UNBOUNDED, Resolved, Row

WINDOWED_SEQ_LEN = 131072
"""Longest context of a cache with a window when `max_seq_len` is not given, in tokens."""


class PagedKVCacheManager(KVCacheManager):
    """Paged KV cache of one or more data-parallel replicas, each of one or more shards.

    - `session` owns memory: `session.allocate(symbol, sizes)`; None: lazily zeroed host memory
    - `total_num_pages`: usable pages of each replica; the null page is extra
    - `max_batch_size`: requests that one replica can hold claimed at once
    - `identity`: of the model, part of every page's identity; default: the session's
    - `max_seq_len`: longest context in tokens; default: what the pool holds
    - `enable_runtime_checks`: verify all bookkeeping after every call (slow)
    """

    def __init__(
        self,
        params: KVCacheParams,
        session: Session | None,
        total_num_pages: int,
        total_num_host_pages: int = 0,
        enable_runtime_checks: bool = False,
        *,
        max_batch_size: int,
        identity: bytes = b"",
        max_seq_len: int | None = None,
    ) -> None:
        _require_sizes(total_num_pages, total_num_host_pages, max_batch_size, max_seq_len)
        self.params = params
        self.session = session
        self.max_batch_size = max_batch_size
        self.enable_runtime_checks = enable_runtime_checks
        self.total_num_pages = total_num_pages
        self.identity = identity or (session.identity if session is not None else b"")
        self._claimed: dict[RequestID, Row] = {}
        self._turn = 0
        self._max_width = table_width(
            params, total_num_pages, max_seq_len, windowed_default=WINDOWED_SEQ_LEN
        )
        self._settings = self._make_settings(max_seq_len)
        self._replicas = [self._make_replica(i) for i in range(params.data_parallel_degree)]

    # -- lifecycle

    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        replica = self._replica(replica_idx, "claim")
        row = self._claimed.get(request_id)
        if row is not None:
            raise RequestError(
                f"claim of {request_id!r}: expected a request that is not claimed, "
                f"got one claimed on replica {row.replica.index} already"
            )
        self._claimed[request_id] = replica.open_row(request_id)

    def alloc(
        self, data: TextContext, replica_idx: int = 0, *, num_steps: int = 1, lookahead: int = 0
    ) -> None:
        replica = self._replica(replica_idx, "alloc")
        extra = require_steps(num_steps, lookahead)
        row = replica.row_of(data.request_id, self._claimed, "alloc")
        if data.processed_length + data.active_length + extra > row.limit:
            replica.apply(replica.plan([(data, row)], extra))

    def alloc_batch(self, batches: Batches, *, num_steps: int = 1, lookahead: int = 0) -> None:
        extra = require_steps(num_steps, lookahead)
        plans = [
            (replica, replica.plan_batch(resolved, extra))
            for replica, resolved in self._resolve(batches, "alloc_batch")
        ]
        for replica, plan in plans:
            if plan is not None:
                replica.apply(plan)

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
        self._turn = 1 - self._turn
        filled = [
            replica.fill(self._turn, resolved, extents) for replica, resolved, extents in measured
        ]
        return KVCacheInputs([record for staging in filled for record in staging.records[0]])

    def step(self, batches: Batches | Sequence[TextContext]) -> None:
        for replica, resolved in self._resolve(batches, "step"):
            replica.step(resolved)

    def release(self, request_id: RequestID, replica_idx: int = 0) -> None:
        replica = self._replica(replica_idx, "release")
        row = replica.row_of(request_id, self._claimed, "release")
        del self._claimed[request_id]
        replica.close_row(row)

    # -- queries: they change nothing

    def contains(self, request_id: RequestID, replica_idx: int = 0) -> bool:
        row = self._claimed.get(request_id)
        return row is not None and row.replica.index == replica_idx

    def get_req_blocks(self, request_id: RequestID, replica_idx: int = 0) -> list[int]:
        replica = self._replica(replica_idx, "get_req_blocks")
        return list(replica.row_of(request_id, self._claimed, "get_req_blocks").pages[0])

    def num_free_blocks(self, replica_idx: int = 0) -> int:
        """Pages that no request holds; cached ones among them."""
        return self._leaf(replica_idx).pool.num_free

    def total_num_blocks(self, replica_idx: int = 0) -> int:
        """Usable pages."""
        return self._leaf(replica_idx).pool.num_pages

    def get_num_pages(self, replica_idx: int = 0) -> int:
        """Usable pages."""
        return self.total_num_blocks(replica_idx)

    def get_num_used_pages(self, replica_idx: int = 0) -> int:
        """Pages that requests hold."""
        return self._leaf(replica_idx).pool.num_used

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> list[PagedCacheInputSymbols]:
        return self.params.get_symbolic_inputs(devices, num_layers)

    def get_metrics_aggregated(self) -> KVCacheMetrics:
        """Sum over all replicas."""
        return sum((replica.read_metrics() for replica in self._replicas), KVCacheMetrics())

    def reset_metrics(self) -> None:
        for replica in self._replicas:
            replica.reset_metrics()

    # -- construction and checks of arguments

    def _make_settings(self, max_seq_len: int | None) -> Settings:
        params = self.params
        if max_seq_len is None:
            windowed = params.window_size is not None
            max_seq_len = self._max_width * params.page_size if windowed else UNBOUNDED
        return Settings(
            params.page_size,
            self.max_batch_size,
            max_seq_len,
            params.enable_prefix_caching,
            _model_identity(params, self.identity),
            params.hash_seed,
        )

    def _make_replica(self, index: int) -> Replica:
        params, pages = self.params, self.total_num_pages
        shards = slice(index * params.n_shards, (index + 1) * params.n_shards)
        symbols = params.get_symbolic_inputs()[shards]
        buffers = [
            allocate_shard(record, pages, device, self.session)
            for record, device in zip(symbols, params.devices[shards], strict=True)
        ]
        leaf = Leaf(
            symbols, buffers, pages, self.max_batch_size, self._max_width, params.window_size
        )
        return Replica(index, [leaf], self._settings, getattr(self.session, "upload", None))

    def _leaf(self, replica_idx: int) -> Leaf:
        return self._replica(replica_idx, "replica_idx").leaves[0]

    def _replica(self, replica_idx: int, call: str) -> Replica:
        if not 0 <= replica_idx < len(self._replicas):
            raise RequestError(
                f"{call}: expected replica_idx below data_parallel_degree="
                f"{len(self._replicas)}, got {replica_idx}"
            )
        return self._replicas[replica_idx]

    def _resolve(
        self, batches: Batches | Sequence[TextContext], call: str
    ) -> list[tuple[Replica, Resolved]]:
        """One resolved batch per replica; a flat list is the batch of the only replica."""
        replicas = self._replicas
        if len(replicas) == 1 and (not batches or isinstance(batches[0], TextContext)):
            batches = [cast(Sequence[TextContext], batches)]
        if len(batches) != len(replicas):
            raise RequestError(
                f"{call}: expected {len(replicas)} replica batches (data_parallel_degree), "
                f"got {len(batches)}"
            )
        claimed = self._claimed
        return [
            (replica, replica.resolve(batch, claimed, call))
            for replica, batch in zip(replicas, cast(Batches, batches), strict=True)
        ]


def _require_sizes(
    total_num_pages: int, total_num_host_pages: int, max_batch_size: int, max_seq_len: int | None
) -> None:
    for name, value in (
        ("total_num_pages", total_num_pages),
        ("max_batch_size", max_batch_size),
        ("max_seq_len", 1 if max_seq_len is None else max_seq_len),
    ):
        if value < 1:
            raise ParamsError(f"{name}: expected >= 1, got {value}")
    if total_num_host_pages:
        raise UnsupportedError(
            f"total_num_host_pages: expected 0 (there is no host tier), got {total_num_host_pages}"
        )


def _model_identity(params: KVCacheParams, identity: bytes) -> bytes:
    """What pages of different models and layouts are told apart by."""
    return json.dumps(params.layout_dict(), sort_keys=True).encode() + b"\0" + identity
