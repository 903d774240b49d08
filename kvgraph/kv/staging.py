"""Host copies of a batch's index tensors, at fixed addresses, double-buffered.

    cache_lengths [batch_size]
    lookup_table  [batch_size, max_num_pages]
    max_lengths   [num_steps, 2]

Each replica has two of these and fills them in turn, so a record stays valid until the next call
but one. While the same batch comes again with the same width, only the rows whose pages changed
since are copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.contract.devices import HOST
from kvgraph.contract.dims import TensorType
from kvgraph.contract.inputs import Buffer, RaggedKVCacheInputs
from kvgraph.kv.leaf import Leaf
from kvgraph.kv.rows import Resolved, Row

Extents = tuple[list[int], int, int, int, int]
"""cache lengths, longest new run, longest context, table width, steps: a batch measured."""

Upload = Callable[[TensorType, npt.NDArray[np.int32], int], Buffer]
"""(symbol, values, most elements it will have) -> the device's copy, at one address for life."""

MAX_STEPS = 1 << 16
"""Most steps of one call; the bound that an exported program assumes too."""


class Staging:
    """One of a replica's two sets of index tensors, and the records over them.

    On a CPU these arrays are the graph's inputs. For other devices a session that has an
    `uploader()` is asked for the device's copy at every fill: both sets share one.
    `dirty` holds the rows whose pages changed since this set was filled.
    """

    __slots__ = (
        "_leaves",
        "_lengths",
        "_max_lengths",
        "_resolved",
        "_shape",
        "_tables",
        "_upload",
        "_views",
        "dirty",
        "records",
    )

    def __init__(self, leaves: Sequence[Leaf], max_rows: int, upload: Upload | None) -> None:
        self._leaves = leaves
        self._upload = upload
        self._lengths = np.empty(max_rows, np.int32)
        self._max_lengths = np.empty((MAX_STEPS, 2), np.int32)  # memory only where it is used
        self._tables = [np.empty(max_rows * leaf.max_width, np.int32) for leaf in leaves]
        self._shape = (-1, -1, -1)
        self._resolved: Resolved | None = None
        self._views: list[npt.NDArray[np.int32]] = []
        self.dirty: set[Row] = set()
        self.records: list[list[RaggedKVCacheInputs]] = []

    def fill(self, resolved: Resolved, extents: Extents) -> list[list[RaggedKVCacheInputs]]:
        """Write the tensors of one batch; per leaf, one record per shard."""
        lengths, longest_new, longest, width, num_steps = extents
        rows = len(lengths)
        if (rows, width, num_steps) != self._shape:
            self._reshape(rows, width, num_steps)
        if resolved is not self._resolved:
            self._gather(resolved, width)
        elif self.dirty:
            self._patch(resolved, width)
        self._lengths[:rows] = lengths
        top = self._max_lengths
        top[0, 0] = longest_new
        top[0, 1] = longest
        if num_steps > 1:
            top[1:num_steps, 0] = 1
            top[1:num_steps, 1] = np.arange(longest + 1, longest + num_steps)
        if self._upload is not None:
            self._upload_records(self._upload)
        return self.records

    def _reshape(self, rows: int, width: int, num_steps: int) -> None:
        self._shape, self._resolved = (-1, -1, -1), None  # until the records are the new ones
        self._views = [table[: rows * width].reshape(rows, width) for table in self._tables]
        lengths = self._lengths[:rows]  # one array in all records: it is incremented once
        self.records = [
            self._leaf_records(leaf, view, lengths, self._max_lengths[:num_steps])
            for leaf, view in zip(self._leaves, self._views, strict=True)
        ]
        self._shape = (rows, width, num_steps)

    def _leaf_records(
        self,
        leaf: Leaf,
        table: npt.NDArray[np.int32],
        lengths: npt.NDArray[np.int32],
        bounds: npt.NDArray[np.int32],
    ) -> list[RaggedKVCacheInputs]:
        rows, num_steps = lengths.size, len(bounds)
        maxima = Buffer("int32", (num_steps, 2), HOST, bounds)
        lookup = table if leaf.symbols[0].lookup_table.rank == 2 else table.reshape(rows)
        return [
            RaggedKVCacheInputs(
                shard.kv_blocks,
                Buffer("int32", (rows,), symbols.cache_lengths.device, lengths),
                Buffer("int32", lookup.shape, symbols.lookup_table.device, lookup),
                maxima,
                shard.kv_scales,
            )
            for symbols, shard in zip(leaf.symbols, leaf.shards, strict=True)
        ]

    def _gather(self, resolved: Resolved, width: int) -> None:
        """Copy the lookup rows of the whole batch."""
        for leaf, view in zip(self._leaves, self._views, strict=True):
            known = min(width, leaf.table.shape[1])
            view[:, :known] = leaf.table[resolved.indices, :known]
            view[:, known:] = leaf.null
        self._resolved = resolved
        self.dirty.clear()

    def _patch(self, resolved: Resolved, width: int) -> None:
        """Copy the lookup rows that changed, of requests in the batch."""
        rows = resolved.rows
        for row in self.dirty:
            at = row.position
            if at < len(rows) and rows[at] is row:
                for leaf, view in zip(self._leaves, self._views, strict=True):
                    known = min(width, leaf.table.shape[1])
                    view[at, :known] = leaf.table[row.index, :known]
        self.dirty.clear()

    def verify(self, current: Resolved) -> None:
        """AssertionError if a row of the batch is neither marked dirty nor up to date."""
        if self._resolved is not current:
            return
        width = self._shape[1]
        for at, row in enumerate(current.rows):
            if row not in self.dirty:
                for leaf, view in zip(self._leaves, self._views, strict=True):
                    expected = leaf.table[row.index, :width].tolist()
                    expected += [leaf.null] * (width - len(expected))
                    assert view[at].tolist() == expected, row.request_id

    def _upload_records(self, upload: Upload) -> None:
        lengths = self._lengths[: self._shape[0]]
        for leaf, view, table, records in zip(
            self._leaves, self._views, self._tables, self.records, strict=True
        ):
            for symbols, record in zip(leaf.symbols, records, strict=True):
                if symbols.cache_lengths.device.kind != "cpu":
                    record.cache_lengths = upload(
                        symbols.cache_lengths, lengths, self._lengths.size
                    )
                    record.lookup_table = upload(
                        symbols.lookup_table, view.reshape(record.lookup_table.shape), table.size
                    )
