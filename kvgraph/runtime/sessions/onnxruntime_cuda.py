"""ONNX Runtime session on its CUDA provider: inputs in device memory, our kernels in the graph.

    host, pinned ----copy----> index tensors --\
    host -------------------> max_lengths -------> graph --> logits ----copy----> host, pinned
    pool (one address: input and output) ------/

Decisions: the provider runs on this session's stream, so that copies, its kernels and ours are in
order without a wait between them. max_lengths stays with the host: the cache ops plan by it. Pools
are memory of the driver, not of ONNX Runtime, bound to input and output alike. float32 is computed
as float32 (ONNX Runtime's default on CUDA is TF32). Nothing is captured: a plan depends on lengths
that the host reads in every step.

No machine at hand had the provider: this file is tested against a fake driver and a fake provider
that runs the model at the very addresses that are bound here (tests/runtime), and the ops against a
host of our own (tests/plugins). `pytest -m cuda` runs it for real.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array, TensorType
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.file_names import ONNX_NAME
from kvgraph.contract.signature import LOGITS_INDICES, output_name
from kvgraph.errors import (
    ArtifactError,
    DeviceError,
)
from kvgraph.runtime.external import require_model
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.cuda_driver import CudaDevice
from kvgraph.runtime.sessions.cuda_errors import opening_error, step_error
from kvgraph.runtime.sessions.device_arrays import IndexTensor, Logits
from kvgraph.runtime.sessions.driver_session import DriverSession
from kvgraph.runtime.sessions.onnxruntime import (
    import_onnxruntime,
    last_sentence,
    open_session,
    register_ops,
    require_graph,
    require_provider,
)
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

PROVIDER = "CUDAExecutionProvider"
INSTALL = "pip install 'kvgraph[onnx-gpu]'"


class OnnxRuntimeCudaSession(DriverSession):
    """Runs `model.onnx` on one GPU. Pools are device memory; logits are returned on the host.

    MissingDependencyError: no ONNX Runtime, or one without the CUDA provider. DeviceError: no GPU,
    or the provider cannot be loaded. ArtifactError: ONNX Runtime rejects the model. KernelError: a
    step failed. CapacityError: the model or a step needs more memory than there is.
    """

    def __init__(self, artifact: ArtifactFolder, device: int = 0) -> None:
        super().__init__(artifact)
        ort = import_onnxruntime()
        require_provider(ort, PROVIDER)
        self._device = CudaDevice(device, install=INSTALL)
        with self._device.current():
            self._open(ort, artifact)

    def _open(self, ort: ModuleType, artifact: ArtifactFolder) -> None:
        self._session = _open(ort, artifact, self._device)
        require_graph(self._session, artifact.folder / ONNX_NAME, self.signature)
        self._binding = self._session.io_binding()
        self._inputs = self.signature.inputs
        self._index_tensors = {
            symbol.name: IndexTensor(self._device, symbol.dtype)
            for symbol in self._inputs
            if symbol.kind == "tensor" and symbol.device.kind != "host"
        }
        self._logits = Logits(self._device, self._vocab)

    def _run(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        with self._device.current():
            rows, given = len(arrays[LOGITS_INDICES]), self._given(arrays)
            pools = {s.name: self._pool(s, a) for s, a in given if s.kind == "buffer"}
            logits = self._logits.at_least(rows)
            for symbol, array in given:
                if symbol.kind == "buffer":
                    self._bind(symbol, array.shape, pools[symbol.name].address)
                else:
                    self._bind_values(symbol, array)
            place = ("cuda", self._device.ordinal, np.float32, (rows, self._vocab), logits.address)
            self._binding.bind_output("logits", *place)
            try:
                self._session.run_with_iobinding(self._binding)
            except Exception as error:  # ONNX Runtime raises bare RuntimeErrors and its own classes
                reraise_if_signalled(error)
                raise step_error(f"onnxruntime: {last_sentence(error)}", str(error)) from error
            return self._logits.download(logits, rows)

    def _given(self, arrays: Sequence[Any]) -> list[tuple[TensorType, Any]]:
        return list(zip(self._inputs, arrays, strict=True))

    def _bind_values(self, symbol: TensorType, array: Array) -> None:
        """Bind an index tensor: its copy on the device, or the host array of a host input."""
        tensor = self._index_tensors.get(symbol.name)
        if tensor is None:
            place = ("cpu", 0, DTYPES[symbol.dtype].onnx, array.shape, array.ctypes.data)
            self._binding.bind_input(symbol.name, *place)
            return
        tensor.fill(array, array.shape)
        tensor.upload(array.shape)
        self._bind(symbol, array.shape, tensor.device.address)

    def _bind(self, symbol: TensorType, shape: tuple[int, ...], address: int) -> None:
        """Bind an input in device memory; for a buffer also the output, at the same address."""
        place = ("cuda", self._device.ordinal, DTYPES[symbol.dtype].onnx, shape, address)
        self._binding.bind_input(symbol.name, *place)
        if symbol.kind == "buffer":
            self._binding.bind_output(output_name(symbol), *place)


def _open(ort: ModuleType, artifact: ArtifactFolder, device: CudaDevice) -> InferenceSession:
    options = ort.SessionOptions()
    options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
    options.log_severity_level = 4  # failures come as exceptions
    register_ops(options)
    settings = {
        "device_id": str(device.ordinal),
        "user_compute_stream": str(int(device.stream)),
        "use_tf32": "0",
    }
    path = artifact.folder / ONNX_NAME
    require_model(artifact)
    try:
        return open_session(ort, path, options, PROVIDER, settings)
    except ArtifactError as error:
        if (told := opening_error(path, str(error.__cause__))) is not None:
            raise told from error
        _require_loaded(ort, device)
        raise


def _require_loaded(ort: ModuleType, device: CudaDevice) -> None:
    """Raise DeviceError if the provider cannot be loaded. ONNX Runtime would only report missing
    CPU kernels for a bfloat16 graph, which hides the cause."""
    try:
        ort.OrtValue.ortvalue_from_shape_and_type([1], np.float32, "cuda", device.ordinal)
    except Exception as error:
        reraise_if_signalled(error)
        raise DeviceError(
            f"onnxruntime: expected {PROVIDER} on this machine, got none that can be loaded: "
            f"{last_sentence(error)}"
        ) from error
