"""silu_mul: the gate of a gated MLP."""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops import spec


def silu_mul(gate: Array, up: Array) -> Array:
    """Reference, in float32, rounded after silu and after the product."""
    wide = gate.astype(np.float32)
    with np.errstate(over="ignore"):
        silu = (wide / (1 + np.exp(-wide))).astype(gate.dtype)
    product: Array = silu.astype(np.float32) * up.astype(np.float32)
    return product.astype(gate.dtype)


SILU_MUL = spec.OpSpec(
    name="silu_mul",
    doc="silu(gate) * up.",
    inputs=(
        spec.Operand("gate", spec.ROWS, spec.ACTIVATION),
        spec.Operand("up", spec.ROWS, spec.ACTIVATION),
    ),
    outputs=(spec.Operand("out", spec.ROWS, spec.ACTIVATION),),
    attributes=(),
    reference=silu_mul,
)
