"""ONNX Runtime session: our custom-op library, pools bound in place.

Decisions: sequential execution only (the parallel executor does not order two users of an
in-place buffer); every pool's memory is bound to its input and to its output, so nothing copies
it. The custom-op library is compiled against no version of ONNX Runtime, and runs under the builds
for CPU and for GPU. Its ops are the CPU provider's: another provider would copy the pools to and
fro, so it is refused, as is what ONNX Runtime falls back to when it cannot load a provider.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.signature import output_name
from kvgraph.errors import DeviceError, KernelError, MissingDependencyError, UnsupportedError
from kvgraph.ops import native
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sessions.base import Session

# onnx.TensorProto.DataType, which the deployment side does not install.
ELEMENT_TYPES = {
    "float32": 1,
    "int8": 3,
    "int32": 6,
    "float16": 10,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
}


PROVIDERS = ("CPUExecutionProvider",)
"""That kvgraph's custom ops are written for, the default first."""


class OnnxRuntimeSession(Session):
    """Runs `model.onnx` on ONNX Runtime's CPU provider.

    UnsupportedError for a `provider` that kvgraph's ops are not written for.
    """

    def __init__(
        self, artifact: Artifact, num_threads: int | None = None, provider: str = PROVIDERS[0]
    ) -> None:
        super().__init__(artifact)
        ort = _import()
        if provider not in PROVIDERS:
            raise UnsupportedError(
                f"onnxruntime: provider: expected one of {list(PROVIDERS)}, which the cache ops "
                f"are written for, got {provider!r}"
            )
        options = ort.SessionOptions()
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = num_threads or 0
        options.log_severity_level = 4  # failures come as exceptions
        options.register_custom_ops_library(str(native.library_path("onnxruntime")))
        self._session = open_session(ort, artifact.folder / "model.onnx", options, provider)
        self._binding = self._session.io_binding()

    def _run(self, arrays: list[Any]) -> npt.NDArray[np.float32]:
        binding = self._binding
        addresses: dict[str, tuple[Any, ...]] = {}
        for symbol, array in zip(self.signature.inputs, arrays, strict=True):
            kind = ELEMENT_TYPES[symbol.dtype]
            addresses[symbol.name] = ("cpu", 0, kind, array.shape, array.ctypes.data)
            binding.bind_input(symbol.name, *addresses[symbol.name])
        logits = np.empty((len(arrays[2]), self._vocab), np.float32)
        binding.bind_output("logits", "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        for buffer in self.signature.buffers:
            binding.bind_output(output_name(buffer), *addresses[buffer.name])
        try:
            self._session.run_with_iobinding(binding)
        except Exception as error:  # ONNX Runtime raises bare RuntimeErrors and its own classes
            raise KernelError(f"onnxruntime: {_last_sentence(error)}") from error
        return logits


def open_session(ort: Any, model: Path, options: Any, provider: str) -> Any:
    """A session of `ort` on `provider` and nothing else.

    ONNX Runtime falls back to the CPU without an error. MissingDependencyError: the installed build
    lacks the provider; DeviceError: it has it and cannot load it here (no GPU, driver or library).
    """
    built = ort.get_available_providers()
    if provider not in built:
        raise MissingDependencyError(
            f"onnxruntime: expected {provider} from the installed build, got {built}; "
            "pip install 'kvgraph[onnx-gpu]' in place of 'kvgraph[onnx]'"
        )
    session = ort.InferenceSession(str(model), options, providers=[provider])
    found = session.get_providers()
    if found[0] != provider:
        raise DeviceError(
            f"onnxruntime: expected {provider} on this machine, got {found}: it could not be loaded"
        )
    return session


def _import() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise MissingDependencyError(
            "onnxruntime: needed to run this artifact, not installed; pip install 'kvgraph[onnx]'"
        ) from error
    return onnxruntime


def _last_sentence(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[-1] if text else type(error).__name__
