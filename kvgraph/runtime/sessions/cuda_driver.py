"""One CUDA device through NVIDIA's own bindings of the driver API: memory, a stream, graphs.

Decision: `cuda-bindings` instead of torch, whose wheel is 300 times larger, and instead of more
entry points in our launcher: every call here is one documented function of the driver.
The device's primary context is used, which TensorRT and torch share.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dtypes import itemsize
from kvgraph.errors import CapacityError, DeviceError, MissingDependencyError

OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"

ENDS_THE_CONTEXT = (214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721)
"""Errors after which every call in the context fails (CUDA driver API, CUresult)."""

START_AGAIN = "; nothing runs on this device in this process any more: start it again"
INSTALL = "pip install 'kvgraph[tensorrt]'"


class DeviceArray:
    """Memory on a device: freed when the last reference goes.

    Opaque to a cache manager; `address` is what a kernel gets. Row-major, `shape` in elements.
    """

    def __init__(self, device: CudaDevice, dtype: str, shape: tuple[int, ...]) -> None:
        self.device, self.dtype, self.shape = device, dtype, shape
        self.nbytes = math.prod(shape) * itemsize(dtype)
        self.address = int(device.call("cuMemAlloc", max(self.nbytes, 1)))
        self._free = weakref.finalize(self, _free, device, "cuMemFree", self.address)
        self._free.atexit = False  # the driver frees all of a process that ends


class PinnedArray:
    """Host memory that the device copies from and to without staging, as bytes."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self.address = int(device.call("cuMemHostAlloc", max(nbytes, 1), 0))
        self._free = weakref.finalize(self, _free, device, "cuMemFreeHost", self.address)
        self._free.atexit = False
        memory = (ctypes.c_uint8 * nbytes).from_address(self.address)
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
    """`ordinal` counts the devices that the driver shows. Methods enqueue on the one stream.

    MissingDependencyError without cuda-bindings, which `install` brings; DeviceError where there is
    no driver or no such device, and for every call that the driver refuses (CapacityError: out of
    memory).
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
        self.activate()
        self.stream = self.call("cuStreamCreate", 1)  # CU_STREAM_NON_BLOCKING

    def _initialize(self) -> None:
        try:
            self.call("cuInit", 0)
        except DeviceError:
            raise
        except Exception as error:  # the bindings' own, where there is no libcuda
            raise DeviceError(
                f"cuda:{self.ordinal}: expected an NVIDIA driver on this machine, got none "
                f"({str(error).splitlines()[0]})"
            ) from error

    def call(self, name: str, *arguments: Any) -> Any:
        """One function of the driver: its result, or DeviceError with the driver's word
        (CapacityError: out of memory)."""
        status, *results = getattr(self._driver, name)(*arguments)
        if int(status):
            word = getattr(status, "name", str(status))
            kind = CapacityError if word == OUT_OF_MEMORY else DeviceError
            then = START_AGAIN if int(status) in ENDS_THE_CONTEXT else ""
            raise kind(f"cuda:{self.ordinal}: {name}: expected CUDA_SUCCESS, got {word}{then}")
        return results[0] if results else None

    def activate(self) -> None:
        """Make the device's context the calling thread's."""
        self.call("cuCtxSetCurrent", self._context)

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
        self.activate()
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
        try:
            self.call("cuStreamBeginCapture", self.stream, mode)
            enqueue()
            graph = self.call("cuStreamEndCapture", self.stream)
        except BaseException:
            with contextlib.suppress(DeviceError):
                self.call("cuStreamEndCapture", self.stream)
            raise
        try:
            return Graph(self, self.call("cuGraphInstantiate", graph, 0))
        finally:
            self.call("cuGraphDestroy", graph)


def _free(device: CudaDevice, name: str, handle: Any) -> None:
    with contextlib.suppress(DeviceError):  # no caller is left to be told
        device.activate()
        device.call(name, handle)


def _import(install: str) -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise MissingDependencyError(
            f"cuda-bindings: needed to run this artifact, not installed; {install}"
        ) from error
    return driver
