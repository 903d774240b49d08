"""Shapes of matrix products that kernels are tested on, and their steps by any runner."""

from __future__ import annotations

from kvgraph.kernels.experts_plan import ExpertsShape
from kvgraph.ops.packed import GELU, GELU_TANH, SILU

EXPERTS = (
    # Widths that fill no tile and, of nibbles, no group; every gate, with and without biases.
    ExpertsShape("float32", 0, 5, 2, 72, 40, SILU),
    ExpertsShape("bfloat16", 0, 4, 2, 160, 96, SILU, 1.702, 0.9, 1.0, True, True),
    ExpertsShape("float16", 0, 9, 3, 128, 64, GELU),
    ExpertsShape("bfloat16", 0, 1, 1, 64, 200, GELU_TANH, down_bias=True),
)


def name_of(shape: ExpertsShape) -> str:
    return f"{shape.dtype}-{shape.bits}-{shape.experts}x{shape.in_features}x{shape.inner_features}"
