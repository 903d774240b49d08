"""CudaDevice: memory, a stream and graphs of one CUDA device, by NVIDIA's driver API bindings.

Decision: `cuda-bindings` instead of torch, whose wheel is 300 times larger, and instead of more
entry points in our launcher: every call here is one documented function of the driver.
The device's primary context is used, which TensorRT and torch share. It is current while a method
or `with device.current()` runs; then the caller's context is current again. It is never released,
because our launcher keeps modules in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dtypes import itemsize
from kvgraph.contract.loading import unimportable
from kvgraph.errors import CapacityError, DeviceError, KVGraphError
from kvgraph.runtime.sessions.cuda_errors import of_number
from kvgraph.runtime.sessions.uncollected import uncollected
from kvgraph.signal_handlers import reraise_if_signalled

REFUSALS = (DeviceError, CapacityError)
"""Errors that `CudaDevice.call` raises."""

INSTALL = "pip install 'kvgraph[tensorrt]'"


class DeviceArray:
    """Device memory, freed when the last reference is dropped.

    A cache manager treats it as opaque. `address`: pointer for kernels. Row-major; `shape` in
    elements.
    """

    def __init__(self, device: CudaDevice, dtype: str, shape: tuple[int, ...]) -> None:
        self.device, self.dtype, self.shape = device, dtype, shape
        self.nbytes = math.prod(shape) * itemsize(dtype)
        with device.current():
            self.address = int(device.call("cuMemAlloc", max(self.nbytes, 1)))
        self._free = weakref.finalize(self, _free, device, "cuMemFree", self.address)
        self._free.atexit = False  # at process exit, the driver frees everything


class PinnedArray:
    """Page-locked host memory as bytes, for copies without staging. It is freed when its last view
    is dropped, even if this object is dropped earlier."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        with device.current():
            self.address = int(device.call("cuMemHostAlloc", max(nbytes, 1), 0))
        memory = (ctypes.c_uint8 * nbytes).from_address(self.address)  # the base of every view
        self._free = weakref.finalize(memory, _free, device, "cuMemFreeHost", self.address)
        self._free.atexit = False
        self.bytes: npt.NDArray[np.uint8] = np.ctypeslib.as_array(memory)


class Graph:
    """Work that was captured on the device's stream; `launch` enqueues all of it at once."""

    def __init__(self, device: CudaDevice, executable: Any) -> None:
        self._device, self._executable = device, executable
        self._free = weakref.finalize(self, _free, device, "cuGraphExecDestroy", executable)
        self._free.atexit = False

    def launch(self) -> None:
        self._device.call("cuGraphLaunch", self._executable, self._device.stream)


class CudaDevice:
    """One CUDA device with one stream. `ordinal`: index among the devices that the driver shows.

    Methods enqueue on the stream, which is destroyed with the last reference. Methods that need
    the context expect that the caller has made it current.

    MissingDependencyError without cuda-bindings, which `install` installs. DeviceError without a
    driver or such a device, and for each failed driver call (CapacityError: out of memory;
    DeviceLostError: the context is unusable).
    """

    def __init__(self, ordinal: int = 0, *, install: str = INSTALL) -> None:
        self._driver = _import(install)
        self.ordinal = ordinal
        self._initialize()
        count = int(self.call("cuDeviceGetCount"))
        if not 0 <= ordinal < count:
            raise DeviceError(f"cuda:{ordinal}: expected one of {count} devices of this machine")
        self._device = self.call("cuDeviceGet", ordinal)
        self._context = self.call("cuDevicePrimaryCtxRetain", self._device)
        with self.current():
            self.stream = self.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING
        self._free = weakref.finalize(
            self, _destroy_stream, self._driver, self._context, self.stream
        )
        self._free.atexit = False

    def _initialize(self) -> None:
        try:
            self.call("cuInit", 0)
        except KVGraphError:
            raise
        except Exception as error:  # of the bindings, if there is no libcuda
            reraise_if_signalled(error)
            raise DeviceError(
                f"cuda:{self.ordinal}: expected an NVIDIA driver on this machine, got none "
                f"({str(error).splitlines()[0]})"
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a driver function: return its result, or raise one of REFUSALS with its status."""
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status):
            word = getattr(status, "name", str(status))
            sentence = f"cuda:{self.ordinal}: {name}: expected CUDA_SUCCESS, got {word}"
            raise of_number(int(status), sentence)
        return results[0] if results else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device's context current in this thread, and restore the previous one."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            with contextlib.suppress(*REFUSALS):  # an error of earlier work; the next call has it
                self.call("cuCtxPopCurrent")

    @property
    def arch(self) -> str:
        """Architecture of the device, such as "sm_89" for an RTX 4090."""
        attribute = self._driver.CUdevice_attribute
        major, minor = (
            int(self.call("cuDeviceGetAttribute", each, self._device))
            for each in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        return f"sm_{major}{minor}"

    @property
    def name(self) -> str:
        raw: bytes = self.call("cuDeviceGetName", 256, self._device)
        return raw.partition(b"\0")[0].decode(errors="replace")

    @property
    def free_memory(self) -> int:
        """Bytes of device memory that are free for all processes."""
        with self.current():
            return int(self.call("cuMemGetInfo"))

    def zeros(self, dtype: str, shape: tuple[int, ...]) -> DeviceArray:
        array = DeviceArray(self, dtype, shape)
        if array.nbytes:
            self.call("cuMemsetD8Async", array.address, 0, array.nbytes, self.stream)
        return array

    def upload(self, address: int, source: int, nbytes: int) -> None:
        """Enqueue a copy from host address `source`."""
        self.call("cuMemcpyHtoDAsync", address, source, nbytes, self.stream)

    def download(self, target: int, address: int, nbytes: int) -> None:
        """Enqueue a copy to host address `target`."""
        self.call("cuMemcpyDtoHAsync", target, address, nbytes, self.stream)

    def synchronize(self) -> None:
        self.call("cuStreamSynchronize", self.stream)

    def capture(self, enqueue: Callable[[], None]) -> Graph:
        """Capture the work of `enqueue` as a graph; nothing runs. Errors end the capture too."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        with uncollected():
            try:
                self.call("cuStreamBeginCapture", self.stream, mode)
                enqueue()
                graph = self.call("cuStreamEndCapture", self.stream)
            except BaseException:
                with contextlib.suppress(*REFUSALS):
                    self.call("cuGraphDestroy", self.call("cuStreamEndCapture", self.stream))
                raise
        try:
            return Graph(self, self.call("cuGraphInstantiate", graph, 0))
        finally:
            self.call("cuGraphDestroy", graph)


def _free(device: CudaDevice, name: str, handle: Any) -> None:
    with contextlib.suppress(*REFUSALS), device.current():  # no caller could handle an error
        device.call(name, handle)


def _destroy_stream(driver: ModuleType, context: object, stream: object) -> None:
    """Destroy a stream; the driver frees it once its enqueued work has run."""
    (refused, *_) = driver.cuCtxPushCurrent(context)
    if not int(refused):
        driver.cuStreamDestroy(stream)
        driver.cuCtxPopCurrent()


def _import(install: str) -> Any:
    try:
        from cuda.bindings import driver
    except Exception as error:
        reraise_if_signalled(error)
        need = "needed to run this artifact"
        raise unimportable("cuda.bindings", need, error, install, "cuda-bindings") from error
    return driver
