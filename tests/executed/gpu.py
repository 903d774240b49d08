"""A GPU of CPU tensors whose driver executes PTX, and plans that do not fit its kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from kvgraph.errors import KernelError
from kvgraph.kernels.launch import Launch, LaunchPlan
from kvgraph.kernels.variants import Variant
from kvgraph.runtime.sessions.cubins import Cubins
from kvgraph.runtime.sessions.launches import Operands
from tests.support.executing_driver import Executor

Change = Callable[[LaunchPlan], LaunchPlan]


class ExecutingGpu:
    """Stands for `CudaGpu`: the launcher's cubins, on CPU tensors that play device memory.

    `kernels` is that folder of an artifact, `ptx` of `artifacts.with_ptx`. Plans go through
    `change`, where there is one. `records`: the folder that a plugin's kernels come from.
    """

    def __init__(self, kernels: Path, ptx: Path, records: Path) -> None:
        self.records, self.device = records, torch.device("cpu")
        self.executor = Executor(ptx)
        files = [path.relative_to(kernels.parent).as_posix() for path in kernels.rglob("*")]
        self._cubins = Cubins(kernels.parent, files)
        self.arch, self.multiprocessors = self._cubins.arch, self._cubins.multiprocessors
        self.change: Change | None = None

    def free_memory(self) -> None:
        return None

    def require(self, variants: Iterable[Variant]) -> None:
        self._cubins.require(variants)

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        if self.change is not None:
            plan = self.change(plan)
        dtypes = plan.scratch_dtypes()
        scratch = {name: poisoned(n, dtypes[name]) for name, n in plan.scratch.items()}
        buffers = {**operands, **scratch}
        addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
        if "out" in operands:
            operands["out"].fill_(torch.nan)
        self.executor.run(lambda: self._cubins.launch(plan, addresses, 0), lambda: buffers)
        require_written(operands)

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return step


def require_written(operands: Operands) -> None:
    """KernelError where a part of `out` is what it was filled with."""
    if "out" in operands and operands["out"].isnan().any():
        raise KernelError("out: expected every element written, got some that no block wrote")


def poisoned(elements: int, dtype: str = "float32") -> torch.Tensor:
    kind = getattr(torch, dtype)
    return torch.full((elements,), torch.nan if kind.is_floating_point else -1, dtype=kind)


# ---- plans that do not fit


def change_of(name: str, kernel: str) -> Change:
    """The change called `name`, of every launch of `kernel`."""
    if name == "scratch":
        return _smaller_scratch

    def change(plan: LaunchPlan) -> LaunchPlan:
        launches = [
            CHANGES[name](one) if one.variant.kernel.name == kernel else one
            for one in plan.launches
        ]
        return dataclasses.replace(plan, launches=tuple(launches))

    return change


def _smaller_scratch(plan: LaunchPlan) -> LaunchPlan:
    halves = {name: elements // 2 for name, elements in plan.scratch.items()}
    return dataclasses.replace(plan, scratch=halves)


def _smaller_grid(one: Launch) -> Launch:
    """A block less of the first dimension that has several."""
    x, y = one.grid
    return dataclasses.replace(one, grid=(x - 1, y) if x > 1 else (x, y - 1))


def _exchanged_arguments(one: Launch) -> Launch:
    """The first two, both pointers, so that only the kernel can tell."""
    first, second, *others = one.arguments
    return dataclasses.replace(one, arguments=(second, first, *others))


CHANGES = {"grid": _smaller_grid, "arguments": _exchanged_arguments}
