"""Backend `eager`, as a package of another would add it: torch's own program, run by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraph.compiler.targets import Lowered
from kvgraph.compiler.targets.cuda import save_program
from kvgraph.compiler.targets.torch import count_ops
from kvgraph.compiler.trace import Traced
from kvgraph.contract.backends import Backend, Runner, Support
from kvgraph.contract.file_names import PROGRAM_NAME, WEIGHTS_NAME
from kvgraph.ops.torch_arrays import tensor_over
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.opening import opening
from kvgraph.runtime.sessions.program import read_program

BACKEND = Backend(
    name="eager",
    targets={
        "cpu": Support(
            lower="eager:lower",
            sessions=(Runner(name="eager", entry="eager:EagerSession"),),
            tools=("torch",),
            weightless=True,
        )
    },
    files=(PROGRAM_NAME, WEIGHTS_NAME),
    packages=("torch",),
)


def lower(traced: Traced, folder: Path) -> Lowered:
    """Write `model.pt2`, which has no weights and no pickles, and `weights.safetensors`.

    torch.export.load takes a program for an older one if its name does not end in .pt2.
    """
    save_program(traced, folder, lambda text: None)
    return Lowered(ops=count_ops(traced.program), passes=traced.passes)


class EagerSession(Session):
    """Runs `model.pt2`, operator by operator. Refuses one that torch would unpickle."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        with opening(artifact.file(PROGRAM_NAME), f"torch {torch.__version__}"):
            program = read_program(artifact, torch.device("cpu"))
        self._step = program.module(check_guards=False)  # sessions check every value

    def _run(self, arrays: list[Any]) -> npt.NDArray[np.float32]:
        pairs = zip(self.signature.inputs, arrays, strict=True)
        with torch.no_grad():
            (logits,) = self._step(*(tensor_over(array, symbol.dtype) for symbol, array in pairs))
        found: npt.NDArray[np.float32] = logits.numpy()
        return found
