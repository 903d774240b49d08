"""Variants and launches of quantized_linear: one launch, whose tiles follow from the rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvgraph.contract.dims import ceildiv
from kvgraph.kernels import variants
from kvgraph.kernels.launch import LaunchPlan, launch_of
from kvgraph.kernels.matrix_tiles import (
    ROLES,
    SPREAD_COLUMNS,
    MatrixTiles,
    absent_operands,
    few_tiles,
    matrix_tiles,
    product_constants,
    role_of,
)
from kvgraph.kernels.variants import Constant, Variant, absent_of
from kvgraph.ops.matrices import stored_dtype
from kvgraph.ops.packed import INTEGERS, Form


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Constants of one quantized_linear."""

    dtype: str
    bits: int
    in_features: int
    out_features: tuple[int, int, int]
    gated: bool = False
    bias: bool = False
    group: int = 0
    codes: int = INTEGERS
    offsets: bool = False

    @classmethod
    def of(
        cls,
        dtype: str,
        shapes: Mapping[str, tuple[int, ...]],
        attributes: Mapping[str, float],
    ) -> LinearShape:
        """Of a call with x of `dtype`, by the shapes of its operands. The same where kernels are
        compiled and launched."""
        first, second, third = (int(attributes[f"out_features{s}"]) for s in ("", "_1", "_2"))
        return cls(
            dtype=dtype,
            bits=int(attributes["bits"]),
            in_features=shapes["x"][-1],
            out_features=(first, second, third),
            gated=bool(attributes["silu_mul"]),
            bias="bias" in shapes,
            group=int(attributes["group"]),
            codes=int(attributes["codes"]),
            offsets="group_bytes" in shapes and attributes["codes"] == INTEGERS,
        )

    @property
    def form(self) -> Form:
        return Form(self.bits, self.group, self.codes, self.offsets)

    @property
    def columns(self) -> int:
        return sum(self.out_features) * (2 if self.gated else 1)


def linear_variants(shape: LinearShape, arch: str) -> tuple[Variant, ...]:
    """Every kernel that `plan_linear` may launch for `shape`."""
    return tuple(_variant(shape, arch, role) for role in ROLES)


def plan_linear(shape: LinearShape, arch: str, rows: int, role: str = "") -> LaunchPlan:
    """Operands: those of the op, by name; its outputs are written. `role` "": by the rows."""
    if not rows:
        return LaunchPlan()
    role = role or role_of(rows, few_tiles(shape.dtype, arch, spread=_spread(shape)))
    tiles = _tiles(shape, arch, role)
    grid = ceildiv(rows, tiles.block_m), ceildiv(shape.columns, tiles.block_n)
    values = {"num_rows": rows, "in_features": shape.in_features}
    return LaunchPlan((launch_of(_variant(shape, arch, role), grid, values),))


def _tiles(shape: LinearShape, arch: str, role: str) -> MatrixTiles:
    return matrix_tiles(role, shape.dtype, shape.form, arch, spread=_spread(shape))


def _spread(shape: LinearShape) -> bool:
    return shape.columns >= SPREAD_COLUMNS


@lru_cache
def _variant(shape: LinearShape, arch: str, role: str) -> Variant:
    tiles = _tiles(shape, arch, role)
    first, second, third = shape.out_features
    constants: dict[str, Constant] = {
        "IN": shape.in_features,
        "OUT": first,
        "OUT_1": second,
        "OUT_2": third,
        "GATED": shape.gated,
        **product_constants(shape.dtype, shape.form, tiles, arch),
    }
    return Variant(
        variants.QUANTIZED_LINEAR,
        role,
        shape.dtype,
        stored_dtype(shape.bits, shape.codes, shape.dtype),
        constants,
        tiles.num_warps,
        tiles.num_stages,
        absent_operands(shape.form, shape.bias) | absent_of(out_1=not second, out_2=not third),
    )
