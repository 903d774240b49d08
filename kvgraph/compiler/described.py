"""What a plan knows of a model: its caches, and the sizes of its weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvgraph.compiler.cache import LayerNeed
from kvgraph.compiler.packed_weights import Packed, pack
from kvgraph.compiler.passes import TABLE_BYTES
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import itemsize
from kvgraph.ops._linear import COLUMNS, DEPTH


@dataclass(frozen=True, order=True)
class Linear:
    """A linear layer; `is_tied` where its weight is an embedding table's."""

    out_features: int
    in_features: int
    has_bias: bool
    is_tied: bool = False


@dataclass(frozen=True)
class Described:
    """A checkpoint as its configuration and the shapes of its weights describe it.

    `table_elements` are those of embedding tables, `other_elements` of all parameters that are no
    table and not of a linear layer. `rotary_dims`: of each rotary embedding that a table by
    position can hold.
    """

    architecture: str
    layers: tuple[LayerNeed, ...]
    max_seq_len: int
    linears: tuple[Linear, ...]
    table_elements: int
    other_elements: int
    rotary_dims: tuple[int, ...]

    def weight_bytes(self, dtype: str, bits: int | None) -> int:
        """With rotary tables: of `dtype`, or with linear layers packed and tables in bfloat16.

        Packed, a router that is a linear layer counts as one; it keeps its few bytes (pack_linear).
        """
        other = self.other_elements * itemsize(dtype) + sum(self._rotary_tables())
        if bits is None:
            own = [linear for linear in self.linears if not linear.is_tied]
            elements = self.table_elements + sum(map(_elements, own))
            return elements * itemsize(dtype) + other
        tile = pack([np.zeros((COLUMNS, DEPTH), np.float32)], bits)
        packed = sum(_packed_bytes(linear, tile) for linear in self.linears)
        return packed + self.table_elements * itemsize("bfloat16") + other

    def _rotary_tables(self) -> list[int]:
        """Bytes of each table of cosines and sines by position that fuse_rope makes."""
        tables = [self.max_seq_len * dim * itemsize("float32") for dim in self.rotary_dims]
        return [nbytes for nbytes in tables if nbytes <= TABLE_BYTES]


def _elements(linear: Linear) -> int:
    return linear.out_features * (linear.in_features + linear.has_bias)


def _packed_bytes(linear: Linear, tile: Packed) -> int:
    """`tile`: a panel that is `DEPTH` deep, as `pack` makes it."""
    panels, tiles = ceildiv(linear.out_features, COLUMNS), ceildiv(linear.in_features, DEPTH)
    bias = 4 * COLUMNS if linear.has_bias else 0
    deep = tile.weight.nbytes + (tile.multipliers.nbytes if tile.multipliers is not None else 0)
    flat = bias + (tile.scales.nbytes if tile.scales is not None else 0)
    return panels * (tiles * deep + flat)
