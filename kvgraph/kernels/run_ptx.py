"""Run a plan's launches as PTX, on a CPU. `run.py` runs them with Triton."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from kvgraph import ptx
from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels.aot import HIDDEN_POINTERS
from kvgraph.kernels.launch import Launch, LaunchPlan
from kvgraph.kernels.variants import Variant

Kernels = Callable[[Variant], tuple[ptx.Kernel, int]]
"""Function from a variant to its kernel and its dynamic shared memory in bytes."""


class PlanMemory:
    """Memory of a plan's launches: its arrays by parameter name, which the launches change, and its
    scratch memory, filled with NaN, or with -1 for integers."""

    def __init__(self, plan: LaunchPlan, arrays: Mapping[str, Array]) -> None:
        scratch = {
            name: np.full(
                plan.scratch[name],
                -1 if DTYPES[dtype].kind == "int" else np.nan,
                DTYPES[dtype].numpy,
            )
            for name, dtype in plan.scratch_dtypes().items()
        }
        self._memory = ptx.Memory()
        self._addresses = {
            name: self._memory.add(array, name) for name, array in {**arrays, **scratch}.items()
        }

    def run(
        self,
        one: Launch,
        kernel: ptx.Kernel,
        shared: int,
        *,
        order: int | None = None,
        checks: bool = True,
        profile: bool = False,
        blocks: Sequence[tuple[int, int, int]] | None = None,
    ) -> ptx.Counters:
        """Run one launch; see `ptx.run` for the keywords."""
        given = [self._addresses[a] if isinstance(a, str) else a for a in one.arguments]
        return ptx.run(
            kernel,
            self._memory,
            grid=(*one.grid, 1),
            threads=32 * one.variant.num_warps,
            arguments=[*given, *(0 for _ in HIDDEN_POINTERS)],
            shared=shared,
            order=order,
            checks=checks,
            profile=profile,
            blocks=blocks,
        )


def run_plan(
    plan: LaunchPlan,
    arrays: Mapping[str, Array],
    kernels: Kernels,
    *,
    order: int | None = None,
    checks: bool = True,
    profile: bool = False,
) -> list[ptx.Counters]:
    """Run all launches in order; return the counters of each. See `ptx.run` for the keywords."""
    memory = PlanMemory(plan, arrays)
    return [
        memory.run(one, *kernels(one.variant), order=order, checks=checks, profile=profile)
        for one in plan.launches
    ]
