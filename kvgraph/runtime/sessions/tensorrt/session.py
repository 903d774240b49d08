"""TensorRTSession: an engine over fixed addresses, with one CUDA graph for each repeated size.

    host, pinned ----copy----> index tensors --\
                                                engine --> logits ----copy----> host, pinned
    pool (one address: input and output) ------/

Decisions: every index tensor has one address for the session's life, in pinned memory and on the
device. So a captured graph contains the copies too, and a step is: fill, launch, copy the logits.
A captured step has a separate execution context, as TensorRT requires. All contexts share one
scratch memory, as they run in turn on one stream.

This file has not run on a GPU with TensorRT. It is tested against a fake runtime that runs the
model at the addresses that are bound here (tests/runtime/fake_tensorrt.py), and its names against
those of the real modules. `pytest -m cuda` runs it for real.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import NUM_LOGITS, TensorType
from kvgraph.contract.inputs import Buffer
from kvgraph.contract.manifest import ProfileInfo
from kvgraph.contract.signature import output_name
from kvgraph.errors import (
    BindingError,
    CapacityError,
    DeviceError,
    DeviceLostError,
    KernelError,
)
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.captured import CapturedSteps
from kvgraph.runtime.sessions.cuda_driver import CudaDevice, DeviceArray, Graph
from kvgraph.runtime.sessions.cuda_errors import step_error
from kvgraph.runtime.sessions.device_arrays import IndexTensor, Logits
from kvgraph.runtime.sessions.driver_session import DriverSession
from kvgraph.runtime.sessions.tensorrt.engine import LoadedEngine

if TYPE_CHECKING:
    from tensorrt_rtx import IExecutionContext

Sizes = dict[str, int]

CAPTURABLE = "an engine that can be captured in a CUDA graph"


class TensorRTSession(DriverSession):
    """Runs `model.engine` on one GPU. Pools are device memory; logits are returned on the host.

    Errors of the file and the machine: see `LoadedEngine` and `CudaDevice`. BindingError for a
    step that no optimisation profile holds; it names the dim and the profiles' largest extent.
    """

    captures = True

    def __init__(self, artifact: ArtifactFolder, device: int = 0) -> None:
        super().__init__(artifact)
        self._device = CudaDevice(device)
        with self._device.current():
            self._open(artifact)

    def _open(self, artifact: ArtifactFolder) -> None:
        self._loaded = LoadedEngine(artifact, self._device)
        self._profiles = self._loaded.info.profiles
        self._tensor = self._loaded.info.tensor
        self._inputs = self.signature.inputs
        # Set before the objects that own the device and its stream: attributes are freed in order.
        self._contexts: dict[int, IExecutionContext] = {}
        self._captured = CapturedSteps[_Captured]()
        self._index_tensors = {
            symbol.name: IndexTensor(self._device, symbol.dtype, self._largest(symbol))
            for symbol in self._inputs
            if symbol.kind == "tensor"
        }
        self._logits = Logits(self._device, self._vocab)
        self._scratch = self._device.zeros("int8", (self._loaded.scratch_bytes(),))
        self._records = True  # whether new steps may be captured

    @property
    def limits(self) -> Mapping[str, int]:  # type: ignore[override]
        dims = self._profiles[0].max
        return {dim: max(profile.max[dim] for profile in self._profiles) for dim in dims}

    def allocate(self, symbol: TensorType, sizes: Mapping[str, int]) -> Buffer:
        """Allocate zeroed device memory. CapacityError if the device has too little memory;
        BindingError if the engine takes fewer pages."""
        self._require_known(symbol)
        self._choose({dim: sizes[dim] for dim in symbol.symbolic_dims})
        return super().allocate(symbol, sizes)

    def _run(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        with self._device.current():
            return self._run_step(self._plan(arrays))

    def _run_step(self, step: _Step) -> npt.NDArray[np.float32]:
        context = self._contexts.get(step.profile)
        if context is None:
            context = self._contexts[step.profile] = self._context(step.profile, captured=False)
        self._bind(context, step)
        self._enqueue(context, step)
        return self._take_logits(step)

    def _run_captured(self, arrays: Sequence[Any]) -> npt.NDArray[np.float32]:
        with self._device.current():
            step = self._plan(arrays)
            captured = self._captured.used(step.key)
            if captured is None:
                return self._capture(step) if self._records else self._run_step(step)
            captured.graph.launch()
            return self._take_logits(step)

    # -- planning: checks that may fail come first, then the index tensors are filled

    def _plan(self, arrays: Sequence[Any]) -> _Step:
        """Check the step against the profiles, and write its index tensors into pinned memory."""
        sizes = self.signature.bind(arrays)
        wanted = sizes[NUM_LOGITS]
        profile = self._choose(sizes)
        sizes[NUM_LOGITS] = max(wanted, self._profiles[profile].min[NUM_LOGITS])
        addresses: dict[str, int] = {}
        baked: list[bytes] = []
        for symbol, array in zip(self._inputs, arrays, strict=True):
            if symbol.kind == "buffer":
                addresses[symbol.name] = self._pool(symbol, array).address
        for symbol, array in zip(self._inputs, arrays, strict=True):
            if symbol.kind == "tensor":
                tensor = self._index_tensors[symbol.name]
                tensor.fill(array, symbol.extents(sizes))
                hosted = symbol.name in self._loaded.hosted
                addresses[symbol.name] = tensor.host.address if hosted else tensor.device.address
                if hosted:
                    baked.append(array.tobytes())  # read on enqueue, so a captured step keeps it
        logits = self._logits.at_least(sizes[NUM_LOGITS])
        key = (*sizes.values(), *addresses.values(), *baked)
        return _Step(profile, sizes, addresses, logits, wanted, key)

    def _choose(self, sizes: Sizes) -> int:
        """Index of the first profile that holds every extent.

        NUM_LOGITS may be below its minimum: surplus logits are then computed and dropped."""
        for index, profile in enumerate(self._profiles):
            least = profile.min | {NUM_LOGITS: 0}
            if all(least[dim] <= n <= profile.max[dim] for dim, n in sizes.items()):
                return index
        raise BindingError(_beyond(self._profiles, sizes))

    def _largest(self, symbol: TensorType) -> tuple[int, ...]:
        shapes = [symbol.extents(profile.max) for profile in self._profiles]
        return tuple(max(extents) for extents in zip(*shapes, strict=True))

    # -- running: on the one stream, in order

    def _context(self, profile: int, *, captured: bool) -> IExecutionContext:
        context = self._loaded.context(profile, int(self._device.stream), captured=captured)
        context.set_device_memory(self._scratch.address, self._scratch.nbytes)
        self._device.synchronize()  # a change of profile may copy
        return context

    def _bind(self, context: IExecutionContext, step: _Step) -> None:
        """Set shapes and addresses of all inputs and outputs; a pool has one address for both."""
        for symbol in self._inputs:
            name, shape = self._tensor(symbol.name), symbol.extents(step.sizes)
            self._require(context.set_input_shape(name, shape), f"{symbol.name} {shape}")
            self._set_address(context, symbol.name, step.addresses[symbol.name])
        for symbol in self.signature.buffers:
            self._set_address(context, output_name(symbol), step.addresses[symbol.name])
        self._set_address(context, "logits", step.logits.address)
        unknown = context.infer_shapes()
        self._require(not unknown, f"shapes of {unknown}")

    def _set_address(self, context: IExecutionContext, name: str, address: int) -> None:
        """Set the address of `name`; skip an output that the engine writes through its input."""
        tensor = self._tensor(name)
        if tensor is not None:
            self._require(context.set_tensor_address(tensor, address), f"address of {name}")

    def _enqueue(self, context: IExecutionContext, step: _Step) -> None:
        """Enqueue the copies of index tensors, then the engine."""
        for symbol in self._inputs:
            if symbol.kind == "tensor" and symbol.name not in self._loaded.hosted:
                self._index_tensors[symbol.name].upload(symbol.extents(step.sizes))
        done = context.execute_async_v3(int(self._device.stream))
        self._require(done, "execution")

    def _take_logits(self, step: _Step) -> npt.NDArray[np.float32]:
        """Copy the logits to the host: the only wait of a step."""
        return self._logits.download(step.logits, step.wanted)

    def _capture(self, step: _Step) -> npt.NDArray[np.float32]:
        """Run the step once, as TensorRT requires before a capture, and record it.

        If memory is short, existing graphs stay, and no more are captured.
        """
        try:
            context = self._context(step.profile, captured=True)
        except CapacityError as error:
            self._stop_recording(self._one_more, error)
            return self._run_step(step)
        self._bind(context, step)
        self._enqueue(context, step)
        logits = self._take_logits(step)
        graph = self._recorded(context, step)
        if graph is not None:
            self._captured.make_room()
            self._captured[step.key] = _Captured(graph, context)
        return logits

    def _recorded(self, context: Any, step: _Step) -> Graph | None:
        """Record the step as a graph. If that is impossible, return None and stop capturing.

        TensorRT-RTX can be asked whether a context is capturable; TensorRT's capture just fails."""
        asks = getattr(context, "is_stream_capturable", None)
        if asks is not None and not asks(int(self._device.stream)):
            self._stop_recording(CAPTURABLE, "TensorRT's answer that it cannot be")
            return None
        try:
            return self._device.capture(lambda: self._enqueue(context, step))
        except CapacityError as error:
            self._stop_recording(self._one_more, error)
        except DeviceLostError:
            raise
        except (DeviceError, KernelError) as error:
            if asks is not None:
                raise
            self._stop_recording(CAPTURABLE, error)
        return None

    @property
    def _one_more(self) -> str:
        return f"memory for one more CUDA graph than {len(self._captured)}"

    def _stop_recording(self, expected: str, got: Exception | str) -> None:
        self._records = False
        warnings.warn(
            f"{self._loaded.path}: expected {expected}, got {got}: "
            "from now on, steps that were not captured are enqueued one kernel after the other",
            stacklevel=2,
        )

    def _require(self, done: bool, what: str) -> None:
        if not done:
            said = self._loaded.said()
            raise step_error(f"tensorrt: {what}: {said}", said)


@dataclass(frozen=True, slots=True)
class _Step:
    """One step: profile, extent of every dim, address of every input, and its logits' memory.

    `wanted`: rows of logits that were asked for. `key`: identifies an equal captured step."""

    profile: int
    sizes: Sizes
    addresses: dict[str, int]
    logits: DeviceArray
    wanted: int
    key: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, and the context that it was captured from, which must live and not change."""

    graph: Graph
    context: IExecutionContext


def _beyond(profiles: list[ProfileInfo], sizes: Sizes) -> str:
    """The error message for sizes that fit no profile: the first such dim, or all ranges."""
    for dim, extent in sizes.items():
        if not any(each.min[dim] <= extent <= each.max[dim] for each in profiles):
            low, high = min(p.min[dim] for p in profiles), max(p.max[dim] for p in profiles)
            return f"{dim}: expected {low} to {high} from the engine's profiles, got {extent}"
    ranges = {p.name: {d: [p.min[d], p.max[d]] for d in sizes} for p in profiles}
    return f"sizes: expected those of one of the engine's profiles {ranges}, got {sizes}"
