"""The batch of a step on one replica: its rows, and their values for a graph.

    resolve -> lacking (rows that need pages) -> measure -> fill -> awake (rows to commit)

A decode step that crosses no page edge runs only here. The index tensors are host memory at fixed
addresses, double-buffered:

    cache_lengths [batch_size]
    lookup_table  [batch_size, max_num_pages]
    max_lengths   [num_steps, 2]

Each replica has two sets of these and fills them in turn, so a record stays valid until the next
call but one. If a session copies them to a device (`uploader`), both sets share the copies, and a
record is valid until the next call. If the same batch comes again with the same width, only the
rows with changed pages are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.contract.abilities import Upload
from kvgraph.contract.devices import HOST
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.host_memory import host_zeros
from kvgraph.contract.inputs import BatchCharacteristics, Buffer, RaggedKVCacheInputs
from kvgraph.contract.values import require_integer, shown
from kvgraph.errors import CapacityError, RequestError
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.rows import Phase, Row, row_of
from kvgraph.kv.requests import MAX_STEPS, RequestID, TextContext, no_part, require_context

Extents = tuple[list[int], int, int, int, int]
"""Measures of a batch: cache lengths, longest new run, longest context, table width, steps."""


class BatchRows:
    """A batch with claimed requests only: their contexts and rows, in the same order."""

    __slots__ = ("_indices", "contexts", "rows")

    def __init__(self, contexts: list[TextContext], rows: list[Row]) -> None:
        self.contexts = contexts
        self.rows = rows
        self._indices: npt.NDArray[np.intp] | None = None

    @property
    def indices(self) -> npt.NDArray[np.intp]:
        """Indices of the requests' rows in the lookup tables, `[batch_size]`."""
        if self._indices is None:
            self._indices = np.array([row.index for row in self.rows], np.intp)
        return self._indices

    def lacking(self, extra: int) -> list[tuple[TextContext, Row]]:
        """Rows that need pages for `extra` tokens beyond the active ones; mostly empty."""
        return [
            (ctx, row)
            for ctx, row in zip(self.contexts, self.rows, strict=True)
            if ctx.processed_length + ctx.active_length + extra > row.limit
        ]

    def awake(self) -> list[tuple[TextContext, Row]]:
        """Rows with pages to commit, or with pages behind their window; mostly empty."""
        return [
            (ctx, row)
            for ctx, row in zip(self.contexts, self.rows, strict=True)
            if ctx.processed_length >= row.wake
        ]


