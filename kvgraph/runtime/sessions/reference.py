"""ReferenceSession: runs the ONNX graph node by node in NumPy. Slow; tests compare with it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import ALL
from kvgraph.contract.file_names import ONNX_NAME
from kvgraph.contract.loading import require_package
from kvgraph.contract.signature import output_name
from kvgraph.runtime.external import require_model
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.opening import Found, opening, require_bindings

if TYPE_CHECKING:
    from onnx import TypeProto


class ReferenceSession(Session):
    """Runs `model.onnx` with onnx's reference evaluator and the ops' NumPy references."""

    def __init__(self, artifact: ArtifactFolder) -> None:
        super().__init__(artifact)
        onnx = require_package(
            "onnx", "needed by the reference session", "pip install 'kvgraph[compile]'"
        )
        from onnx.reference import ReferenceEvaluator

        from kvgraph.ops.onnx_ops import reference_ops

        path = artifact.folder / ONNX_NAME
        require_model(artifact)
        with opening(path, f"onnx {onnx.__version__}"):
            self._evaluator = made = ReferenceEvaluator(str(path), new_ops=reference_ops())
        inputs, outputs = (
            {name: _found(kind) for name, kind in zip(names, kinds, strict=True)}
            for names, kinds in (
                (made.input_names, made.input_types),
                (made.output_names, made.output_types),
            )
        )
        require_bindings(path, self.signature, inputs, outputs)

    def _run(self, arrays: Sequence[Array]) -> npt.NDArray[np.float32]:
        names = (symbol.name for symbol in self.signature.inputs)
        feeds = dict(zip(names, arrays, strict=True))
        outputs = [output_name(symbol) for symbol in self.signature.outputs]
        logits, *buffers = self._evaluator.run(outputs, feeds)
        for symbol, buffer in zip(self.signature.buffers, buffers, strict=True):
            if buffer is not feeds[symbol.name]:  # plain operators return a new array
                feeds[symbol.name][...] = buffer
        result: npt.NDArray[np.float32] = logits
        return result


def _found(kind: TypeProto) -> Found:
    tensor = kind.tensor_type
    names = {dtype.onnx: dtype.name for dtype in ALL}
    dims = [
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim
    ]
    return names.get(tensor.elem_type, str(tensor.elem_type)), dims
