"""Variants and launches of quantized_linear: tiles, and parts of the inputs, follow from the rows.

A layer of few columns gives few multiprocessors a tile of many rows. Its inputs are split then:
each part is summed apart, in float32, and a second launch sums the parts in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvgraph.contract.dims import ceildiv
from kvgraph.kernels import variants
from kvgraph.kernels.launch import LaunchPlan, launch_of
from kvgraph.kernels.matrix_tiles import (
    ROLES,
    ROLES_OF_ROWS,
    SPREAD_COLUMNS,
    MatrixTiles,
    absent_operands,
    linear_roles,
    linear_tiles,
    product_constants,
    role_of,
)
from kvgraph.kernels.shapes import MULTIPROCESSORS, power_of_two
from kvgraph.kernels.variants import Constant, Variant, absent_of
from kvgraph.ops.matrices import stored_dtype
from kvgraph.ops.packed import INTEGERS, Form

SPLIT_SUFFIX = "_split"
PROGRAMS = 2.1
"""For a multiprocessor, which parts of the inputs make up: near the best of a sweep on an H100."""
MOST_PARTS, LEAST_BLOCKS = 8, 2
"""Of the inputs; and steps that a part has at least."""
EXPANDED_COLUMNS = 32
"""Of a program that expands a weight."""


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
    """Every kernel that `plan_linear` may launch for `shape`, and what multiplies its weight in
    full."""
    roles = roles_of(shape, arch)
    products = [_variant(shape, arch, role) for role in roles]
    sums = [_sum_variant(shape)] if any(map(is_split, roles)) else []
    gates = [gate_variant(shape)] if shape.gated else []
    return (*products, *sums, _expand_variant(shape, arch), *gates)


@lru_cache
def roles_of(shape: LinearShape, arch: str) -> tuple[str, ...]:
    """Of the products that `plan_linear` may launch: of few rows first, those over parts of the
    inputs with SPLIT_SUFFIX."""
    few, *others = linear_roles(shape.dtype, arch)
    found = [few]
    for role in others:
        tiles = _tiles(shape, arch, role)
        splits = parts_of(shape, arch, role, tiles.block_m) > 1
        found += [role + SPLIT_SUFFIX] if splits else []
        found += [role] if not splits or role == others[-1] else []
    return tuple(found)


def is_split(role: str) -> bool:
    return role.endswith(SPLIT_SUFFIX)


def parts_of(shape: LinearShape, arch: str, role: str, rows: int) -> int:
    """Into how many parts the inputs are split, so that all multiprocessors have a tile."""
    if role in ROLES:
        return 1
    tiles = _tiles(shape, arch, role)
    programs = ceildiv(rows, tiles.block_m) * ceildiv(shape.columns, tiles.block_n)
    wanted = round(PROGRAMS * MULTIPROCESSORS[arch] / programs)
    return max(min(wanted, MOST_PARTS, _blocks(shape, tiles) // LEAST_BLOCKS), 1)


def plan_linear(shape: LinearShape, arch: str, rows: int, role: str = "") -> LaunchPlan:
    """Operands: those of the op, by name; its outputs are written. `role`: one of `roles_of`; "":
    by the rows."""
    if not rows:
        return LaunchPlan()
    own = role.removesuffix(SPLIT_SUFFIX) or _role_of(shape, arch, rows)
    parts = parts_of(shape, arch, own, rows) if not role or is_split(role) else 1
    if is_split(role):
        parts = max(parts, 2)
    return plan_tiles(shape, arch, rows, own, _tiles(shape, arch, own), parts)


def plan_tiles(
    shape: LinearShape, arch: str, rows: int, role: str, tiles: MatrixTiles, parts: int
) -> LaunchPlan:
    """`plan_linear` with these tiles, over at most so many parts of the inputs."""
    grid = ceildiv(rows, tiles.block_m), ceildiv(shape.columns, tiles.block_n)
    values = {"num_rows": rows, "in_features": shape.in_features}
    blocks = _blocks(shape, tiles)
    each = ceildiv(blocks, parts)
    parts = ceildiv(blocks, each)
    if parts == 1:
        whole = _variant_of(shape, arch, role, tiles)
        return LaunchPlan((launch_of(whole, grid, values),))
    assert tiles.slices == 1, "slices are of all inputs"
    split, total = _variant_of(shape, arch, role + SPLIT_SUFFIX, tiles), _sum_variant(shape)
    pieces = ceildiv(shape.columns, _int(total, "BLOCK_D"))
    launches = (
        launch_of(split, (grid[0], grid[1] * parts), values | {"part_blocks": each}),
        launch_of(total, (rows, pieces), values | {"num_parts": parts}),
    )
    return LaunchPlan(launches, {"sums": parts * rows * shape.columns})


def plan_expand(shape: LinearShape, arch: str, first: int, columns: int) -> LaunchPlan:
    """`plain [columns, in_features]`: the weight of so many columns from `first` on in the
    activations' dtype; gates before what they gate, of which both numbers count each."""
    variant = _expand_variant(shape, arch)
    blocks = _blocks(shape, _tiles(shape, arch, linear_roles(shape.dtype, arch)[-1]))
    grid = ceildiv(columns, _int(variant, "BLOCK_N")), blocks
    return LaunchPlan((launch_of(variant, grid, {"first": first, "num_columns": columns}),))


