"""Routers that the GPU kernel is tested on, and their steps by any runner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch

from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels.route_plan import RouteShape
from kvgraph.kernels.trials import Trial, route_trial
from kvgraph.ops import ROUTE
from kvgraph.ops._route import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN

DEEPSEEK = RouteShape(
    "float32", 256, 8, SIGMOID, 1, 1e-20, scale=2.5, num_groups=8, active_groups=4, group_best=2,
    has_bias=True,
)  # fmt: skip
ROUTES = {
    "Qwen3-MoE": RouteShape("bfloat16", 128, 8, SOFTMAX, 1),
    "gpt-oss": RouteShape("bfloat16", 32, 4, SOFTMAX_OF_CHOSEN),
    "DeepSeek-V3": DEEPSEEK,
    "DeepSeek-V2": RouteShape(
        "float32", 160, 6, SOFTMAX, scale=16.0, num_groups=8, active_groups=3
    ),
    "ERNIE": RouteShape("float32", 60, 6, SOFTMAX, 1, least_total=0.5, has_bias=True),
    "all of a few": RouteShape("float16", 7, 7, SIGMOID),
    "one expert": RouteShape("float32", 1, 1, SOFTMAX, 1),
    "very many": RouteShape("float32", 4096, 22, SIGMOID, 1, 1e-20, has_bias=True),
}
ROWS = 19
DEFAULTS = {a.name: float(a.default or 0) for a in ROUTE.attributes}


def trials() -> Iterator[tuple[str, Trial]]:
    for name, shape in ROUTES.items():
        yield name, route_trial(shape, ROWS)
        yield f"{name}, numbers that are equal or none", odd_trial(shape)


def odd_trial(shape: RouteShape) -> Trial:
    """Rows of zeros of both signs, of NaN, of infinities, and of few numbers."""
    rng = np.random.default_rng(shape.num_experts)
    trial = route_trial(shape, ROWS)
    size = ROWS, shape.num_experts
    numbers = np.array([0.0, -0.0, 1.0, -2.0, np.nan, np.inf, -np.inf])
    logits = rng.choice(numbers, size, p=[0.3, 0.3, 0.2, 0.1, 0.04, 0.02, 0.04])
    logits[:4] = np.array([[0.0], [np.nan], [np.inf], [-np.inf]])
    logits[4:9] = rng.choice(numbers[:4], (5, shape.num_experts))
    given = trial.given | {"logits": logits.astype(DTYPES[shape.dtype].numpy)}
    found = ROUTE.reference(given["logits"], given.get("bias"), **shape.attributes)
    return replace(trial, given=given, wanted=dict(zip(trial.wanted, found, strict=True)))


def as_written(
    logits: torch.Tensor, bias: torch.Tensor | None, attributes: Mapping[str, float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and weights, operator by operator as models write it, in the logits' dtype."""
    a = DEFAULTS | {**attributes}
    kind, active = a["scores"], int(a["num_active"])
    if kind == SOFTMAX_OF_CHOSEN:
        values, indices = torch.topk(logits, active)
        return indices, values.softmax(-1)
    scores = logits.softmax(-1) if kind == SOFTMAX else logits.sigmoid()
    keys = scores if bias is None else scores + bias
    if a["num_groups"] > 1:
        each = keys.view(len(keys), int(a["num_groups"]), -1)
        best = each.topk(int(a["group_best"])).values.sum(-1)
        chosen = best.topk(int(a["active_groups"])).indices
        marks = torch.zeros_like(best).scatter(1, chosen, 1).bool()
        keys = each.masked_fill(~marks[..., None], -torch.inf).flatten(1)
    indices = torch.topk(keys, active).indices
    weights = scores.gather(1, indices)
    if a["normalize"]:
        weights /= (weights.sum(-1, keepdim=True) + a["epsilon"]).clamp(a["least_total"])
    return indices, weights * a["scale"]
