"""experts: a mixture of experts over weights packed for the CPU.

Decisions, by `benchmarks/experts.py`:
- One op from routed rows to their weighted sum: rows are sorted by expert, so that each expert's
  weights are read once for all its rows, where transformers' `batched_mm` copies the weights of
  each token's experts.
- Weights, their rounding and the sums are those of `linear` (its decisions hold here), so that a
  row's result depends neither on the other rows nor on threads. The experts' results are weighted
  and summed in the router's order.
- Both layers have a form each: checkpoints often store `down` in more bits (GGUF's Q4_K_M: Q6_K in
  half of the layers).
- An index of -1 is no expert: if the experts are divided among ranks, another rank has it. It adds
  nothing and costs nothing, for any weight.
- Weights are mapped from a file, and may be larger than memory. A call asks the system for missing
  pages of its experts before it touches them: else the system would read their neighbours too. It
  looks for such pages only soon after the process waited for one.
- The router stays outside, in float32: a wrong expert costs more than the router's few weights.

Legend: M rows, A experts of a row, E experts, K in_features, I inner_features.
"""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops import packed, packed_rules, spec
from kvgraph.ops.packed import SILU, Rest, of_expert, panel_count


def experts(
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
    residual_MK: Array | None = None,
    *,
    inner_features: int,
    up_bits: int,
    down_bits: int,
    up_group: int = 0,
    up_codes: int = packed.INTEGERS,
    down_group: int = 0,
    down_codes: int = packed.INTEGERS,
    activation: int = SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Array:
    """Reference: the weighted sum of the gated MLPs of each row's experts: `[M, K]`.

    The residual is added to the sum. An index of -1 is no expert. The panels of `up` alternate gate
    and up; `packed.gated` joins them.
    """
    up_form, down_form = (up_bits, up_group, up_codes), (down_bits, down_group, down_codes)
    up_rest: Rest = (up_scales, up_group_bytes, up_bias)
    down_rest: Rest = (down_scales, down_group_bytes, down_bias)
    parts_MAK = np.zeros((*indices_MA.shape, x_MK.shape[1]), np.float32)
    for expert in np.unique(indices_MA[indices_MA >= 0]):
        rows, slots = np.nonzero(indices_MA == expert)
        both = packed.product(x_MK[rows], up[expert], *of_expert(expert, up_rest), *up_form)
        inner = packed.gated(both, activation, alpha, limit, up_offset)
        inner = inner[:, :inner_features].astype(np.float32)
        out = packed.product(inner, down[expert], *of_expert(expert, down_rest), *down_form)
        parts_MAK[rows, slots] = out[:, : x_MK.shape[1]]
    summed = np.zeros(x_MK.shape, np.float32)
    for slot in range(indices_MA.shape[1]):
        own = indices_MA[:, slot] >= 0
        summed[own] += parts_MAK[own, slot] * weights_MA[own, slot, None]
    return summed if residual_MK is None else summed + residual_MK


def _up_panels_fault(num_up_panels: int, inner_features: int) -> bool | str:
    expected = 2 * panel_count(inner_features)
    return num_up_panels != expected and f"{expected} for inner_features {inner_features}"


def _down_panels_fault(num_down_panels: int, in_features: int) -> bool | str:
    expected = panel_count(in_features)
    return num_down_panels != expected and f"{expected} for {in_features} inputs of x"


_UP = packed_rules.operands("up", "up_", ("num_experts",))
_DOWN = packed_rules.operands("down", "down_", ("num_experts",), spec.OTHER_WEIGHT)

EXPERTS = spec.OpSpec(
    name="experts",
    doc="The gated MLPs of each row's experts, weighed and summed, over packed weights.",
    inputs=(
        spec.Operand("x", ("rows", "in_features"), spec.FLOAT32),
        spec.Operand("indices", ("rows", "num_active"), spec.INDEX),
        spec.Operand("weights", ("rows", "num_active"), spec.FLOAT32),
        _UP[0],
        _DOWN[0],
        *_UP[1:],
        *_DOWN[1:],
        spec.Operand("residual", ("rows", "in_features"), spec.FLOAT32, optional=True),
    ),
    outputs=(spec.Operand("out", ("rows", "in_features"), spec.FLOAT32),),
    attributes=(
        spec.Attribute("inner_features", "int"),
        *packed_rules.attributes("up_"),
        *packed_rules.attributes("down_"),
        *packed_rules.GATE_ATTRIBUTES,
    ),
    reference=experts,
    rules=(
        spec.Rule("x: dim in_features", lambda in_features: in_features < 1 and "at least 1"),
        spec.Rule("inner_features", lambda inner_features: inner_features < 1 and "at least 1"),
        spec.Rule(
            "inner_features",
            lambda inner_features: (
                inner_features > packed.MOST_INPUTS and f"at most {packed.MOST_INPUTS}"
            ),
        ),
        *packed_rules.form_rules("up_"),
        *packed_rules.rules(_UP, "in_features", "inputs of x", "up_"),
        *packed_rules.form_rules("down_"),
        *packed_rules.rules(_DOWN, "inner_features", "inner_features", "down_"),
        packed_rules.summed("x: dim in_features", "up_"),
        packed_rules.summed("inner_features", "down_"),
        spec.Rule("up: dim num_up_panels", _up_panels_fault),
        spec.Rule("down: dim num_down_panels", _down_panels_fault),
        *packed_rules.GATE_RULES,
    ),
)
