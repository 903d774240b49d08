"""OnnxRuntimeSession: ONNX Runtime with our custom-op library, and pools bound in place.

Decisions: execution is sequential (the parallel executor does not order two users of an in-place
buffer). Every pool's memory is bound to both its input and its output, so it is never copied. The
custom-op library is compiled against no version of ONNX Runtime, and runs in its builds for CPU
and for GPU. Another provider would copy the pools of a CPU graph back and forth, so it is never
used. A provider that ONNX Runtime falls back to, if it cannot load the requested one, is refused.
The session of a CUDA graph is in onnxruntime_cuda.py.

Decision: a step's values are bound once. Pools stay bound while they are the same arrays; small
inputs are copied into fixed memory, which is bound again if a shape changes. Steps use two bindings
in turn, each with its own logits, which so stay valid during the next step. A step with the shapes
of the last two binds nothing: to bind logits alone takes 48 us once a model has evicted the caches.
Fresh logits of 64 rows and 32,000 tokens would cost 2,000 more page faults.

Decision: settings of ONNX Runtime, measured with 246M parameters in float32 (941 MB):
- threads: the physical cores of the process's affinity; the default counts all of the machine's.
- spinning: on. Without it a decode step of tiny-llama takes 0.28 ms in place of 0.22, since our
  ops run on the session's threads too (spinning stopped between steps only: 0.25).
- memory patterns: off. They keep a plan for each ragged shape, which cost 110 MB after prompts of
  up to 2,048 tokens, and made no step faster. The arena is on: without it prefill is 1 to 17 %
  slower.
- step_tokens: 768, twice the rows of a block of our linear layers. With int4 weights and a full
  pool, 132 MB are resident, against 251 MB with 4,096. Prefill is 3 % faster (3,235 tokens/s in
  int8); 32 ragged requests are 2 % slower (484, best of 4), since the last of them begins later.
  Without an arena, or with one that grows by the requested size, memory is no smaller (steps of
  1,024: 192 and 148 MB in place of 141).
- the optimised graph is not stored: optimising takes 5 of the 18 ms of opening without weights,
  and its result depends on the version of ONNX Runtime.
- prepacking: on. float32 MatMul weights are copied once into the kernels' layout (0.8 s) and the
  file's pages are released: 878 MB resident when open, 1,002 MB at the peak, so no second copy.
  Without it opening takes 18 ms and 64 MB, but decode at batch 8 three times as long. Packed
  weights in a file (save_external_prepacked_constant_initializers) would double the artifact.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array, TensorType
from kvgraph.contract.dtypes import ALL, DTYPES
from kvgraph.contract.file_names import ONNX_NAME, WEIGHTS_NAME
from kvgraph.contract.files import require_utf8
from kvgraph.contract.host_memory import host_zeros
from kvgraph.contract.loading import next_step, require_package, with_step
from kvgraph.contract.signature import LOGITS_INDICES, GraphSignature, output_name
from kvgraph.errors import (
    ArtifactError,
    DeviceError,
    KernelError,
    KVGraphError,
    MissingDependencyError,
)
from kvgraph.kv.memory import ONNX_BATCH_TOKENS
from kvgraph.ops import native
from kvgraph.runtime.external import require_model
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.machine import default_threads
from kvgraph.runtime.native_calls import native_call
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.opening import Found, require_bindings
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from onnxruntime import InferenceSession, IOBinding, NodeArg, SessionOptions

EXTERNAL_FOLDER = "session.model_external_initializers_file_folder_path"

UPGRADE = "pip install --upgrade 'kvgraph[onnx]'"

PROVIDER = "CPUExecutionProvider"


class OnnxRuntimeSession(Session):
    """Runs `model.onnx` on ONNX Runtime's CPU provider.

    `num_threads`: of ONNX Runtime, and of the kernels' global pool, which runs the sampler. After
    `onnxruntime.set_global_thread_pool_sizes`, ONNX Runtime uses that pool instead.
    """

    step_tokens = ONNX_BATCH_TOKENS  # see the module's docstring
    runs_in_one_call = True
    mapped = (WEIGHTS_NAME,)

    def __init__(self, artifact: ArtifactFolder, num_threads: int | None = None) -> None:
        super().__init__(artifact)
        ort = import_onnxruntime()
        options = ort.SessionOptions()
        options.execution_mode = ort.ExecutionMode.ORT_SEQUENTIAL
        options.intra_op_num_threads = num_threads or default_threads()
        native.set_num_threads(options.intra_op_num_threads)
        options.enable_mem_pattern = False
        options.log_severity_level = 4  # failures come as exceptions
        register_ops(options)
        path = artifact.file(ONNX_NAME)
        weights = artifact.file(WEIGHTS_NAME).parent
        require_model(artifact)
        self._session = open_session(ort, path, options, PROVIDER, weights=weights)
        require_graph(self._session, path, self.signature)
        bindings = [self._session.io_binding() for _ in range(2)]
        pools = {s.name: _Pool(bindings, s) for s in self.signature.inputs if s.kind == "buffer"}
        self._bindings = [_Binding(b, self.signature, pools, self._vocab) for b in bindings]
        self._next_binding = itertools.cycle(self._bindings)

    def _run(self, arrays: Sequence[Array]) -> npt.NDArray[np.float32]:
        bound = next(self._next_binding)
        logits = bound.take(arrays)
        try:
            self._session.run_with_iobinding(bound.binding)
        except Exception as error:  # ONNX Runtime raises bare RuntimeErrors and its own classes
            reraise_if_signalled(error)
            raise KernelError(f"onnxruntime: {last_sentence(error)}") from error
        return logits


class _Binding:
    """What a step reads and writes. It is bound again where an array or a shape changes."""

    def __init__(
        self,
        binding: IOBinding,
        signature: GraphSignature,
        pools: Mapping[str, _Pool],
        vocab: int,
    ) -> None:
        self.binding = binding
        self.inputs = [pools.get(s.name) or _Input(binding, s) for s in signature.inputs]
        self.logits = _Logits(binding, vocab)

    def take(self, arrays: Sequence[Array]) -> npt.NDArray[np.float32]:
        """Take the values of a step's inputs; return where the step writes its logits."""
        for bound, array in zip(self.inputs, arrays, strict=True):
            bound.take(array)
        return self.logits.take(len(arrays[LOGITS_INDICES]))


