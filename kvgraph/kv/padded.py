"""The plain rectangular cache, for export targets that have no paging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from kvgraph.contract.devices import HOST, Device
from kvgraph.contract.inputs import (
    BatchCharacteristics,
    Buffer,
    KVCacheInputs,
    PaddedKVCacheInputs,
    SessionInterface,
)
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.symbols import PaddedKVCacheInputSymbols
from kvgraph.errors import RequestError
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.pool.leaf import allocate_buffer, require_params, require_plain
from kvgraph.kv.requests import Batches, TextContext, require_steps


class PaddedKVCacheManager(KVCacheManager):
    """One rectangle `[L, max_batch_size, max_seq_len, K, D]` of keys and one of values.

    A claim takes the lowest free row of a replica. A batch lists its requests in the order of their
    rows, from row 0. A graph always sees `max_batch_size` rows; rows beyond the batch are idle: in
    `input_row_offsets` the last offset of a smaller batch is repeated (`[0, 3, 3, 3]`). All rows of
    a batch have the same number of cached tokens (`start_pos`). `num_layers` and `devices` override
    the values of `params`.
    """

    params: KVCacheParams
    _of_slots = True

    def __init__(
        self,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int | None = None,
        devices: Sequence[Device] | None = None,
        session: SessionInterface | None = None,
        is_ragged: bool = False,
    ) -> None:
        require_plain(params, "padded", is_ragged=(is_ragged, False))
        padded = replace(params, cache_strategy=KVCacheStrategy.PADDED)
        super().__init__(padded, max_batch_size, max_seq_len, num_layers, devices, session)
        require_params(session, self.params)
        self._turn = 0
        rectangles = self._allocate()
        self._records = [[_record(k, v) for k, v in rectangles] for _ in range(2)]

    # -- values for a graph

    def runtime_inputs(
        self,
        batches: Batches,
        *,
        max_cache_length: int | None = None,
        batch_characteristics: BatchCharacteristics | None = None,
        num_steps: int = 1,
    ) -> KVCacheInputs:
        """The rectangles and the batch's `start_pos`; RequestError if the rows' differ.

        The two bounds have no effect: a rectangle has one size.
        """
        extra = require_steps(num_steps)
        given = self._per_replica(batches, "runtime_inputs")
        starts = [self._start_pos(batch, i, extra) for i, batch in enumerate(given)]
        self._turn = 1 - self._turn
        records = self._records[self._turn]
        for i, record in enumerate(records):
            record.start_pos.handle[0] = starts[i // self.params.n_shards]
        return KVCacheInputs(records)

    def fetch(
        self, batch: Sequence[TextContext], num_steps: int = 1
    ) -> Sequence[PaddedKVCacheInputs]:
        records = self.runtime_inputs([batch], num_steps=num_steps).inputs
        return cast(Sequence[PaddedKVCacheInputs], records)

    # -- queries

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> list[PaddedKVCacheInputSymbols]:
        records = self.params.get_symbolic_inputs(devices, num_layers)
        return cast(list[PaddedKVCacheInputSymbols], records)

    def input_symbols(self) -> list[PaddedKVCacheInputSymbols]:
        return self.get_symbolic_inputs()

    def num_free_blocks(self, replica_idx: int = 0) -> int:
        """Number of free rows of the replica."""
        return len(self._slots.free(replica_idx, "num_free_blocks"))

    def total_num_blocks(self, replica_idx: int = 0) -> int:
        """Number of rows of the replica: `max_batch_size`."""
        self._slots.free(replica_idx, "total_num_blocks")
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
            row = self._slots.slot_of(ctx.request_id, replica_idx, "runtime_inputs")
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


def _record(k_cache: Buffer, v_cache: Buffer) -> PaddedKVCacheInputs:
    def scalar() -> Buffer:
        return Buffer("int32", (1,), HOST, np.zeros(1, np.int32))

    return PaddedKVCacheInputs(k_cache, v_cache, scalar(), scalar())
