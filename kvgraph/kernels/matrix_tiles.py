"""Tiles of matrix products with a weight: few rows or many.

The rule is the mean number of rows that meet one weight, an upper bound that the host knows: up to
FEW_ROWS a tile has as many as a tensor core takes at least, and what counts is how many bytes of
weights are on their way; above, a tile has four times as many, so that each byte is used oftener.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.contract.dtypes import itemsize
from kvgraph.kernels.shapes import capability
from kvgraph.kernels.variants import Constant, absent_of
from kvgraph.ops.matrices import group_of, span_of
from kvgraph.ops.packed import E4M3, Form

FEW_ROWS = 16
ROLES = ("few", "many")


@dataclass(frozen=True, slots=True)
class MatrixTiles:
    """`block_m` rows by `block_n` columns; `block_k` inputs at a time, all under one scale: of
    nibbles half a span."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def role_of(rows: int, weights: int = 1) -> str:
    """Of `rows` rows in all, that are spread over so many weights."""
    return "few" if rows <= FEW_ROWS * weights else "many"


def matrix_tiles(role: str, dtype: str, form: Form, arch: str) -> MatrixTiles:
    """As large as registers and shared memory hold without spills."""
    few, bits, target = role == "few", form.bits, capability(arch)
    half = span_of(form.group) // 2 if bits == 4 else 0
    if target < 80 or itemsize(dtype) == 4:  # no tensor cores
        wide = half or 32
        warps = 8 if wide > 32 and not few else 4
        return MatrixTiles(16 if few else 32, 32, wide, warps, 1 if target < 80 else 2)
    wide = half or form.group or (128 if bits else 64)
    stages = 4 if wide >= 64 else 8  # of so few bytes more have to be on their way
    return MatrixTiles(16, 64, wide, 4, stages) if few else MatrixTiles(64, 128, wide, 8, 3)


def absent_operands(form: Form, has_bias: bool, prefix: str = "") -> frozenset[str]:
    """Those of a weight that a kernel goes without."""
    given = {
        "scales": form.has_scales,
        "group_bytes": form.has_group_bytes,
        "bias": has_bias,
    }
    return absent_of(**{f"{prefix}{name}": not is_there for name, is_there in given.items()})


def product_constants(dtype: str, form: Form, tiles: MatrixTiles, arch: str) -> dict[str, Constant]:
    """What every kernel of a product is specialised on."""
    return {
        "BITS": form.bits,
        "GROUP": group_of(form.bits, form.group),
        "CODES": form.codes,
        "FP8_NATIVE": form.codes == E4M3 and capability(arch) >= 89,
        "PRECISION": "ieee" if dtype == "float32" else "tf32",
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_K": tiles.block_k,
    }
