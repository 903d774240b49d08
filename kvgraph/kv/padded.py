"""The plain rectangular cache, for export targets that have no paging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvgraph.contract.devices import HOST, Device
from kvgraph.contract.inputs import (
    BatchCharacteristics,
    Buffer,
    KVCacheInputs,
    PaddedKVCacheInputs,
    Session,
)
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.symbols import PaddedKVCacheInputSymbols
from kvgraph.errors import CapacityError, ParamsError, RequestError, UnsupportedError
from kvgraph.kv.arguments import at_replica, per_replica, require_steps, require_unclaimed
from kvgraph.kv.leaf import allocate_buffer, require_params
from kvgraph.kv.manager import Batches, KVCacheManager
from kvgraph.kv.multistep import advance
from kvgraph.kv.requests import RequestID, TextContext


class PaddedKVCacheManager(KVCacheManager):
    """One rectangle `[L, max_batch_size, max_seq_len, K, D]` of keys and one of values.

    A claim takes the lowest free row of a replica, and a batch lists its requests in the order of
    their rows, from row 0; rows beyond the batch idle. All rows of a batch have cached equally
    many tokens (`start_pos`). `num_layers` and `devices` win over those of `params`.
    """

    def __init__(
        self,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[Device],
        session: Session | None,
    ) -> None:
        _require_supported(params, max_batch_size, max_seq_len)
        self.params = replace(
            params,
            num_layers=num_layers,
            devices=tuple(devices),
            cache_strategy=KVCacheStrategy.PADDED,
        )
        require_params(session, self.params)
        self.max_batch_size = max_batch_size
        self.max_seq_len = max_seq_len
        self.session = session
        self._claimed: dict[RequestID, tuple[int, int]] = {}  # request -> (replica, row)
        self._free = [set(range(max_batch_size)) for _ in range(params.data_parallel_degree)]
        self._turn = 0
        rectangles = self._allocate()
        self._records = [[_record(k, v) for k, v in rectangles] for _ in range(2)]

    # -- lifecycle

    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        free = at_replica(self._free, replica_idx, "claim")
        require_unclaimed(request_id, self._claimed.get(request_id, (None, 0))[0])
        if not free:
            raise CapacityError(
                f"claim of {request_id!r}: expected a free row among the max_batch_size="
                f"{self.max_batch_size} of replica {replica_idx}, got none"
            )
        row = min(free)
        free.remove(row)
        self._claimed[request_id] = (replica_idx, row)

    def alloc(
        self, data: TextContext, replica_idx: int = 0, *, num_steps: int = 1, lookahead: int = 0
    ) -> None:
        """Memory is there already: checks that the tokens fit into `max_seq_len`."""
        extra = require_steps(num_steps, lookahead)
        self._row(data.request_id, replica_idx, "alloc")
        self._require_fits(data, extra)

    def alloc_batch(self, batches: Batches, *, num_steps: int = 1, lookahead: int = 0) -> None:
        for replica_idx, batch in enumerate(self._per_replica(batches, "alloc_batch")):
            for ctx in batch:
                self.alloc(ctx, replica_idx, num_steps=num_steps, lookahead=lookahead)

    def runtime_inputs(
        self,
        batches: Batches,
        *,
        max_cache_length: int | None = None,
        batch_characteristics: BatchCharacteristics | None = None,
        num_steps: int = 1,
    ) -> KVCacheInputs:
        """The rectangles and the batch's `start_pos`; RequestError if rows differ in it.

        The two bounds change nothing here: a rectangle has one size.
        """
        extra = require_steps(num_steps)
        given = self._per_replica(batches, "runtime_inputs")
        starts = [self._start_pos(batch, i, extra) for i, batch in enumerate(given)]
        self._turn = 1 - self._turn
        records = self._records[self._turn]
        for i, record in enumerate(records):
            record.start_pos.handle[0] = starts[i // self.params.n_shards]
        return KVCacheInputs(records)

    def step(self, batches: Batches | Sequence[TextContext]) -> None:
        """Nothing to commit; checks that the requests are claimed."""
        for replica_idx, batch in enumerate(self._per_replica(batches, "step")):
            for ctx in batch:
                self._row(ctx.request_id, replica_idx, "step")

    def release(self, request_id: RequestID, replica_idx: int = 0) -> None:
        row = self._row(request_id, replica_idx, "release")
        del self._claimed[request_id]
        self._free[replica_idx].add(row)

    def rebuild(self) -> None:
        free = [set(range(self.max_batch_size)) for _ in self._free]
        self._claimed, self._free = {}, free

    # -- multistep

    def get_runtime_inputs(
        self, batch: Sequence[TextContext], num_steps: int = 1
    ) -> Sequence[PaddedKVCacheInputs]:
        """One replica's values, a record per device, for `num_steps` steps."""
        return self.runtime_inputs([batch], num_steps=num_steps).inputs

    def increment_cache_lengths(
        self, kv_cache_inputs: KVCacheInputs | Sequence[KVCacheInputs], prev_model_inputs: Any
    ) -> Any:
        """`start_pos` grows by the new tokens of the step before, equally many in every row."""
        return advance(kv_cache_inputs, prev_model_inputs, len(self._free), self.session)

    # -- queries

    def contains(self, request_id: RequestID, replica_idx: int = 0) -> bool:
        return self._claimed.get(request_id, (None, 0))[0] == replica_idx

    def get_req_blocks(self, request_id: RequestID, replica_idx: int = 0) -> list[int]:
        """The row of the request."""
        return [self._row(request_id, replica_idx, "get_req_blocks")]

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> list[PaddedKVCacheInputSymbols]:
        return self.params.get_symbolic_inputs(devices, num_layers)

    def require_room(self, request_id: RequestID, tokens: int, chunk: int) -> None:
        if tokens > self.max_seq_len:
            raise RequestError(
                f"request {request_id!r}: expected at most max_seq_len={self.max_seq_len} tokens, "
                f"got {tokens}"
            )

    def has_room(self, ctx: TextContext, replica_idx: int = 0) -> bool:
        return ctx.current_length <= self.max_seq_len

    def num_free_blocks(self, replica_idx: int = 0) -> int:
        """Free rows."""
        return len(at_replica(self._free, replica_idx, "num_free_blocks"))

    def total_num_blocks(self, replica_idx: int = 0) -> int:
        """Rows."""
        at_replica(self._free, replica_idx, "total_num_blocks")
        return self.max_batch_size

    # -- construction and checks

    def _allocate(self) -> list[tuple[Buffer, Buffer]]:
        pairs = []
        for symbols, device in zip(self.get_symbolic_inputs(), self.params.devices, strict=True):
            batch, tokens = symbols.k_cache.symbolic_dims
            sizes = {batch: self.max_batch_size, tokens: self.max_seq_len}
            k_cache = allocate_buffer(symbols.k_cache, sizes, device, self.session)
            pairs.append((k_cache, allocate_buffer(symbols.v_cache, sizes, device, self.session)))
        return pairs

    def _start_pos(self, batch: Sequence[TextContext], replica_idx: int, extra: int) -> int:
        """Cached tokens of every row; 0 for an empty batch."""
        for position, ctx in enumerate(batch):
            row = self._row(ctx.request_id, replica_idx, "runtime_inputs")
            if row != position:
                raise RequestError(
                    f"runtime_inputs: expected the request of row {position} of the rectangle, "
                    f"got {ctx.request_id!r} of row {row}"
                )
            if ctx.processed_length != batch[0].processed_length:
                raise RequestError(
                    f"start_pos: expected {batch[0].processed_length} cached tokens in every row "
                    f"as in {batch[0].request_id!r}, "
                    f"got {ctx.processed_length} in {ctx.request_id!r}"
                )
            self._require_fits(ctx, extra)
        return batch[0].processed_length if batch else 0

    def _require_fits(self, ctx: TextContext, extra: int) -> None:
        total = ctx.processed_length + ctx.active_length + extra
        if total > self.max_seq_len:
            raise RequestError(
                f"alloc of {ctx.request_id!r}: expected at most max_seq_len={self.max_seq_len} "
                f"tokens, got {total}"
            )

    def _row(self, request_id: RequestID, replica_idx: int, call: str) -> int:
        at_replica(self._free, replica_idx, call)
        replica, row = self._claimed.get(request_id, (None, 0))
        if replica != replica_idx:
            other = "not claimed" if replica is None else f"claimed on replica {replica}"
            raise RequestError(
                f"{call} of {request_id!r}: expected a request claimed on replica {replica_idx}, "
                f"got one that is {other}"
            )
        return row

    def _per_replica(self, batches: Batches | Sequence[TextContext], call: str) -> Batches:
        if not batches and len(self._free) == 1:
            return [[]]
        return per_replica(batches, len(self._free), call)


def _record(k_cache: Buffer, v_cache: Buffer) -> PaddedKVCacheInputs:
    def scalar() -> Buffer:
        return Buffer("int32", (1,), HOST, np.zeros(1, np.int32))

    return PaddedKVCacheInputs(k_cache, v_cache, scalar(), scalar())


def _require_supported(params: KVCacheParams, max_batch_size: int, max_seq_len: int) -> None:
    for name, value in (("max_batch_size", max_batch_size), ("max_seq_len", max_seq_len)):
        if value < 1:
            raise ParamsError(f"{name}: expected >= 1, got {value}")
    for name, given, supported in (
        ("enable_prefix_caching", params.enable_prefix_caching, False),
        ("quantization", params.quantization, None),
    ):
        if given != supported:
            raise UnsupportedError(f"{name}: expected {supported} for a padded cache, got {given}")
