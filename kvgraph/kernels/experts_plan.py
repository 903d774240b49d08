"""Variants and launches of fused_experts.

Five launches: sort slots by expert, place tiles, two grouped products, and the weighted sum. Grids
follow from the number of rows only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from kvgraph.contract.dims import ceildiv
from kvgraph.errors import UnsupportedError
from kvgraph.kernels import variants
from kvgraph.kernels.launch import LaunchPlan, launch_of
from kvgraph.kernels.matrix_tiles import (
    ROLES,
    MatrixTiles,
    absent_operands,
    form_given,
    matrix_tiles,
    product_constants,
    role_of,
    tiles_of,
)
from kvgraph.kernels.shapes import power_of_two
from kvgraph.kernels.variants import Constant, Variant
from kvgraph.ops.matrices import stored_dtype
from kvgraph.ops.packed import SILU, Form

MOST_EXPERTS = 1024
"""Most experts of a layer: a program that places tiles has all their offsets in registers."""

TILE_FIELDS = 3
"""Fields of a tile in memory: its expert, and the half-open range of its sorted slots."""


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Constants of one fused_experts."""

    dtype: str
    up: Form
    down: Form
    experts: int
    active: int
    in_features: int
    inner_features: int
    activation: int = SILU
    alpha: float = 1.0
    limit: float = 0.0
    up_offset: float = 0.0
    up_bias: bool = False
    down_bias: bool = False

    @classmethod
    def of(
        cls,
        dtype: str,
        shapes: Mapping[str, tuple[int, ...]],
        attributes: Mapping[str, float],
    ) -> ExpertsShape:
        """The shape of a call with x of `dtype`, from the shapes of its operands; it is the same
        when kernels are compiled and when they are launched."""
        experts, both, _ = shapes["up"]
        return cls(
            dtype=dtype,
            up=form_given(shapes, attributes, "up_"),
            down=form_given(shapes, attributes, "down_"),
            experts=experts,
            active=shapes["indices"][1],
            in_features=shapes["x"][1],
            inner_features=both // 2,
            activation=int(attributes["activation"]),
            alpha=float(attributes["alpha"]),
            limit=float(attributes["limit"]),
            up_offset=float(attributes["up_offset"]),
            up_bias="up_bias" in shapes,
            down_bias="down_bias" in shapes,
        )

    def check(self) -> None:
        """Raise UnsupportedError, with the supported values, for one that no kernel supports."""
        if self.experts > MOST_EXPERTS:
            raise UnsupportedError(
                f"experts: expected at most {MOST_EXPERTS} in a layer on cuda, got {self.experts}"
            )


def experts_variants(shape: ExpertsShape, arch: str) -> tuple[Variant, ...]:
    """Every kernel that `plan_experts` may launch for `shape`."""
    shape.check()
    for role in ROLES:
        plan_experts(shape, arch, 1, role)
    both = [variant for role in ROLES for variant in _of_role(shape, arch, role)]
    return (sort_variant(shape.experts), *both, sum_variant(shape))


def plan_experts(shape: ExpertsShape, arch: str, rows: int, role: str = "") -> LaunchPlan:
    """Plan of a call. Operands: the op's, by name; `out` is written. `role`: of the tiles; "" means
    by the number of rows."""
    if not rows:
        return LaunchPlan()
    slots, width, inner = rows * shape.active, shape.in_features, shape.inner_features
    role = role or role_of(slots, shape.experts)
    first, second = _tiles(shape, arch, role)
    place, up, down = _of_role(shape, arch, role)
    count = most_tiles(slots, shape.experts, first.block_m)
    total = sum_variant(shape)
    blocks = ceildiv(width, _block(total, "BLOCK_D"))
    launches = (
        launch_of(sort_variant(shape.experts), (shape.experts, 1), {"num_slots": slots}),
        launch_of(place, (ceildiv(count, _block(place, "BLOCK_P")), 1), {"num_tiles": count}),
        launch_of(up, (count, _pieces(2 * inner, first)), {"in_features": width}),
        launch_of(down, (count, _pieces(width, second)), {"inner_features": inner}),
        launch_of(total, (rows * blocks, 1), {}),
    )
    scratch = {
        "order": slots,
        "offsets": shape.experts + 1,
        "tiles": count * TILE_FIELDS,
        "inner": slots * inner,
        "parts": slots * width,
    }
    return LaunchPlan(launches, scratch)


