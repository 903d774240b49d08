"""Variants and launches of quantized_linear: the number of rows decides tiles and parts of inputs.

A layer of few columns has tiles for few multiprocessors. Its inputs are then split: each part is
summed separately, in float32, and a second launch sums the parts in their order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels import variants
from kvgraph.kernels.launch import Launch, LaunchPlan, launch_of
from kvgraph.kernels.matrix_tiles import (
    ROLES,
    SPREAD_COLUMNS,
    MatrixTiles,
    absent_operands,
    form_given,
    linear_roles,
    linear_tiles,
    product_constants,
    tiles_of,
)
from kvgraph.kernels.shapes import MULTIPROCESSORS, power_of_two
from kvgraph.kernels.variants import ALIGNMENT, Constant, Variant, absent_of
from kvgraph.ops.matrices import stored_dtype
from kvgraph.ops.packed import E4M3, Form

SPLIT_SUFFIX = "_split"
PROGRAMS = 2.1
"""Programs per multiprocessor that parts of the inputs should give: near the best of a sweep on an
H100."""
PROGRAMS_OF_ROUNDED = {
    ("rows16", False): 1.0,
    ("rows16", True): 3.0,
    ("rows32", False): 3.0,
    ("rows32", True): 3.0,
    ("rows64", False): 1.9,
    ("rows64", True): 1.9,
    ("rows128", False): 1.0,
    ("rows128", True): 1.0,
}
"""PROGRAMS if x is rounded, by role and whether there are groups, from a sweep on an H200."""
MOST_PARTS, LEAST_BLOCKS = 8, 2
"""Most parts of the inputs; and least steps of a part."""
EXPANDED_COLUMNS = 32
"""Columns of a program that expands a weight."""


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Constants of one quantized_linear."""

    dtype: str
    form: Form
    in_features: int
    out_features: tuple[int, int, int]
    gated: bool = False
    bias: bool = False
    rounds: bool = False
    """Whether x is rounded to the weight's kind of number."""

    @classmethod
    def of(
        cls,
        dtype: str,
        shapes: Mapping[str, tuple[int, ...]],
        attributes: Mapping[str, float],
    ) -> LinearShape:
        """The shape of a call with x of `dtype`, from the shapes of its operands; it is the same
        when kernels are compiled and when they are launched."""
        first, second, third = (int(attributes[f"out_features{s}"]) for s in ("", "_1", "_2"))
        return cls(
            dtype=dtype,
            form=form_given(shapes, attributes),
            in_features=shapes["x"][-1],
            out_features=(first, second, third),
            gated=bool(attributes["silu_mul"]),
            bias="bias" in shapes,
            rounds=bool(attributes["x_bits"]),
        )

    @property
    def stored(self) -> str:
        """dtype in which the weight's numbers are stored."""
        return stored_dtype(self.form.bits, self.form.codes, self.dtype)

    @property
    def columns(self) -> int:
        return sum(self.out_features) * (2 if self.gated else 1)


def linear_variants(shape: LinearShape, arch: str) -> tuple[Variant, ...]:
    """Every kernel that `plan_linear` may launch for `shape`, and the kernels that expand its
    weight or join products of a library.

    UnsupportedError if a grid has no room for the layer.
    """
    roles = roles_of(shape, arch)
    for role in roles:
        plan_linear(shape, arch, 1, role)
    products = [_variant(shape, arch, role) for role in roles]
    sums = [_sum_variant(shape)] if any(map(is_split, roles)) else []
    rounds = [_round_variant(shape)] if shape.rounds else []
    others = [*rounds, *products, *sums]
    if is_library(shape, arch) and has_parts(shape):
        others.append(_sum_variant(shape, of_products=True))
    if is_expanded(shape, arch):
        plan_expand(shape, arch, 0, 1)
        others += [_round_variant(shape, restores=True)] if shape.rounds else []
        others += [_expand_variant(shape, arch)]
        others += [gate_variant(shape)] if shape.gated else []
    return tuple(others)


@lru_cache
def roles_of(shape: LinearShape, arch: str) -> tuple[str, ...]:
    """Roles of the products that `plan_linear` may launch, few rows first; roles over parts of the
    inputs end with SPLIT_SUFFIX."""
    found: list[str] = []
    roles = _roles(shape, arch)
    for role, most in roles.items():
        tiles = _tiles(shape, arch, role)
        splits = parts_of(shape, arch, role, tiles.block_m) > 1
        found += [role + SPLIT_SUFFIX] if splits else []
        is_last = role == list(roles)[-1]
        found += [role] if is_last or parts_of(shape, arch, role, most) == 1 else []
    return tuple(found)


