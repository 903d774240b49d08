"""rms_norm: RMSNorm over the last dim, alone or after the sum with a residual stream."""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops import spec


def rms_norm(
    x: Array,
    weight: Array,
    residual: Array | None = None,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> Array:
    """Reference, in float32, rounded at the end; with `round_first` also before the weight.

    `residual`: it becomes `residual + x` in place, and the sum is normalised.
    """
    if residual is not None:
        residual[...] = residual.astype(np.float32) + x.astype(np.float32)
        x = residual
    wide = x.astype(np.float32)
    normal = wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + np.float32(epsilon))
    if round_first:
        normal = normal.astype(x.dtype).astype(np.float32)
    scaled: Array = normal * (weight.astype(np.float32) + np.float32(weight_offset))
    return scaled.astype(x.dtype)


RMS_NORM = spec.OpSpec(
    name="rms_norm",
    doc="RMSNorm over the last dim of x, or of residual + x, which residual then holds.",
    inputs=(
        spec.Operand("x", spec.ROWS, spec.ACTIVATION),
        spec.Operand("weight", ("width",), spec.ACTIVATION),
        spec.Operand("residual", spec.ROWS, spec.ACTIVATION, optional=True),
    ),
    outputs=(
        spec.Operand("out", spec.ROWS, spec.ACTIVATION),
        spec.Operand("residual_out", spec.ROWS, spec.ACTIVATION, optional=True, alias="residual"),
    ),
    attributes=(
        spec.Attribute("epsilon", "float"),
        spec.Attribute("weight_offset", "float", 0.0),
        spec.Attribute("round_first", "bool", False),
    ),
    reference=rms_norm,
)
