"""One CUDA device through NVIDIA's own bindings of the driver API: memory, a stream, graphs.

Decision: `cuda-bindings` instead of torch, whose wheel is 300 times larger, and instead of more
entry points in our launcher: every call here is one documented function of the driver.
The device's primary context is used, which TensorRT and torch share: it is current while a method
or a `with device.current()` of ours runs, and the caller's is again after it. It is never released:
our launcher keeps modules in it.
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
from kvgraph.errors import CapacityError, DeviceError, KVGraphError, MissingDependencyError
from kvgraph.handlers import let_pass
from kvgraph.runtime.sessions.cuda_errors import of_number
from kvgraph.runtime.sessions.uncollected import uncollected

REFUSALS = (DeviceError, CapacityError)
"""What `CudaDevice.call` raises."""

INSTALL = "pip install 'kvgraph[tensorrt]'"


class DeviceArray:
    """Memory on a device: freed when the last reference goes.

    Opaque to a cache manager; `address` is what a kernel gets. Row-major, `shape` in elements.
    """

    def __init__(self, device: CudaDevice, dtype: str, shape: tuple[int, ...]) -> None:
        self.device, self.dtype, self.shape = device, dtype, shape
        self.nbytes = math.prod(shape) * itemsize(dtype)
        with device.current():
            self.address = int(device.call("cuMemAlloc", max(self.nbytes, 1)))
        self._free = weakref.finalize(self, _free, device, "cuMemFree", self.address)
        self._free.atexit = False  # the driver frees all of a process that ends


class PinnedArray:
    """Host memory that the device copies from and to without staging, as bytes: freed when the
    last view of them goes, whatever became of this object."""

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
    """`ordinal` counts the devices that the driver shows. Methods enqueue on the one stream, which
    goes with the last reference; those that need the context take that the caller made it current.

    MissingDependencyError without cuda-bindings, which `install` brings; DeviceError where there is
    no driver or no such device, and for every call that the driver refuses (CapacityError: out of
    memory; DeviceLostError: nothing runs in the context any more).
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
        except Exception as error:  # the bindings' own, where there is no libcuda
            let_pass(error)
            raise DeviceError(
                f"cuda:{self.ordinal}: expected an NVIDIA driver on this machine, got none "
                f"({str(error).splitlines()[0]})"
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """One function of the driver: its result, or one of REFUSALS with the driver's word."""
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status):
            word = getattr(status, "name", str(status))
            sentence = f"cuda:{self.ordinal}: {name}: expected CUDA_SUCCESS, got {word}"
            raise of_number(int(status), sentence)
        return results[0] if results else None

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The device's context is the calling thread's, then the one that was before."""
        self.call("cuCtxPushCurrent", self._context)
        try:
            yield
        finally:
            with contextlib.suppress(*REFUSALS):  # told of earlier work; the next call tells it too
                self.call("cuCtxPopCurrent")

    @property
    def arch(self) -> str:
        """ "sm_89" of an RTX 4090."""
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
        """Bytes that no process has taken."""
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
        """What `enqueue` enqueues, as a graph; nothing runs. Ends the capture on every way out."""
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
    with contextlib.suppress(*REFUSALS), device.current():  # no caller is left to be told
        device.call(name, handle)


def _destroy_stream(driver: ModuleType, context: object, stream: object) -> None:
    """The driver frees it once what is enqueued has run."""
    (refused, *_) = driver.cuCtxPushCurrent(context)
    if not int(refused):
        driver.cuStreamDestroy(stream)
        driver.cuCtxPopCurrent()


def _import(install: str) -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependencyError(
            f"cuda-bindings: needed to run this artifact, not installed; {install}"
        ) from error
    return driver
