"""Device memory of the pages of one leaf of one replica."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvgraph.contract.abilities import PageCopier
from kvgraph.contract.dtypes import itemsize
from kvgraph.contract.inputs import Buffer
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.tiers.copies import copier_of

Records = Sequence[npt.NDArray[np.uint8]]


@dataclass(frozen=True, eq=False)
class LeafPools:
    """Pools of a leaf; a record is a page of each: per shard `kv_blocks`, then `kv_scales`.

    `shards`: range of shards and their total, such as "0-2/2". `leaf`: path in a tree.
    """

    leaf: str
    shards: str
    buffers: tuple[Buffer, ...]
    copier: PageCopier

    sizes: tuple[int, ...] = field(init=False)
    """Bytes of a page in each buffer."""
    record_size: int = field(init=False)

    def __post_init__(self) -> None:
        sizes = tuple(page_nbytes(buffer) for buffer in self.buffers)
        object.__setattr__(self, "sizes", sizes)
        object.__setattr__(self, "record_size", sum(sizes))

    def copy_out(self, pages: Sequence[int], records: Records) -> None:
        """Copy page `pages[i]` to `records[i]`."""
        for buffer, rows in self._parts(records):
            self.copier.copy_pages_out(buffer, pages, rows)

    def copy_in(self, pages: Sequence[int], records: Records) -> None:
        """Copy `records[i]` to page `pages[i]`."""
        for buffer, rows in self._parts(records):
            self.copier.copy_pages_in(buffer, pages, rows)

    def _parts(self, records: Records) -> Iterator[tuple[Buffer, Records]]:
        """Yield each buffer with its part of every record."""
        start = 0
        for buffer, size in zip(self.buffers, self.sizes, strict=True):
            yield buffer, [record[start : start + size] for record in records]
            start += size


def page_nbytes(buffer: Buffer) -> int:
    """Bytes of one page of a pool."""
    return math.prod(buffer.shape[1:]) * itemsize(buffer.dtype)


def pools_of(leaf: Leaf, path: str, num_shards: int, session: object) -> LeafPools:
    """The pools of a replica's leaf; DeviceError if the session cannot copy its pages."""
    buffers = tuple(buffer for shard in leaf.shards for buffer in shard.all_buffers)
    shards = f"0-{len(leaf.shards)}/{num_shards}"
    return LeafPools(path, shards, buffers, copier_of(session, buffers))
