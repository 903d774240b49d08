"""torch session: an AOTInductor package, weights bound late from the one safetensors file.

The package's runner is called directly: `__call__` of the loaded model flattens pytrees for about
12 us more. Our ops are called back through torch's dispatcher and mutate the pool in place.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.errors import KernelError, MissingDependencyError
from kvgraph.ops import native
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.weights import read_weights

VIEW_DTYPES = {"bfloat16": ("int16", "bfloat16"), "float8_e4m3fn": ("int8", "float8_e4m3fn")}
"""NumPy has these only through ml_dtypes, which torch does not read: cross as plain integers."""


class TorchSession(Session):
    """Runs `model.pt2` on the CPU. `num_threads` sets torch's and the kernels' global pools."""

    def __init__(self, artifact: Artifact, num_threads: int | None = None) -> None:
        super().__init__(artifact)
        self._torch = torch = import_torch()
        if num_threads:
            torch.set_num_threads(num_threads)
        native.set_num_threads(num_threads or 0)
        # Its one warning is that a portable package meets a machine with wider vectors.
        logging.getLogger("torch.export.pt2_archive._package").setLevel(logging.ERROR)
        package = torch._inductor.aoti_load_package(str(artifact.folder / "model.pt2"))
        self._runner = package.loader
        self._weights = read_weights(artifact, self._runner.get_constant_fqns())
        self._runner.load_constants(self._weights, False, True, True)  # user-managed memory

    def _run(self, arrays: list[Any]) -> npt.NDArray[np.float32]:
        tensors = [
            self._tensor(array, symbol.dtype)
            for symbol, array in zip(self.signature.inputs, arrays, strict=True)
        ]
        try:
            with self._torch.inference_mode():  # else our ops are asked for gradients, 5 us each
                logits: npt.NDArray[np.float32] = self._runner.run(tensors)[0].numpy()
        except RuntimeError as error:
            raise KernelError(f"torch: {str(error).splitlines()[0]}") from error
        return logits

    def _tensor(self, array: npt.NDArray[Any], dtype: str) -> Any:
        """A tensor over the same memory."""
        if not array.flags.writeable:
            array = array.copy()  # torch has no read-only tensors; buffers are always writeable
        plain, view = VIEW_DTYPES.get(dtype, (None, None))
        tensor = self._torch.from_numpy(array.view(plain) if plain else array)
        return tensor.view(getattr(self._torch, view)) if view else tensor


def import_torch() -> Any:
    try:
        import torch
        import torch._inductor
    except ImportError as error:
        raise MissingDependencyError(
            "torch: needed to run this artifact, not installed; pip install 'kvgraph[torch]'"
        ) from error
    from kvgraph.ops import torch_ops  # noqa: F401  (the package calls the registered ops)

    return torch
