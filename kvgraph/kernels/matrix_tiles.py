"""Tiles of matrix products with a weight: few rows or many.

The rule is the mean number of rows that meet one weight, an upper bound that the host knows: up to
FEW_ROWS a tile has as many as a tensor core takes at least, and what counts is how many bytes of
weights are on their way; above, a tile has four times as many, so that each byte is used oftener.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.contract.dtypes import itemsize
from kvgraph.kernels.shapes import capability
from kvgraph.kernels.variants import Constant
from kvgraph.ops.matrices import GROUP

FEW_ROWS = 16
ROLES = ("few", "many")


@dataclass(frozen=True, slots=True)
class MatrixTiles:
    """`block_m` rows by `block_n` columns; `block_k` inputs at a time, of nibbles half a group."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def role_of(rows: int, weights: int = 1) -> str:
    """Of `rows` rows in all, that are spread over so many weights."""
    return "few" if rows <= FEW_ROWS * weights else "many"


def matrix_tiles(role: str, dtype: str, bits: int, arch: str) -> MatrixTiles:
    """As large as registers and shared memory hold without spills."""
    few = role == "few"
    target = capability(arch)
    if target < 80 or itemsize(dtype) == 4:  # no tensor cores
        wide = 64 if bits == 4 else 32
        warps = 8 if bits == 4 and not few else 4
        return MatrixTiles(16 if few else 32, 32, wide, warps, 1 if target < 80 else 2)
    wide = 128 if bits == 8 else 64
    return MatrixTiles(16, 64, wide, 4, 4) if few else MatrixTiles(64, 128, wide, 8, 3)


def product_constants(dtype: str, bits: int, tiles: MatrixTiles) -> dict[str, Constant]:
    """What every kernel of a product is specialised on."""
    return {
        "BITS": bits,
        "GROUP": GROUP,
        "PRECISION": "ieee" if dtype == "float32" else "tf32",
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
    }