def _pieces(columns: int, tiles: MatrixTiles) -> int:
    return tiles_of("experts", "columns", columns, tiles.block_n)


def most_tiles(slots: int, experts: int, block_m: int) -> int:
    """Most tiles that `slots` slots can need for any choice of experts; each expert's last tile may
    be short."""
    chosen = min(slots, experts)
    return chosen + (slots - chosen) // block_m


@lru_cache
def sort_variant(experts: int) -> Variant:
    constants: dict[str, Constant] = {"EXPERTS": experts, "BLOCK_S": 1024}
    return Variant(variants.SORT_SLOTS, "", "int32", "int32", constants, 4, 1)


@lru_cache
def sum_variant(shape: ExpertsShape) -> Variant:
    constants: dict[str, Constant] = {
        "IN": shape.in_features,
        "ACTIVE": shape.active,
        "BLOCK_D": min(power_of_two(shape.in_features, 16), 1024),
    }
    return Variant(variants.SUM_EXPERTS, "", shape.dtype, shape.dtype, constants, 4, 1)


def _of_role(shape: ExpertsShape, arch: str, role: str) -> tuple[Variant, Variant, Variant]:
    """Variants that place the tiles and compute both products."""
    first, second = _tiles(shape, arch, role)
    place = _place_variant(shape.experts, first.block_m)
    return place, _up_variant(shape, arch, role, first), _down_variant(shape, arch, role, second)


def _tiles(shape: ExpertsShape, arch: str, role: str) -> list[MatrixTiles]:
    """The tiles of both products, which have equally many rows: a table places them for both."""
    made = [
        matrix_tiles(role, shape.dtype, form, arch, spread=True) for form in (shape.up, shape.down)
    ]
    assert made[0].block_m == made[1].block_m
    return made


@lru_cache
def _place_variant(experts: int, block_m: int) -> Variant:
    block_e = power_of_two(experts, 16)
    constants: dict[str, Constant] = {
        "EXPERTS": experts,
        "BLOCK_M": block_m,
        "BLOCK_E": block_e,
        "BLOCK_P": max(4096 // block_e, 4),
    }
    warps = max(block_e // 64, 4)  # with more experts per thread Triton keeps some in memory
    return Variant(variants.PLACE_TILES, "", "int32", "int32", constants, warps, 1)


@lru_cache
def _up_variant(shape: ExpertsShape, arch: str, role: str, tiles: MatrixTiles) -> Variant:
    constants: dict[str, Constant] = {
        "ACTIVE": shape.active,
        "ACTIVATION": shape.activation,
        "ALPHA": shape.alpha,
        "LIMIT": shape.limit,
        "UP_OFFSET": shape.up_offset,
        **_constants(shape, shape.up, arch, tiles),
    }
    return Variant(
        variants.EXPERTS_UP,
        role,
        shape.dtype,
        stored_dtype(shape.up.bits, shape.up.codes, shape.dtype),
        constants,
        tiles.num_warps,
        tiles.num_stages,
        absent_operands(shape.up, shape.up_bias, "up_"),
    )


@lru_cache
def _down_variant(shape: ExpertsShape, arch: str, role: str, tiles: MatrixTiles) -> Variant:
    return Variant(
        variants.EXPERTS_DOWN,
        role,
        shape.dtype,
        stored_dtype(shape.down.bits, shape.down.codes, shape.dtype),
        _constants(shape, shape.down, arch, tiles),
        tiles.num_warps,
        tiles.num_stages,
        absent_operands(shape.down, shape.down_bias, "down_"),
    )


def _constants(
    shape: ExpertsShape, form: Form, arch: str, tiles: MatrixTiles
) -> dict[str, Constant]:
    return {
        "IN": shape.in_features,
        "INNER": shape.inner_features,
        **product_constants(shape.dtype, form, tiles, arch),
    }


def _block(variant: Variant, name: str) -> int:
    return int(str(variant.constants[name]))
