"""Routers of mixtures of experts, of `benchmarks.cuda`: checked, then timed."""

from __future__ import annotations

from functools import partial

import torch
from rich.table import Table

from benchmarks.cuda_run import Run, console, micros
from kvgraph.kernels.route_plan import RouteShape
from kvgraph.kernels.trials import route_trial
from kvgraph.ops._route import SIGMOID
from tests.support.matrix import array, tensor
from tests.support.routes import ROUTES

NAMES = ("Qwen3-MoE", "DeepSeek-V3")
ROWS = (1, 64, 8192)


def routers(run: Run) -> None:
    """One launch, against the operators that models write; both in CUDA graphs."""
    table = Table("router", "rows", "us", "operators, us", "operators / this", "error")
    for name in NAMES:
        for rows in ROWS[:1] if run.smoke else ROWS:
            trial = route_trial(ROUTES[name], rows)
            given = {key: tensor(each, run.device) for key, each in trial.given.items()}
            run.launch(trial.plan, given)
            for key in trial.wanted:
                trial.given[key] = array(given[key], str(trial.given[key].dtype))
            _, error, limit = trial.error()
            run.check(f"{name}, {rows} rows", error <= limit, f"error {error:.1e}")
            ours = micros(run, partial(run.launch, trial.plan, given))
            theirs = micros(run, partial(as_written, ROUTES[name], given))
            run.found[f"router/{name}/{rows}"] = {"us": ours, "operators": theirs}
            table.add_row(
                name, f"{rows}", f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}",
                f"{error:.1e}",
            )  # fmt: skip
    console.print(table)


def as_written(
    shape: RouteShape, given: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operator by operator, as transformers has it."""
    logits = given["logits"].float()
    scores = logits.sigmoid() if shape.scores == SIGMOID else logits.softmax(-1)
    keys = scores + given["bias"] if shape.has_bias else scores
    if shape.num_groups > 1:
        each = keys.view(len(keys), shape.num_groups, -1)
        best = each.topk(shape.group_best).values.sum(-1)
        chosen = best.topk(shape.active_groups, sorted=False).indices
        marks = torch.zeros_like(best).scatter_(1, chosen, 1)
        own = marks.unsqueeze(-1).expand_as(each).reshape_as(keys)
        keys = keys.masked_fill(~own.bool(), -torch.inf)
    indices = keys.topk(shape.num_active, sorted=False).indices
    weights = scores.gather(1, indices)
    weights = weights / (weights.sum(-1, keepdim=True) + shape.epsilon) * shape.scale
    return indices.int(), weights
