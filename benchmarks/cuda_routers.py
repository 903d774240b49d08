"""Routers of mixtures of experts, of `benchmarks.cuda`: checked, then timed."""

from __future__ import annotations

from functools import partial

import torch
from rich.table import Table

from benchmarks.cuda_run import Run, console, micros
from kvgraph.kernels.route_plan import RouteShape
from kvgraph.kernels.trials import route_trial
from tests.support.matrix import run_trial
from tests.support.routes import ROUTES, as_written

NAMES = ("Qwen3-MoE", "DeepSeek-V3")
ROWS = (1, 64, 8192)


def routers(run: Run) -> None:
    """One launch, against the operators that models write; both in CUDA graphs."""
    table = Table("router", "rows", "us", "operators, us", "operators / this", "error")
    for name in NAMES:
        for rows in ROWS[:1] if run.smoke else ROWS:
            trial = route_trial(ROUTES[name], rows)
            given = run_trial(trial, run.device, run.launch)
            _, error, limit = trial.error()
            run.check(f"{name}, {rows} rows", error <= limit, f"error {error:.1e}")
            ours = micros(run, partial(run.launch, trial.plan, given))
            theirs = micros(run, partial(_operators, ROUTES[name], given))
            run.found[f"router/{name}/{rows}"] = {"us": ours, "operators": theirs}
            table.add_row(
                name, f"{rows}", f"{ours:.1f}", f"{theirs:.1f}", f"{theirs / ours:.1f}",
                f"{error:.1e}",
            )  # fmt: skip
    console.print(table)


def _operators(shape: RouteShape, given: dict[str, torch.Tensor]) -> None:
    as_written(given["logits"].float(), given.get("bias"), shape.attributes)
