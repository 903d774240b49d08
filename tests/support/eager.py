"""Backend `eager`, as a package of another would add it: torch's own program, run by torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvgraph.compiler.targets import Lowered
from kvgraph.compiler.targets.torch import count_ops
from kvgraph.compiler.targets.weights import save_weights
from kvgraph.compiler.trace import Traced
from kvgraph.contract.backends import Backend, Runner, Support
from kvgraph.ops.torch_arrays import tensor_over
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sessions.base import Session

MODEL_NAME = "model.eager"

BACKEND = Backend(
    name="eager",
    targets={
        "cpu": Support(
            lower="eager:lower",
            sessions=(Runner(name="eager", entry="eager:EagerSession"),),
            tools=("torch",),
        )
    },
    files=(MODEL_NAME, "weights.safetensors"),
    packages=("torch",),
)


def lower(traced: Traced, folder: Path) -> Lowered:
    """Write `model.eager` and `weights.safetensors`."""
    save_weights(traced.program, folder)
    torch.export.save(traced.program, folder / MODEL_NAME)
    return Lowered(ops=count_ops(traced.program), passes=traced.passes)


class EagerSession(Session):
    """Runs `model.eager`, operator by operator."""

    def __init__(self, artifact: Artifact) -> None:
        super().__init__(artifact)
        self._step = torch.export.load(artifact.folder / MODEL_NAME).module()

    def _run(self, arrays: list[Any]) -> npt.NDArray[np.float32]:
        pairs = zip(self.signature.inputs, arrays, strict=True)
        with torch.no_grad():
            (logits,) = self._step(*(tensor_over(array, symbol.dtype) for symbol, array in pairs))
        found: npt.NDArray[np.float32] = logits.numpy()
        return found