class _Pool:
    """A buffer that ops write in place: input and output are bound to its address, in all bindings
    at once, so that the buffer before it is free then."""

    def __init__(self, bindings: Sequence[IOBinding], symbol: TensorType) -> None:
        self._bindings, self._symbol = bindings, symbol
        self._array: Array | None = None

    def take(self, array: Array) -> None:
        if array is self._array:
            return
        self._array = None  # until all bindings have the new address
        name, dtype = self._symbol.name, DTYPES[self._symbol.dtype].onnx
        place = ("cpu", 0, dtype, array.shape, array.ctypes.data)
        for binding in self._bindings:
            binding.bind_input(name, *place)
            binding.bind_output(output_name(self._symbol), *place)
        self._array = array  # referenced, so that no other array can get its address


class _Input:
    """A small input in fixed memory: values are copied into it; a new shape is bound again."""

    def __init__(self, binding: IOBinding, symbol: TensorType) -> None:
        self._binding, self._symbol = binding, symbol
        self._memory = np.empty(0, DTYPES[symbol.dtype].numpy)
        self._view: Array = np.empty((), self._memory.dtype)  # differs from every input's shape

    def take(self, array: Array) -> None:
        if array.shape != self._view.shape:
            self._bind(array.shape, array.size)
        self._view[...] = array

    def _bind(self, shape: tuple[int, ...], size: int) -> None:
        self._view = np.empty((), self._memory.dtype)  # stays if binding fails
        if size > self._memory.size:
            self._memory = np.empty(2 * size, self._memory.dtype)
        view = self._memory[:size].reshape(shape)
        dtype = DTYPES[self._symbol.dtype].onnx
        self._binding.bind_input(
            self._symbol.name, "cpu", 0, dtype, shape, self._memory.ctypes.data
        )
        self._view = view


