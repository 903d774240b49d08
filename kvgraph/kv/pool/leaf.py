"""One cache of one replica: its pool of pages, its lookup rows and its device memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from kvgraph.contract.abilities import ChecksParams
from kvgraph.contract.devices import Device
from kvgraph.contract.dims import TensorType, ceildiv
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.host_memory import host_zeros
from kvgraph.contract.inputs import Buffer, SessionInterface
from kvgraph.contract.params import KVCacheParamInterface, KVCacheParams
from kvgraph.contract.symbols import (
    ContinuousBatchingKVCacheInputSymbols,
    PagedCacheInputSymbols,
)
from kvgraph.errors import BindingError, DeviceError, ParamsError, UnsupportedError
from kvgraph.kv.pool.first_touch import first_touch_of
from kvgraph.kv.pool.pages import PagePool
from kvgraph.kv.pool.rows import Row

RaggedSymbols = PagedCacheInputSymbols | ContinuousBatchingKVCacheInputSymbols


class Leaf:
    """Pages `[0, num_pages)` and the null page `num_pages` of one cache of one replica.

    `table[row.index]` is the lookup row of a request, written only where it changes; columns
    beyond its pages hold the null page. The table widens as rows grow, up to `max_width`.
    """

    __slots__ = ("max_width", "null", "pool", "shards", "symbols", "table", "window")

    def __init__(
        self,
        symbols: Sequence[RaggedSymbols],
        shards: Sequence[ShardBuffers],
        num_pages: int,
        max_rows: int,
        max_width: int,
        window: int | None,
    ) -> None:
        self.symbols = symbols
        self.shards = shards
        self.pool = PagePool(num_pages)
        self.null = num_pages
        self.window = window
        self.max_width = max_width
        self.table: npt.NDArray[np.int32] = self._empty_table(max_rows, min(16, max_width))

    def rebuilt(self) -> Leaf:
        """A leaf whose pages are all free and unknown, on the same memory."""
        rows = self.table.shape[0]
        return Leaf(self.symbols, self.shards, self.null, rows, self.max_width, self.window)

    def extend(self, row: Row, leaf: int, pages: list[int]) -> None:
        """Append `pages` to the row."""
        own = row.pages[leaf]
        start = len(own)
        own += pages
        self.widen(len(own))
        if len(pages) == 1:
            self.table[row.index, start] = pages[0]
        else:
            self.table[row.index, start : len(own)] = pages

    def clear(self, row: Row, leaf: int) -> None:
        """Drop the row's hold on all its pages, the last page first."""
        pages, null = row.pages[leaf], self.null
        self.table[row.index, : len(pages)] = null
        if row.passed[leaf]:
            pages = [page for page in pages if page != null]
        self.pool.drop(reversed(pages))

    def touch_ahead(self, rows: int) -> None:
        """Touch a part of the memory of the next `rows` pages."""
        for shard in self.shards:
            if shard.first_touch is not None:
                shard.first_touch.step(self.pool.next_page, rows)

    def widen(self, least: int) -> None:
        """Widen the table to `least` columns or more; CapacityError changes nothing."""
        rows, width = self.table.shape
        if least <= width:
            return
        wider = self._empty_table(rows, min(max(least, 2 * width), self.max_width))
        wider[:, :width] = self.table
        self.table = wider

    def _empty_table(self, rows: int, width: int) -> npt.NDArray[np.int32]:
        table = host_zeros(self.symbols[0].lookup_table.name, (rows, width), "int32")
        table.fill(self.null)
        return table


class ShardBuffers:
    """Pools of one device: `kv_blocks`, and `kv_scales` if the cache is quantised."""

    __slots__ = ("first_touch", "kv_blocks", "kv_scales")

    def __init__(self, kv_blocks: Buffer, kv_scales: Buffer | None, page_size: int) -> None:
        self.kv_blocks = kv_blocks
        self.kv_scales = kv_scales
        self.first_touch = first_touch_of(kv_blocks, page_size)

    @property
    def all_buffers(self) -> list[Buffer]:
        return [self.kv_blocks] if self.kv_scales is None else [self.kv_blocks, self.kv_scales]


@dataclass(frozen=True, slots=True)
class ReplicaBuffers:
    """Raw pools of one replica: leaf after leaf, and shard after shard in each leaf."""

    all_buffers: list[Buffer]


def allocate_shard(
    symbols: RaggedSymbols,
    sizes: Mapping[str, int],
    device: Device,
    session: SessionInterface | None,
    page_size: int,
) -> ShardBuffers:
    """Allocate the pools of one device, with `sizes` for their symbolic dims."""
    scales = symbols.kv_scales if isinstance(symbols, PagedCacheInputSymbols) else None
    return ShardBuffers(
        allocate_buffer(symbols.kv_blocks, sizes, device, session),
        None if scales is None else allocate_buffer(scales, sizes, device, session),
        page_size,
    )


def require_params(session: SessionInterface | None, params: KVCacheParamInterface) -> None:
    """Raise ParamsError if the session's artifact has another layout; a bare allocator has none.

    Raise UnsupportedError for a cache that no kernel supports.
    """
    if isinstance(session, ChecksParams):
        session.require_params(params)
    for leaf in params.leaves.values():
        leaf.require_kernels()


def require_plain(params: KVCacheParams, kind: str, *, is_ragged: tuple[bool, bool]) -> None:
    """Raise ParamsError for a tree of caches, and UnsupportedError for what a cache without pages
    lacks. `is_ragged`: the value given, and the one that a cache of this `kind` has."""
    if not isinstance(params, KVCacheParams):
        raise ParamsError(
            f"params: expected KVCacheParams for a {kind} cache, got {type(params).__name__}"
        )
    for name, given, supported in (
        ("enable_prefix_caching", params.enable_prefix_caching, False),
        ("quantization", params.quantization, None),
        ("is_ragged", *is_ragged),
    ):
        if given != supported:
            raise UnsupportedError(f"{name}: expected {supported} for a {kind} cache, got {given}")


def allocate_buffer(
    symbol: TensorType, sizes: Mapping[str, int], device: Device, session: SessionInterface | None
) -> Buffer:
    """Allocate memory from the session, or lazily zeroed host memory if `session` is None.

    BindingError if the session returns no Buffer.
    """
    if session is not None:
        found = session.allocate(symbol, sizes)
        if not isinstance(found, Buffer):
            raise BindingError(
                f"{symbol.name}: expected a Buffer from {type(session).__name__}.allocate, "
                f"got {type(found).__name__}"
            )
        return found
    return _host_buffer(symbol, symbol.extents(sizes), device)


def _host_buffer(symbol: TensorType, shape: tuple[int, ...], device: Device) -> Buffer:
    dtype = DTYPES[symbol.dtype].numpy
    nbytes = prod(shape) * dtype.itemsize
    device.require_memory(symbol.name, nbytes)
    if device.kind != "cpu":
        raise DeviceError(f"session: expected one that owns memory on {device}, got None")
    memory = host_zeros(symbol.name, shape, symbol.dtype)
    return Buffer(symbol.dtype, shape, symbol.device, memory)


def table_width(
    params: KVCacheParams, num_pages: int, max_seq_len: int | None, *, windowed_default: int
) -> int:
    """Most columns that a lookup row can need.

    The pool bounds a row, except if a window frees pages: then `max_seq_len` does, or
    `windowed_default` tokens.
    """
    if params.window_size is not None:
        return max(num_pages, ceildiv(max_seq_len or windowed_default, params.page_size))
    if max_seq_len is not None:
        return max(1, min(num_pages, ceildiv(max_seq_len, params.page_size)))
    return num_pages