def is_split(role: str) -> bool:
    return role.endswith(SPLIT_SUFFIX)


def parts_of(shape: LinearShape, arch: str, role: str, rows: int) -> int:
    """Number of parts into which the inputs are split, so that all multiprocessors have a tile."""
    if role in ROLES:
        return 1
    tiles = _tiles(shape, arch, role)
    programs = ceildiv(rows, tiles.block_m) * ceildiv(shape.columns, tiles.block_n)
    each = PROGRAMS_OF_ROUNDED[role, bool(shape.form.group)] if shape.rounds else PROGRAMS
    wanted = round(each * MULTIPROCESSORS[arch] / programs)
    return max(min(wanted, MOST_PARTS, _blocks(shape, tiles) // LEAST_BLOCKS), 1)


def plan_linear(shape: LinearShape, arch: str, rows: int, role: str = "") -> LaunchPlan:
    """Plan of a call. Operands: the op's, by name; its outputs are written. `role`: one of
    `roles_of`; "" means by the rows."""
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
    """Plan of a call with these tiles, over at most `parts` parts of the inputs."""
    pieces = tiles_of("quantized_linear", "columns", shape.columns, tiles.block_n)
    grid = ceildiv(rows, tiles.block_m), pieces
    values = {"num_rows": rows, "in_features": shape.in_features}
    blocks = _blocks(shape, tiles)
    each = ceildiv(blocks, parts)
    parts = ceildiv(blocks, each)
    scratch: dict[str, int] = {}
    before: tuple[Launch, ...] = ()
    if shape.rounds:
        scratch = {"rounded": rows * shape.in_features, "row_scales": rows}
        before = plan_round(shape, rows).launches
    if parts == 1:
        whole = _variant_of(shape, arch, role, tiles)
        return LaunchPlan((*before, launch_of(whole, grid, values)), scratch)
    assert tiles.slices == 1, "slices are of all inputs"
    split, total = _variant_of(shape, arch, role + SPLIT_SUFFIX, tiles), _sum_variant(shape)
    pieces = ceildiv(shape.columns, _int(total, "BLOCK_D"))
    launches = (
        *before,
        launch_of(split, (grid[0], grid[1] * parts), values | {"part_blocks": each}),
        launch_of(total, (rows, pieces), values | {"num_parts": parts}),
    )
    return LaunchPlan(launches, scratch | {"sums": parts * rows * shape.columns})


def plan_expand(shape: LinearShape, arch: str, first: int, columns: int) -> LaunchPlan:
    """Plan that writes `plain [columns, in_features]`: `columns` columns of the weight from `first`
    on, in the activations' dtype. Columns of gate and up both count; gates are written first."""
    variant = _expand_variant(shape, arch)
    step = _inputs_of_step(shape, _last_tiles(shape, arch))
    blocks = tiles_of("quantized_linear", "inputs", shape.in_features, step)
    grid = ceildiv(columns, _int(variant, "BLOCK_N")), blocks
    return LaunchPlan((launch_of(variant, grid, {"first": first, "num_columns": columns}),))


def plan_round(shape: LinearShape, rows: int, *, restores: bool = False) -> LaunchPlan:
    """Plan that writes `rounded [rows, in_features]` and `row_scales [rows]` of x; or `restored`,
    their product in x's dtype."""
    variant = _round_variant(shape, restores=restores)
    return LaunchPlan((launch_of(variant, (rows, 1), {}),))


def plan_join(shape: LinearShape, rows: int) -> LaunchPlan:
    """Plan that writes the op's outputs from `products [rows, columns]`."""
    variant = _sum_variant(shape, of_products=True)
    grid = rows, ceildiv(shape.columns, _int(variant, "BLOCK_D"))
    return LaunchPlan((launch_of(variant, grid, {}),))


def is_library(shape: LinearShape, arch: str) -> bool:
    """Whether torch's library computes products of many rows with this weight: FP8 with scales of
    columns, bfloat16 results, lines of whole 16 bytes, and sm_90, on which it was measured."""
    is_float8 = shape.rounds and shape.form.codes == E4M3 and not shape.form.group
    fits = shape.in_features % ALIGNMENT == shape.columns % ALIGNMENT == 0
    return is_float8 and fits and shape.dtype == "bfloat16" and arch == "sm_90"


def is_expanded(shape: LinearShape, arch: str) -> bool:
    """Whether many rows are multiplied by the expanded weight. int8 by int8 is not: its kernels are
    estimated to be as fast."""
    return not is_library(shape, arch) and not (shape.rounds and shape.form.codes != E4M3)


def has_parts(shape: LinearShape) -> bool:
    """Whether outputs must be computed from a product: a gate, a bias, or several outputs."""
    return shape.gated or shape.bias or any(shape.out_features[1:])


def gate_variant(shape: LinearShape) -> Variant:
    """Variant of silu_mul for products with an expanded, gated weight."""
    return variants.silu_mul_variant(shape.dtype, shape.out_features[0])


def _roles(shape: LinearShape, arch: str) -> Mapping[str, int]:
    roles = linear_roles(shape.dtype, arch, rounds=shape.rounds)
    return roles if not is_library(shape, arch) else {r: roles[r] for r in roles if r != "rows128"}


def _role_of(shape: LinearShape, arch: str, rows: int) -> str:
    roles = _roles(shape, arch)
    return next((role for role, most in roles.items() if rows <= most), list(roles)[-1])


def _last_tiles(shape: LinearShape, arch: str) -> MatrixTiles:
    return _tiles(shape, arch, list(_roles(shape, arch))[-1])


def _tiles(shape: LinearShape, arch: str, role: str) -> MatrixTiles:
    spread = shape.columns >= SPREAD_COLUMNS
    return linear_tiles(role, shape.dtype, shape.form, arch, spread=spread, rounds=shape.rounds)


def _blocks(shape: LinearShape, tiles: MatrixTiles) -> int:
    """Number of steps over the inputs."""
    return ceildiv(shape.in_features, _inputs_of_step(shape, tiles))


def _inputs_of_step(shape: LinearShape, tiles: MatrixTiles) -> int:
    """Inputs of a step; a step of nibbles has twice as many as of bytes."""
    return tiles.block_k * (2 if shape.form.bits == 4 else 1)


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
    outputs |= absent_of(x=shape.rounds, rounded=not shape.rounds, row_scales=not shape.rounds)
    outputs |= absent_of(out=True, out_1=True, out_2=True) if split else _absent_outputs(shape)
    return Variant(
        variants.QUANTIZED_LINEAR,
        role,
        shape.dtype,
        shape.stored,
        constants,
        tiles.num_warps,
        tiles.num_stages,
        absent_operands(shape.form, shape.bias and not split) | outputs,
    )


@lru_cache
def _round_variant(shape: LinearShape, *, restores: bool = False) -> Variant:
    stored = shape.stored
    block = power_of_two(shape.in_features, 16)
    constants: dict[str, Constant] = {
        "IN": shape.in_features,
        "QUANTIZED": stored,
        "LARGEST": DTYPES[stored].largest,
        "BLOCK_D": block,
    }
    warps = min(max(block // 1024, 4), 32)
    absent = absent_of(rounded=restores, row_scales=restores, restored=not restores)
    return Variant(variants.ROUND_ROWS, "", shape.dtype, stored, constants, warps, 1, absent)


@lru_cache
def _sum_variant(shape: LinearShape, *, of_products: bool = False) -> Variant:
    """Variant that computes outputs from sums of parts; `of_products`: from a library's product."""
    block = min(power_of_two(shape.columns, 16), 1024)
    constants: dict[str, Constant] = {**_outputs(shape), "BLOCK_D": block}
    absent = absent_of(bias=not shape.bias) | _absent_outputs(shape)
    absent |= absent_of(
        sums=of_products, num_rows=of_products, num_parts=of_products, products=not of_products
    )
    return Variant(variants.SUM_LINEAR, "", shape.dtype, shape.dtype, constants, 4, 1, absent)


@lru_cache
def _expand_variant(shape: LinearShape, arch: str) -> Variant:
    tiles = _last_tiles(shape, arch)
    product = product_constants(shape.dtype, shape.form, tiles, arch)
    constants: dict[str, Constant] = {
        "IN": shape.in_features,
        "COLUMNS": shape.columns,
        "GATED": shape.gated,
        "BLOCK_N": EXPANDED_COLUMNS,
        **{name: product[name] for name in ("BITS", "GROUP", "CODES", "FP8_NATIVE", "BLOCK_K")},
    }
    absent = absent_operands(shape.form, has_bias=True)
    return Variant(variants.EXPAND_WEIGHT, "", shape.dtype, shape.stored, constants, 4, 1, absent)


def _outputs(shape: LinearShape) -> dict[str, Constant]:
    first, second, third = shape.out_features
    return {"OUT": first, "OUT_1": second, "OUT_2": third, "GATED": shape.gated}


def _absent_outputs(shape: LinearShape) -> frozenset[str]:
    _, second, third = shape.out_features
    return absent_of(out_1=not second, out_2=not third)


def _int(variant: Variant, name: str) -> int:
    return int(str(variant.constants[name]))