class ReplicaBatch:
    """The batch that replica `index` runs, and two sets of index tensors for it."""

    def __init__(
        self, index: int, leaves: Sequence[Leaf], settings: PoolSettings, upload: Upload | None
    ) -> None:
        self.max_width = min(leaf.max_width for leaf in leaves)
        self._index = index
        self._settings = settings
        self._last = BatchRows([], [])
        self._sets = [IndexTensors(leaves, settings.max_batch_size, upload) for _ in range(2)]
        self._dirty = [tensors.dirty for tensors in self._sets]

    # -- which rows

    def resolve(
        self, given: Sequence[TextContext], claimed: Mapping[RequestID, Row], call: str
    ) -> BatchRows:
        """Rows of a batch; RequestError if one is not claimed here, or there are too many.

        The previous call's batch is recognised by its context objects and not looked up again.
        """
        contexts = given if type(given) is list else list(given)
        if contexts == self._last.contexts:
            return self._last
        contexts = list(contexts)
        if len(contexts) > self._settings.max_batch_size:
            raise RequestError(
                f"{call}: expected at most max_batch_size={self._settings.max_batch_size} rows "
                f"for replica {self._index}, got {len(contexts)}"
            )
        for ctx in contexts:
            require_context(ctx, call)
        rows = [row_of(ctx.request_id, claimed, self._index, call) for ctx in contexts]
        if len(set(rows)) != len(rows):
            twice = next(row for i, row in enumerate(rows) if row in rows[:i])
            raise RequestError(
                f"{call}: expected every request once in a batch, got {twice.request_id!r} twice"
            )
        self.forget()  # no batch is valid until all positions are set
        for position, row in enumerate(rows):
            row.position = position
        self._last = BatchRows(contexts, rows)
        return self._last

    def forget(self) -> None:
        """Look the next batch up again, because a request was released."""
        self._last = BatchRows([], [])

    def mark(self, row: Row) -> None:
        """Record that the row's pages changed."""
        for dirty in self._dirty:
            dirty.add(row)

    # -- their values

    def measure(
        self,
        batch: BatchRows,
        extra: int,
        max_cache_length: int | None,
        bounds: BatchCharacteristics | None,
    ) -> Extents:
        """Lengths, maxima and table width of a batch; raises the errors of `runtime_inputs`."""
        lengths = []
        longest_new = longest = 0
        for ctx, row in zip(batch.contexts, batch.rows, strict=True):
            cached, new = ctx.processed_length, ctx.active_length
            total = cached + new
            if total + extra > row.capacity:
                raise _too_few_pages(row, total + extra)
            if new < 0 or total > ctx.current_length:
                raise no_part(ctx, new)
            if new > longest_new:
                longest_new = new
            if total > longest:
                longest = total
            lengths.append(cached)
        if bounds is not None:
            if not isinstance(bounds, BatchCharacteristics):
                raise RequestError(
                    f"batch_characteristics: expected BatchCharacteristics, got {shown(bounds)}"
                )
            self._require_within(bounds, len(lengths), longest_new, longest)
            longest_new, longest = bounds.max_prompt_length, bounds.max_cache_valid_length
        width = max(1, -(-(longest + extra) // self._settings.page_size))  # rounded up
        if max_cache_length is not None:
            width = self._widened(width, max_cache_length, longest + extra)
        if width > self.max_width:
            raise RequestError(
                f"lookup_table: expected at most {self.max_width} pages of the pool in a row, "
                f"got {width} for a context of {longest + extra} tokens"
            )
        return lengths, longest_new, longest, width, extra + 1

    def fill(
        self, turn: int, batch: BatchRows, extents: Extents
    ) -> list[list[RaggedKVCacheInputs]]:
        """Write set `turn` (0 or 1); return, per leaf, one record per shard."""
        return self._sets[turn].fill(batch, extents)

    def verify(self) -> None:
        """Raise AssertionError if a row that is not marked differs from its lookup row."""
        for tensors in self._sets:
            tensors.verify(self._last)

    def _require_within(
        self, bounds: BatchCharacteristics, rows: int, longest_new: int, longest: int
    ) -> None:
        for name, bound, value in (
            ("batch_size", bounds.batch_size, rows),
            ("max_prompt_length", bounds.max_prompt_length, longest_new),
            ("max_cache_valid_length", bounds.max_cache_valid_length, longest),
        ):
            if value > bound:
                raise RequestError(
                    f"batch_characteristics.{name}: expected at least {value} as in the batch "
                    f"of replica {self._index}, got {bound}"
                )

    def _widened(self, width: int, max_cache_length: int, needed: int) -> int:
        max_cache_length = require_integer("max_cache_length", max_cache_length, RequestError)
        pages = ceildiv(max_cache_length, self._settings.page_size)
        if max_cache_length < 1 or pages < width:
            raise RequestError(
                f"max_cache_length: expected at least {max(1, needed)} tokens as in the batch of "
                f"replica {self._index}, got {max_cache_length}"
            )
        if pages > self.max_width:
            raise RequestError(
                f"max_cache_length: expected at most the {self.max_width} pages of the pool, "
                f"got {max_cache_length} tokens in {pages} pages"
            )
        return pages


def _too_few_pages(row: Row, tokens: int) -> CapacityError:
    if row.phase is Phase.LOADING:
        return CapacityError(
            f"runtime_inputs of {row.request_id!r}: expected a request whose pages have "
            "landed, got one whose pages are on their way; call `poll` first"
        )
    return CapacityError(
        f"runtime_inputs of {row.request_id!r}: expected pages for {tokens} tokens, "
        f"got {row.num_pages} for {row.capacity}; call `alloc` first"
    )


class IndexTensors:
    """One of a replica's two sets of index tensors, and the records over them.

    On a CPU these arrays are the graph's inputs. For other devices a session with an `uploader()`
    makes the device's copy at every fill; both sets share one copy.
    `dirty`: rows with pages that changed since this set was filled.
    """

    __slots__ = (
        "_batch",
        "_leaves",
        "_lengths",
        "_max_lengths",
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
        symbols = leaves[0].symbols[0]
        self._lengths = host_zeros(symbols.cache_lengths.name, (max_rows,), "int32")
        self._max_lengths = np.empty((MAX_STEPS, 2), np.int32)  # memory only where it is used
        self._tables = [
            host_zeros(
                leaf.symbols[0].lookup_table.name, (max_rows, leaf.max_width), "int32"
            ).reshape(-1)
            for leaf in leaves
        ]
        self._shape = (-1, -1, -1)
        self._batch: BatchRows | None = None
        self._views: list[npt.NDArray[np.int32]] = []
        self.dirty: set[Row] = set()
        self.records: list[list[RaggedKVCacheInputs]] = []

    def fill(self, batch: BatchRows, extents: Extents) -> list[list[RaggedKVCacheInputs]]:
        """Write the tensors of one batch; return, per leaf, one record per shard."""
        lengths, longest_new, longest, width, num_steps = extents
        rows = len(lengths)
        if (rows, width, num_steps) != self._shape:
            self._reshape(rows, width, num_steps)
        if batch is not self._batch:
            self._gather(batch, width)
        elif self.dirty:
            self._patch(batch, width)
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
        self._shape, self._batch = (-1, -1, -1), None  # invalid until the new records are made
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

    def _gather(self, batch: BatchRows, width: int) -> None:
        """Copy the lookup rows of the whole batch."""
        for leaf, view in zip(self._leaves, self._views, strict=True):
            known = min(width, leaf.table.shape[1])
            view[:, :known] = leaf.table[batch.indices, :known]
            view[:, known:] = leaf.null
        self._batch = batch
        self.dirty.clear()

    def _patch(self, batch: BatchRows, width: int) -> None:
        """Copy the lookup rows that changed, for requests in the batch."""
        rows = batch.rows
        for row in self.dirty:
            at = row.position
            if at < len(rows) and rows[at] is row:
                for leaf, view in zip(self._leaves, self._views, strict=True):
                    known = min(width, leaf.table.shape[1])
                    view[at, :known] = leaf.table[row.index, :known]
        self.dirty.clear()

    def verify(self, current: BatchRows) -> None:
        """Raise AssertionError if a row of the batch is neither marked dirty nor up to date."""
        if self._batch is not current:
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
