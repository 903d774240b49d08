"""Sessions: a loaded artifact that owns device memory and runs the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraph.contract.devices import Target
from kvgraph.errors import UnsupportedError

if TYPE_CHECKING:
    from kvgraph.runtime.artifact import Artifact
    from kvgraph.runtime.sessions.base import Session

BACKEND_SESSIONS = {
    "onnx": ("onnxruntime", "reference"),
    "torch": ("torch",),
    "tensorrt": ("tensorrt", "reference"),
}
"""Backend of an artifact -> sessions that run it, the default first."""


def create(artifact: Artifact, kind: str | None, num_threads: int | None) -> Session:
    backend = artifact.manifest.backend
    kinds = BACKEND_SESSIONS.get(backend, ())
    kind = kind or (kinds[0] if kinds else "")
    if kind not in kinds:
        raise UnsupportedError(
            f"session: expected one of {list(kinds)} for an artifact of backend {backend!r}, "
            f"got {kind!r}"
        )
    if kind == "onnxruntime" and Target.parse(artifact.manifest.target).kind == "cuda":
        from kvgraph.runtime.sessions.onnxruntime_cuda import OnnxRuntimeCudaSession

        return OnnxRuntimeCudaSession(artifact)
    if kind == "onnxruntime":
        from kvgraph.runtime.sessions.onnxruntime import OnnxRuntimeSession

        return OnnxRuntimeSession(artifact, num_threads)
    if kind == "torch" and Target.parse(artifact.manifest.target).kind == "cuda":
        from kvgraph.runtime.sessions.torch import import_torch

        import_torch()
        from kvgraph.runtime.sessions.cuda import CudaSession

        return CudaSession(artifact)
    if kind == "torch":
        from kvgraph.runtime.sessions.torch import TorchSession

        return TorchSession(artifact, num_threads)
    if kind == "tensorrt":
        from kvgraph.runtime.sessions.tensorrt import TensorRTSession

        return TensorRTSession(artifact)
    from kvgraph.runtime.sessions.reference import ReferenceSession

    return ReferenceSession(artifact)
