"""A CUDA driver on a machine that has none, strict where the real one is, and its launcher.

Device memory is host memory of its own, filled with poison. Work is queued and runs when the stream
is waited for, so what is read too early or overwritten too soon is wrong here too. Names are those
of `cuda.bindings.driver`.
"""

from __future__ import annotations

import ctypes
import enum
import sys
import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgraph.errors import DeviceError
from kvgraph.runtime import machine

POISON = 0xA5
Work = Callable[[], None]


def install(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, **modules: types.ModuleType
) -> None:
    """Make this a machine whose one GPU is an sm_86 of `driver`, and `modules` what is imported."""
    bindings = types.ModuleType("cuda.bindings")
    bindings.driver = driver  # type: ignore[attr-defined]
    modules |= {
        "cuda": types.ModuleType("cuda"),
        "cuda.bindings": bindings,
        "cuda.bindings.driver": driver,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(machine, "launcher", Launcher)


class Launcher:
    """Of a machine whose one GPU is an sm_86."""

    def device_count(self) -> int:
        return 1

    def compute_capability(self, ordinal: int = 0) -> tuple[int, int]:
        return (8, 6)

    def check_arch(self, arch: str, ordinal: int = 0) -> None:
        if arch != "sm_86":
            raise DeviceError(f"{arch}: not this GPU")


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_ILLEGAL_ADDRESS = 700
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900


class _Mode(enum.IntEnum):
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1


class _Attribute(enum.IntEnum):
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76


class FakeDriver(types.ModuleType):
    """`cuda.bindings.driver` over one device with one stream; `calls` counts by name."""

    CUstreamCaptureMode = _Mode
    CUdevice_attribute = _Attribute
    STREAM = 77

    def __init__(self, capability: tuple[int, int] = (8, 6), memory: int = 1 << 30) -> None:
        super().__init__("cuda.bindings.driver")
        self.capability, self.memory = capability, memory
        self.calls: Counter[str] = Counter()
        self.device: dict[int, Any] = {}
        self.pinned: dict[int, Any] = {}
        self.queue: list[Work] = []
        self.captured: list[Work] | None = None
        self.contexts: list[int] = []  # the calling thread's stack
        self.graphs: dict[int, list[Work]] = {}

    def enqueue(self, work: Work) -> None:
        (self.queue if self.captured is None else self.captured).append(work)

    def view(self, where: dict[int, Any], address: int, nbytes: int) -> np.ndarray[Any, Any]:
        """Bytes within one allocation; anything else is a stray pointer."""
        for start, memory in where.items():
            if start <= address and address + nbytes <= start + len(memory):
                return np.frombuffer(memory, np.uint8)[address - start :][:nbytes]
        raise AssertionError(f"{nbytes} bytes at {address:#x} are in no allocation")

    def _allocate(self, where: dict[int, Any], nbytes: int) -> tuple[CUresult, int]:
        assert self.contexts, "memory of whatever context is current"
        if self.captured is not None:
            return CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, 0
        if nbytes + sum(map(len, self.device.values())) > self.memory:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0
        raw = (ctypes.c_uint8 * nbytes)()
        ctypes.memset(raw, POISON, nbytes)
        where[ctypes.addressof(raw)] = raw
        return CUresult.CUDA_SUCCESS, ctypes.addressof(raw)

    def _count(self, name: str) -> None:
        self.calls[name] += 1

    # -- the driver's functions

    def cuInit(self, Flags: int) -> Any:
        return (CUresult.CUDA_SUCCESS,)

    def cuDeviceGetCount(self) -> Any:
        return CUresult.CUDA_SUCCESS, 1

    def cuDeviceGet(self, ordinal: int) -> Any:
        return CUresult.CUDA_SUCCESS, ordinal

    def cuDeviceGetName(self, length: int, dev: int) -> Any:
        return CUresult.CUDA_SUCCESS, b"Fake GPU\0\0"

    def cuDeviceGetAttribute(self, attrib: Any, dev: int) -> Any:
        return CUresult.CUDA_SUCCESS, self.capability[int(attrib) - 75]

    def cuDevicePrimaryCtxRetain(self, dev: int) -> Any:
        return CUresult.CUDA_SUCCESS, 5

    def cuCtxPushCurrent(self, ctx: int) -> Any:
        self.contexts.append(ctx)
        return (CUresult.CUDA_SUCCESS,)

    def cuCtxPopCurrent(self) -> Any:
        return CUresult.CUDA_SUCCESS, self.contexts.pop()

    def cuStreamCreate(self, Flags: int) -> Any:
        self._count("cuStreamCreate")
        return CUresult.CUDA_SUCCESS, self.STREAM

    def cuStreamDestroy(self, hStream: int) -> Any:
        self._count("cuStreamDestroy")
        self._run()
        return (CUresult.CUDA_SUCCESS,)

    def cuMemGetInfo(self) -> Any:
        free = self.memory - sum(map(len, self.device.values()))
        return CUresult.CUDA_SUCCESS, free, self.memory

    def cuMemAlloc(self, bytesize: int) -> Any:
        return self._allocate(self.device, bytesize)

    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> Any:
        return self._allocate(self.pinned, bytesize)

    def cuMemFree(self, dptr: int) -> Any:
        self._run()
        del self.device[dptr]
        return (CUresult.CUDA_SUCCESS,)

    def cuMemFreeHost(self, p: int) -> Any:
        self._run()
        del self.pinned[p]
        return (CUresult.CUDA_SUCCESS,)

    def cuMemsetD8Async(self, dstDevice: int, uc: int, N: int, hStream: int) -> Any:
        target = self.view(self.device, dstDevice, N)
        self.enqueue(lambda: target.fill(uc))
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyHtoDAsync(self, dstDevice: int, srcHost: int, ByteCount: int, hStream: int) -> Any:
        target = self.view(self.device, dstDevice, ByteCount)
        source = self.view(self.pinned, srcHost, ByteCount)
        self.enqueue(lambda: np.copyto(target, source))
        return (CUresult.CUDA_SUCCESS,)

    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: int, ByteCount: int, hStream: int) -> Any:
        target = self.view(self.pinned, dstHost, ByteCount)
        source = self.view(self.device, srcDevice, ByteCount)
        self.enqueue(lambda: np.copyto(target, source))
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamSynchronize(self, hStream: int) -> Any:
        self._count("cuStreamSynchronize")
        if self.captured is not None:
            return (CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,)
        self._run()
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamBeginCapture(self, hStream: int, mode: Any) -> Any:
        self.captured = []
        return (CUresult.CUDA_SUCCESS,)

    def cuStreamEndCapture(self, hStream: int) -> Any:
        self._count("cuStreamEndCapture")
        work, self.captured = self.captured, None
        handle = 1000 + self.calls["cuStreamEndCapture"]
        self.graphs[handle] = work or []
        return CUresult.CUDA_SUCCESS, handle

    def cuGraphInstantiate(self, hGraph: int, flags: int) -> Any:
        return CUresult.CUDA_SUCCESS, hGraph

    def cuGraphLaunch(self, hGraphExec: int, hStream: int) -> Any:
        self._count("cuGraphLaunch")
        for work in self.graphs[hGraphExec]:
            self.enqueue(work)
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphDestroy(self, hGraph: int) -> Any:
        self._count("cuGraphDestroy")
        return (CUresult.CUDA_SUCCESS,)

    def cuGraphExecDestroy(self, hGraphExec: int) -> Any:
        self._run()
        del self.graphs[hGraphExec]
        return (CUresult.CUDA_SUCCESS,)

    def _run(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()
