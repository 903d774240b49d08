"""Run an exported program on this CPU, operator by operator; kvgraph's ops use CPU kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Interpreter
from torch.fx.node import Argument, Target

from kvgraph.compiler.passes.fuse_update_and_attend import FUSED
from kvgraph.compiler.weights import Weights


class ProgramRun(Interpreter):
    """A callable that takes the signature's inputs in order and returns the program's results, the
    logits first.

    `weights`: values of parameters that are fake tensors.
    `window`: longer attention windows are cut to this many tokens.
    """

    def __init__(
        self,
        program: ExportedProgram,
        *,
        window: int | None = None,
        weights: Weights | None = None,
    ) -> None:
        super().__init__(program.module(check_guards=False))
        self._weights = weights
        fused = [node for node in self.graph.nodes if node.target is FUSED]
        for node in fused if window is not None else ():
            node.update_kwarg("window", min(node.kwargs.get("window", 0), window))

    def get_attr(
        self, target: Target, args: tuple[Argument, ...], kwargs: dict[str, object]
    ) -> Any:
        found = super().get_attr(target, args, kwargs)
        if not isinstance(found, FakeTensor):
            return found
        assert self._weights is not None, "a program without weights comes with where they are"
        return self._weights.read(str(target), found.dtype, found.shape)

    def __call__(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = self.run(*inputs)
        return results
