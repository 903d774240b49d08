"""fused_experts: a mixture of experts on a GPU, from routed rows to their weighted sum.

Decisions:
- The rows of the first weight alternate gate and up: one product computes both for an inner column,
  and joins them before it writes the result.
- Results are rounded to the activations' dtype where the model rounds them, after the gate and
  after the second layer. The sum is in float32, in the router's order of the experts.
- Both layers have a form each, as in `experts`.
- An index of -1 is no expert, as for `experts`.

Legend: M rows, A experts of a row, K in_features, I inner_features.
"""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops import matrices, packed, packed_rules, spec
from kvgraph.ops.packed import SILU, Rest, of_expert


def fused_experts(
    x_MK: Array,
    indices_MA: Array,
    weights_MA: Array,
    up: Array,
    down: Array,
    up_scales: Array | None = None,
    up_group_bytes: Array | None = None,
    up_bias: Array | None = None,
    down_scales: Array | None = None,
    down_group_bytes: Array | None = None,
    down_bias: Array | None = None,
    *,
    up_bits: int = 0,
    up_group: int = 0,
    up_codes: int = packed.INTEGERS,
    down_bits: int = 0,
    down_group: int = 0,
    down_codes: int = packed.INTEGERS,
    activation: int = SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Array:
    """Reference: the weighted sum of the gated MLPs of each row's experts: `[M, K]`."""
    kind = x_MK.dtype
    up_form, down_form = (up_bits, up_group, up_codes), (down_bits, down_group, down_codes)
    up_rest: Rest = (up_scales, up_group_bytes, up_bias)
    down_rest: Rest = (down_scales, down_group_bytes, down_bias)
    parts_MAK = np.zeros((*indices_MA.shape, x_MK.shape[1]), kind)
    for expert in np.unique(indices_MA[indices_MA >= 0]):
        rows, slots = np.nonzero(indices_MA == expert)
        both = matrices.product(x_MK[rows], up[expert], *of_expert(expert, up_rest), *up_form)
        gate_MI, up_MI = both[:, ::2], both[:, 1::2]
        inner = packed.joined(gate_MI, up_MI, activation, alpha, limit, up_offset).astype(kind)
        own = of_expert(expert, down_rest)
        parts_MAK[rows, slots] = matrices.product(inner, down[expert], *own, *down_form).astype(
            kind
        )
    summed = np.zeros(x_MK.shape, np.float32)
    for slot in range(indices_MA.shape[1]):
        mine = indices_MA[:, slot] >= 0
        summed[mine] += parts_MAK[mine, slot].astype(np.float32) * weights_MA[mine, slot, None]
    return summed.astype(kind)


def _up_rows_fault(up_rows: int) -> bool | str:
    return up_rows % 2 != 0 and "rows of gate and up in turn"


_UP = matrices.operands("up", "up_rows", "up_depth", "up_groups", ("num_experts",), "up_")
_DOWN = matrices.operands(
    "down",
    "in_features",
    "down_depth",
    "down_groups",
    ("num_experts",),
    "down_",
    spec.OTHER_WEIGHT,
)


FUSED_EXPERTS = spec.OpSpec(
    name="fused_experts",
    doc="The gated MLPs of each row's experts, weighed and summed.",
    inputs=(
        spec.Operand("x", ("rows", "in_features"), spec.ACTIVATION),
        spec.Operand("indices", ("rows", "num_active"), spec.INDEX),
        spec.Operand("weights", ("rows", "num_active"), spec.FLOAT32),
        _UP[0],
        _DOWN[0],
        *_UP[1:],
        *_DOWN[1:],
    ),
    outputs=(spec.Operand("out", ("rows", "in_features"), spec.ACTIVATION),),
    attributes=(
        *packed_rules.attributes("up_", default_bits=0),
        *packed_rules.attributes("down_", default_bits=0),
        *packed_rules.GATE_ATTRIBUTES,
    ),
    reference=fused_experts,
    rules=(
        spec.Rule("x: dim in_features", lambda in_features: in_features < 1 and "at least 1"),
        matrices.known_bits("up_"),
        *matrices.form_rules("up_"),
        matrices.known_bits("down_"),
        *matrices.form_rules("down_"),
        spec.Rule("up: dim up_rows", _up_rows_fault),
        *matrices.rules(_UP, "in_features", "inputs of x", stem="up_"),
        *matrices.rules(_DOWN, "up_rows", "inner features", 2, "down_"),
        *packed_rules.GATE_RULES,
    ),
)
