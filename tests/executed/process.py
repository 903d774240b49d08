"""A CUDA artifact through compiled hosts whose driver executes PTX: linear layers on the CPU.

LD_LIBRARY_PATH=fake_driver HOST=host.so python -m tests.executed.process FOLDER REQUEST.json

FOLDER is of `artifacts.with_ptx`. REQUEST holds `host` ("launcher", "tensorrt", "onnxruntime"),
`prompts`, `new_tokens`, `engine` (arguments) and `changes`: of a plan, each applied in a run of its
own. Prints JSON: tokens, launched kernels; or for each change what was said of it.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvgraph.errors import KernelError, KVGraphError
from kvgraph.kernels.launch import Launch, LaunchPlan
from kvgraph.kernels.variants import Variant
from kvgraph.runtime.artifact import verify
from kvgraph.runtime.cubins import Cubins
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import SamplingParams
from kvgraph.runtime.sessions import program
from kvgraph.runtime.sessions.cuda import CudaSession
from kvgraph.runtime.sessions.program import Operands
from tests.support.executing_driver import Executor

Change = Callable[[LaunchPlan], LaunchPlan]


class ExecutingGpu:
    """Stands for `CudaGpu`: the launcher's cubins, on CPU tensors that play device memory."""

    def __init__(self, folder: Path, change: Change | None = None) -> None:
        self.executor = Executor(folder / "ptx")
        self.device = torch.device("cpu")
        self._cubins = Cubins(folder / "artifact" / "kernels")
        self.arch, self.multiprocessors = self._cubins.arch, self._cubins.multiprocessors
        self._change = change

    def require(self, variants: Iterable[Variant]) -> None:
        self._cubins.require(variants)

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        if self._change is not None:
            plan = self._change(plan)
        scratch = {name: _poisoned(elements) for name, elements in plan.scratch.items()}
        buffers = {**operands, **scratch}
        addresses = {name: tensor.data_ptr() for name, tensor in buffers.items()}
        if "out" in operands:
            operands["out"].fill_(torch.nan)
        self.executor.run(lambda: self._cubins.launch(plan, addresses, 0), buffers)
        require_written(operands)

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        return step


def require_written(operands: Operands) -> None:
    if "out" in operands and operands["out"].isnan().any():
        raise KernelError("out: expected every element written, got some that no block wrote")


def _poisoned(elements: int) -> torch.Tensor:
    return torch.full((elements,), torch.nan)


# ---- plans that do not fit


def smaller_grid(plan: LaunchPlan) -> LaunchPlan:
    return _each(plan, lambda one: dataclasses.replace(one, grid=(one.grid[0], one.grid[1] - 1)))


def smaller_scratch(plan: LaunchPlan) -> LaunchPlan:
    halves = {name: elements // 2 for name, elements in plan.scratch.items()}
    return dataclasses.replace(plan, scratch=halves)


def exchanged_arguments(plan: LaunchPlan) -> LaunchPlan:
    """q and the table of pages, both pointers."""
    other = {"q": "lookup_table", "lookup_table": "q"}

    def exchange(one: Launch) -> Launch:
        given = tuple(other.get(a, a) if isinstance(a, str) else a for a in one.arguments)
        return dataclasses.replace(one, arguments=given)

    return _each(plan, exchange)


def _each(plan: LaunchPlan, change: Callable[[Launch], Launch]) -> LaunchPlan:
    return dataclasses.replace(plan, launches=tuple(map(change, plan.launches)))


def attention_only(change: Change) -> Change:
    return lambda plan: change(plan) if plan.launches[0].variant.role != "" else plan


# ---- the process


def open_engine(folder: Path, gpu: ExecutingGpu, settings: Mapping[str, Any]) -> Engine:
    artifact = verify(folder / "artifact")
    return Engine(artifact, session=CudaSession(artifact, gpu), **settings)


def main() -> None:
    folder, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    sampling = SamplingParams(max_new_tokens=request["new_tokens"], ignore_eos=True)
    gpu = ExecutingGpu(folder)
    engine = open_engine(folder, gpu, request["engine"])
    tokens = [c.token_ids for c in engine.generate(request["prompts"], sampling)]
    print(json.dumps({"tokens": tokens, "launched": Counter(gpu.executor.launched)}))


if __name__ == "__main__":
    main()