class _Logits:
    """The memory of the logits; another number of rows is bound again."""

    def __init__(self, binding: IOBinding, vocab: int) -> None:
        self._binding, self._vocab = binding, vocab
        self._memory = self._view = np.empty((0, vocab), np.float32)

    def take(self, rows: int) -> npt.NDArray[np.float32]:
        if rows != len(self._view):
            self._bind(rows)
        return self._view

    def _bind(self, rows: int) -> None:
        self._view = self._memory[:0]  # stays if binding fails
        if rows > len(self._memory):
            # Twice the rows: memory that is never touched costs nothing.
            self._memory = host_zeros("logits", (2 * rows, self._vocab), "float32")
        shape, address = (rows, self._vocab), self._memory.ctypes.data
        self._binding.bind_output("logits", "cpu", 0, np.float32, shape, address)
        self._view = self._memory[:rows]


def require_provider(ort: ModuleType, provider: str) -> None:
    """Raise MissingDependencyError if the installed build lacks the provider."""
    built = ort.get_available_providers()
    if provider not in built:
        raise MissingDependencyError(
            f"onnxruntime: expected {provider} from the installed build, got {built}; "
            "pip install 'kvgraph[onnx-gpu]' in place of 'kvgraph[onnx]'"
        )


def open_session(
    ort: ModuleType,
    model: Path,
    options: SessionOptions,
    provider: str,
    settings: Mapping[str, str] = {},
    *,
    weights: Path | None = None,
) -> InferenceSession:
    """Open a session of `ort` on `provider` with its `settings`, and without a fallback.

    `weights`: the folder of the model's external data; None: the model's folder.

    ONNX Runtime itself would fall back to the CPU without an error. MissingDependencyError: the
    installed build lacks the provider. DeviceError: the provider cannot be loaded here (no GPU,
    driver or library). ArtifactError: ONNX Runtime rejects the model, which may be too new for it.
    """
    require_provider(ort, provider)
    require_utf8(model, "onnxruntime")
    chosen = (provider, dict(settings)) if settings else provider
    try:
        given: str | bytes = str(model)
        if weights not in (None, model.parent):
            options.add_session_config_entry(EXTERNAL_FOLDER, str(weights))
            given = model.read_bytes()
        with native_call(str(model)):
            session = _opened(ort, given, options, chosen)
    except KVGraphError:
        raise
    except Exception as error:  # ONNX Runtime raises many classes
        reraise_if_signalled(error)
        raise _refusal(ort, model, error) from error
    found = session.get_providers()
    if found[0] != provider:
        raise DeviceError(
            f"onnxruntime: expected {provider} on this machine, got {found}: it could not be loaded"
        )
    _LIVE.add(session)
    return session


def _opened(
    ort: ModuleType,
    model: str | bytes,
    options: SessionOptions,
    provider: str | tuple[str, dict[str, str]],
) -> InferenceSession:
    """Open a session. It runs on the process's global thread pool, if the process has one."""
    try:
        return ort.InferenceSession(model, options, providers=[provider], enable_fallback=False)
    except Exception as error:  # ONNX Runtime cannot be asked whether there is such a pool
        reraise_if_signalled(error)
        if OWN_THREADS not in str(error):
            raise
    options.use_per_session_threads = False
    return ort.InferenceSession(model, options, providers=[provider], enable_fallback=False)