def gate_variant(shape: LinearShape) -> Variant:
    """Of products with a gated weight in full."""
    return variants.silu_mul_variant(shape.dtype, shape.out_features[0])


def _role_of(shape: LinearShape, arch: str, rows: int) -> str:
    roles = linear_roles(shape.dtype, arch)
    if roles == ROLES:
        return role_of(rows, 1)
    return next((role for role in roles if rows <= ROLES_OF_ROWS[role]), roles[-1])


def _tiles(shape: LinearShape, arch: str, role: str) -> MatrixTiles:
    spread = shape.columns >= SPREAD_COLUMNS
    return linear_tiles(role, shape.dtype, shape.form, arch, spread=spread)


def _blocks(shape: LinearShape, tiles: MatrixTiles) -> int:
    """Steps over the inputs: a step of nibbles has twice as many as bytes."""
    return ceildiv(shape.in_features, tiles.block_k * (2 if shape.bits == 4 else 1))


def _variant(shape: LinearShape, arch: str, role: str) -> Variant:
    return _variant_of(shape, arch, role, _tiles(shape, arch, role.removesuffix(SPLIT_SUFFIX)))


@lru_cache
def _variant_of(shape: LinearShape, arch: str, role: str, tiles: MatrixTiles) -> Variant:
    split = is_split(role)
    constants: dict[str, Constant] = {
        "IN": shape.in_features,
        "SPLIT": split,
        **_outputs(shape),
        **product_constants(shape.dtype, shape.form, tiles, arch),
    }
    outputs = absent_of(sums=not split, part_blocks=not split)
    outputs |= absent_of(out=True, out_1=True, out_2=True) if split else _absent_outputs(shape)
    return Variant(
        variants.QUANTIZED_LINEAR,
        role,
        shape.dtype,
        stored_dtype(shape.bits, shape.codes, shape.dtype),
        constants,
        tiles.num_warps,
        tiles.num_stages,
        absent_operands(shape.form, shape.bias and not split) | outputs,
    )


@lru_cache
def _sum_variant(shape: LinearShape) -> Variant:
    block = min(power_of_two(shape.columns, 16), 1024)
    constants: dict[str, Constant] = {**_outputs(shape), "BLOCK_D": block}
    absent = absent_of(bias=not shape.bias) | _absent_outputs(shape)
    return Variant(variants.SUM_LINEAR, "", shape.dtype, shape.dtype, constants, 4, 1, absent)


@lru_cache
def _expand_variant(shape: LinearShape, arch: str) -> Variant:
    tiles = _tiles(shape, arch, linear_roles(shape.dtype, arch)[-1])
    product = product_constants(shape.dtype, shape.form, tiles, arch)
    constants: dict[str, Constant] = {
        "IN": shape.in_features,
        "COLUMNS": shape.columns,
        "GATED": shape.gated,
        "BLOCK_N": EXPANDED_COLUMNS,
        **{name: product[name] for name in ("BITS", "GROUP", "CODES", "FP8_NATIVE", "BLOCK_K")},
    }
    stored = stored_dtype(shape.bits, shape.codes, shape.dtype)
    absent = absent_operands(shape.form, has_bias=True)
    return Variant(variants.EXPAND_WEIGHT, "", shape.dtype, stored, constants, 4, 1, absent)


def _outputs(shape: LinearShape) -> dict[str, Constant]:
    first, second, third = shape.out_features
    return {"OUT": first, "OUT_1": second, "OUT_2": third, "GATED": shape.gated}


def _absent_outputs(shape: LinearShape) -> frozenset[str]:
    _, second, third = shape.out_features
    return absent_of(out_1=not second, out_2=not third)


def _int(variant: Variant, name: str) -> int:
    return int(str(variant.constants[name]))
