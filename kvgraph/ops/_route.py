"""route: the experts of each row and their weights, from the router's scores.

Decisions:
- One op replaces 6 to 24 operators of a model: on small tensors each operator costs a call, or a
  kernel launch. They took a tenth of a step at batch 1 of a Qwen3-MoE shape in int4 on a CPU.
- The product before it stays as in the model: a wrong expert costs more than its few weights.
- If scores are equal, the first expert is taken, which torch does not define; a NaN counts as the
  least score. A row's result depends only on its own scores.

Legend: M rows, E experts, A experts of a row, G groups of experts.
"""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops import spec

SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 0, 1, 2
"""Functions from logits to weights: softmax over all experts, sigmoid of each expert, or softmax
over the chosen experts."""
SCORES = (SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN)
MOST_EXPERTS = 4096


def route(
    logits_ME: Array,
    bias_E: Array | None = None,
    *,
    num_active: int,
    scores: int = SOFTMAX,
    normalize: int = 0,
    epsilon: float = 0.0,
    least_total: float = 0.0,
    scale: float = 1.0,
    num_groups: int = 1,
    active_groups: int = 1,
    group_best: int = 1,
) -> tuple[Array, Array]:
    """Reference: the `num_active` best experts of each row, best first, and their weights.

    `bias`: added to the scores for the choice only. Experts are chosen from the `active_groups` of
    `num_groups` groups with the largest sum of their `group_best` best experts (DeepSeek-V3, arXiv
    2412.19437; DeepSeek-V2 takes the best expert). `normalize`: divide weights by
    `max(their sum + epsilon, least_total)`.
    """
    with np.errstate(invalid="ignore"):  # NaN, and rows of -infinity
        score_ME = _scored(logits_ME.astype(np.float32), scores)
        key_ME = score_ME if bias_E is None else score_ME + bias_E
        key_ME = _numbers(key_ME)
        if num_groups > 1:
            key_ME = _in_groups(key_ME, num_groups, active_groups, group_best)
        index_MA = _best(key_ME, num_active)
        weight_MA = np.take_along_axis(score_ME, index_MA, 1)
        if scores == SOFTMAX_OF_CHOSEN:
            weight_MA = _softmax(weight_MA)
        if normalize:
            total_M1 = weight_MA.sum(1, keepdims=True, dtype=np.float32) + np.float32(epsilon)
            weight_MA = weight_MA / np.maximum(total_M1, np.float32(least_total))
        return index_MA.astype(np.int32), (weight_MA * np.float32(scale)).astype(np.float32)


def _scored(logits_ME: Array, scores: int) -> Array:
    if scores == SOFTMAX:
        return _softmax(logits_ME)
    if scores == SIGMOID:
        smaller_ME: Array = np.exp(-np.abs(logits_ME))
        score_ME: Array = np.where(logits_ME < 0, smaller_ME, np.float32(1)) / (1 + smaller_ME)
        return score_ME
    return logits_ME


def _softmax(x: Array) -> Array:
    power = np.exp(x - x.max(1, keepdims=True))
    weights: Array = power / power.sum(1, keepdims=True, dtype=np.float32)
    return weights


def _numbers(x: Array) -> Array:
    return np.where(np.isnan(x), np.float32(-np.inf), x)


def _best(key_ME: Array, count: int) -> Array:
    """Indices of the `count` largest keys of each row; of equal keys the first."""
    return np.argsort(-key_ME, axis=1, kind="stable")[:, :count]


def _in_groups(key_ME: Array, num_groups: int, active_groups: int, group_best: int) -> Array:
    """`key_ME` with -infinity for experts outside a row's best groups."""
    rows, experts = key_ME.shape
    key_MGE = key_ME.reshape(rows, num_groups, experts // num_groups)
    best_MG = _numbers(-np.sort(-key_MGE, axis=2)[:, :, :group_best].sum(2, dtype=np.float32))
    is_active_MG = np.zeros(best_MG.shape, bool)
    np.put_along_axis(is_active_MG, _best(best_MG, active_groups), True, 1)
    return np.where(is_active_MG[:, :, None], key_MGE, -np.inf).reshape(rows, experts)


def _num_experts_fault(num_experts: int) -> bool | str:
    return num_experts > MOST_EXPERTS and f"at most {MOST_EXPERTS}"


def _num_active_fault(num_active: int, num_experts: int) -> bool | str:
    return not 1 <= num_active <= num_experts and f"1 to the {num_experts} experts of logits"


def _num_groups_fault(num_groups: int, num_experts: int) -> bool | str:
    fits = num_groups >= 1 and num_experts % num_groups == 0
    return not fits and f"groups that divide the {num_experts} experts of logits"


def _active_groups_fault(active_groups: int, num_groups: int) -> bool | str:
    return not 1 <= active_groups <= num_groups and f"1 to num_groups {num_groups}"


def _group_best_fault(group_best: int, num_experts: int, num_groups: int) -> bool | str:
    size = num_experts // num_groups
    return not 1 <= group_best <= size and f"1 to the {size} experts of a group"


def _in_groups_fault(
    num_active: int, num_experts: int, num_groups: int, active_groups: int
) -> bool | str:
    most = num_experts // num_groups * active_groups
    return num_active > most and f"at most the {most} experts of active groups"


ROUTE = spec.OpSpec(
    name="route",
    doc="The best experts of each row, and their weights, from a router's logits.",
    inputs=(
        spec.Operand("logits", ("rows", "num_experts"), spec.ACTIVATION),
        spec.Operand("bias", ("num_experts",), spec.FLOAT32, optional=True),
    ),
    outputs=(
        spec.Operand("indices", ("rows", "num_active"), spec.INDEX),
        spec.Operand("weights", ("rows", "num_active"), spec.FLOAT32),
    ),
    attributes=(
        spec.Attribute("num_active", "int"),
        spec.Attribute("scores", "int", SOFTMAX),
        spec.Attribute("normalize", "int", 0),
        spec.Attribute("epsilon", "float", 0.0),
        spec.Attribute("least_total", "float", 0.0),
        spec.Attribute("scale", "float", 1.0),
        spec.Attribute("num_groups", "int", 1),
        spec.Attribute("active_groups", "int", 1),
        spec.Attribute("group_best", "int", 1),
    ),
    reference=route,
    rules=(
        spec.Rule("logits: dim num_experts", _num_experts_fault),
        spec.Rule("num_active", _num_active_fault),
        spec.Rule("scores", lambda scores: scores not in SCORES and "0, 1 or 2"),
        spec.Rule("normalize", lambda normalize: normalize not in (0, 1) and "0 or 1"),
        spec.at_least_0("epsilon"),
        spec.at_least_0("least_total"),
        spec.finite("scale"),
        spec.Rule("num_groups", _num_groups_fault),
        spec.Rule("active_groups", _active_groups_fault),
        spec.Rule("group_best", _group_best_fault),
        spec.Rule("num_active", _in_groups_fault),
    ),
)
