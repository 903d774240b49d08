"""Variant and launch of route: a program for each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kvgraph.kernels import variants
from kvgraph.kernels.launch import LaunchPlan, launch_of
from kvgraph.kernels.shapes import power_of_two
from kvgraph.kernels.variants import Constant, Variant, absent_of
from kvgraph.ops import ROUTE

EXPERTS_OF_WARP = 512
"""Experts of one warp: their scores and places are in registers, 16 of each per thread."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Constants of one route. `dtype`: of the logits; the other fields are the op's attributes."""

    dtype: str
    num_experts: int
    num_active: int
    scores: int
    normalize: int = 0
    epsilon: float = 0.0
    least_total: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    active_groups: int = 1
    group_best: int = 1
    has_bias: bool = False

    @classmethod
    def of(
        cls,
        dtype: str,
        shapes: Mapping[str, tuple[int, ...]],
        attributes: Mapping[str, Any],
    ) -> RouteShape:
        """The shape of a call, from the shapes of its operands."""
        return cls(dtype, shapes["logits"][1], has_bias="bias" in shapes, **attributes)

    @classmethod
    def of_variant(cls, variant: Variant) -> RouteShape:
        """The shape that a kernel was compiled for."""
        constants = variant.constants
        shapes = {"logits": (0, int(str(constants["NUM_EXPERTS"]))), "bias": ()}
        given = {name: shape for name, shape in shapes.items() if name not in variant.absent}
        attributes = {a.name: constants[a.name.upper()] for a in ROUTE.attributes}
        return cls.of(variant.dtype, given, attributes)

    @property
    def attributes(self) -> dict[str, float]:
        """Attributes of the op, by name."""
        return {a.name: getattr(self, a.name) for a in ROUTE.attributes}


@lru_cache
def route_variant(shape: RouteShape) -> Variant:
    block_g = power_of_two(shape.num_groups)
    block_s = power_of_two(shape.num_experts // shape.num_groups)
    constants: dict[str, Constant] = {
        "NUM_EXPERTS": shape.num_experts,
        **{name.upper(): value for name, value in shape.attributes.items()},
        "BLOCK_G": block_g,
        "BLOCK_S": block_s,
        "BLOCK_A": power_of_two(shape.num_active),
    }
    warps = max(block_g * block_s // EXPERTS_OF_WARP, 1)
    absent = absent_of(bias=not shape.has_bias)
    return Variant(variants.ROUTE, "", shape.dtype, shape.dtype, constants, warps, 1, absent)


def plan_route(shape: RouteShape, rows: int) -> LaunchPlan:
    """Plan of a call. Operands: the op's, by name; `indices` and `weights` are written."""
    return LaunchPlan((launch_of(route_variant(shape), (rows, 1), {}),)) if rows else LaunchPlan()