def require_graph(session: InferenceSession, path: Path, signature: GraphSignature) -> None:
    """Raise ArtifactError unless the model at `path` has the manifest's inputs and outputs."""
    inputs, outputs = (
        {x.name: _found(x) for x in each} for each in (session.get_inputs(), session.get_outputs())
    )
    require_bindings(path, signature, inputs, outputs)


def _found(value: NodeArg) -> Found:
    return TYPES.get(value.type, value.type), value.shape


TYPES = {
    f"tensor({'float' if dtype.name == 'float32' else dtype.name.replace('_', '')})": dtype.name
    for dtype in ALL
}
"""ONNX Runtime's names of types -> ours."""

_LIVE: WeakSet[InferenceSession] = WeakSet()


def _keep_for_ever() -> None:
    """Leak all sessions in a forked child: freeing one would wait for threads that only its parent
    has. They are freed when the process exits."""
    for session in _LIVE:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))


os.register_at_fork(after_in_child=_keep_for_ever)


CODE = r"^\[ONNXRuntimeError\] : \d+ : \w+ : "
"""The begin of ONNX Runtime's messages."""

NEWER = (
    (r"Unsupported model (IR version): (\d+), max supported IR version: (\d+)", ""),
    (r"(Opset) (\d+) is under development.* domain (\S+) is till opset (\d+)", "of {} "),
)
"""ONNX Runtime's messages about a newer model: subject, the model's version, the newest known."""


OWN_THREADS = "use_per_session_threads must be false"
"""ONNX Runtime's message in a process that called its set_global_thread_pool_sizes."""


def _refusal(ort: ModuleType, model: Path, error: Exception) -> ArtifactError:
    """The error for a rejected model; it names both versions if the model is too new."""
    said, mine = " ".join(str(error).split()), f"onnxruntime {ort.__version__}"
    for pattern, domain in NEWER:
        match = re.search(pattern, said)
        if match:
            what, found, *names, most = match.groups()
            return ArtifactError(
                f"{model}: {what}: expected at most {most} {domain.format(*names)}from {mine}, got "
                f"{found}; {UPGRADE}"
            )
    why = re.sub(rf"{CODE}(Load model from .*? failed: ?)?", "", said)
    sentence = f"{model}: expected a model that {mine} takes, got one that it refuses: {why}"
    return ArtifactError(with_step(sentence, why))


def register_ops(options: SessionOptions) -> None:
    """Register our custom ops; MissingDependencyError if ONNX Runtime is too old for them.

    KernelError if the environment requests kernels that this processor cannot run, or if our
    library is missing, damaged or of another ABI version.
    """
    native.isa()
    path = native.library_path("onnxruntime")
    library = native.opened(path)
    try:
        options.register_custom_ops_library(str(path))
    except Exception as error:  # ONNX Runtime raises many classes
        reraise_if_signalled(error)
        why = last_sentence(error).rpartition("kvgraph: ")[2]
        raise MissingDependencyError(f"onnxruntime: {why}; {next_step(why, UPGRADE)}") from error
    library.kvg_cpu_set_num_threads(options.intra_op_num_threads)  # that share a layer's weights


def import_onnxruntime() -> ModuleType:
    """Import ONNX Runtime with its telemetry off, unless the user's environment sets it.

    Since 1.29 ONNX Runtime sends telemetry on Linux too."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime reads it on import
    module = require_package(
        "onnxruntime", "needed to run this artifact", "pip install 'kvgraph[onnx]'"
    )
    if os.environ["ORT_DISABLE_TELEMETRY"] == "1" and hasattr(module, "disable_telemetry_events"):
        module.disable_telemetry_events()  # in case onnxruntime was imported before
    return module


def last_sentence(error: Exception) -> str:
    """The last line of ONNX Runtime's message; of one about dims the lines that tell them."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if dims := [line for line in lines if "Got: " in line and "Expected: " in line]:
        return " ".join([re.sub(CODE, "", lines[0]), *dims])
    return lines[-1] if lines else type(error).__name__
