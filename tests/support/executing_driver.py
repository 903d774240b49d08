"""Makes the fake driver of this process execute what it is asked to launch, as PTX on the CPU.

A cubin stands for the PTX that it was assembled from: the driver knows it by its SHA-256. Device
memory is host memory, and a kernel reaches only what was bound for its launch.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from kvgraph import ptx
from kvgraph.errors import KVGraphError

Tensors = Mapping[str, torch.Tensor]

INVALID_VALUE, INVALID_IMAGE, NOT_FOUND, LAUNCH_FAILED = 1, 200, 500, 719
FREE_SHARED_BYTES = 48 << 10
"""Dynamic shared memory that a launch gets without `cuFuncSetAttribute`."""

_INT3 = ctypes.POINTER(ctypes.c_uint * 3)
_SIGNATURES = {
    "load": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p),
    "find": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p),
    "allow": ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
    "launch": ctypes.CFUNCTYPE(
        ctypes.c_int, ctypes.c_void_p, _INT3, _INT3, ctypes.c_uint, ctypes.c_void_p
    ),
}  # fmt: skip


class _Entries(ctypes.Structure):
    """`struct executor` of fake_driver.c."""

    _fields_ = list(_SIGNATURES.items())


class Executor:
    """`folder` holds the PTX of every cubin, by the cubin's SHA-256.

    `launched` counts launches by a kernel's name, `executed` instructions by their family.
    """

    def __init__(self, folder: Path) -> None:
        self.launched: Counter[str] = Counter()
        self.executed: Counter[str] = Counter()
        self._folder = folder
        self._buffers: Callable[[], Tensors] = dict
        self._modules: dict[int, ptx.Module] = {}
        self._functions: dict[int, ptx.Kernel] = {}
        self._allowed: dict[int, int] = {}
        self._error: Exception | None = None
        methods = {name: self._guarded(getattr(self, f"_{name}")) for name in _SIGNATURES}
        self._entries = _Entries(**{n: kind(methods[n]) for n, kind in _SIGNATURES.items()})
        ctypes.CDLL("libcuda.so.1").fake_executor(ctypes.byref(self._entries))

    def run(self, call: Callable[[], Any], buffers: Callable[[], Tensors]) -> Any:
        """What `call` returns. Each of its launches reaches what `buffers` then returns, alone.

        The machine's own error is raised in place of the driver's number.
        """
        self._error, self._buffers = None, buffers
        try:
            result = call()
        except KVGraphError:
            if self._error is None:
                raise
        if self._error is not None:
            raise self._error
        return result

    def _guarded(self, method: Callable[..., int]) -> Callable[..., int]:
        """C cannot raise: an exception is kept for `run`, and the driver's call fails."""

        def call(*arguments: Any) -> int:
            try:
                return method(*arguments)
            except Exception as error:
                self._error = error
                return LAUNCH_FAILED

        return call

    # ---- what the driver calls

    def _load(self, module: int, image: int) -> int:
        digest = hashlib.sha256(ctypes.string_at(image, _image_bytes(image))).hexdigest()
        path = self._folder / f"{digest}.ptx"
        if not path.is_file():
            return INVALID_IMAGE
        self._modules[module] = ptx.parse(path.read_text())
        return 0

    def _find(self, function: int, module: int, name: bytes) -> int:
        kernel = self._modules[module].kernels.get(name.decode())
        if kernel is None:
            return NOT_FOUND
        self._functions[function] = kernel
        return 0

    def _allow(self, function: int, shared: int) -> int:
        self._allowed[function] = shared
        return 0

    def _launch(self, function: int, grid: Any, block: Any, shared: int, arguments: int) -> int:
        """Reads the arguments by the kernel's own parameters, as a driver does."""
        kernel = self._functions[function]
        x, y, z = grid.contents
        threads = block.contents[0] * block.contents[1] * block.contents[2]
        if shared > self._allowed.get(function, FREE_SHARED_BYTES):
            return INVALID_VALUE
        at = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        values = [
            int.from_bytes(ctypes.string_at(at[i], parameter.size), "little")
            for i, parameter in enumerate(kernel.parameters)
        ]
        counters = ptx.run(
            kernel, _memory(self._buffers()), grid=(x, y, z), threads=threads, arguments=values,
            shared=shared,
        )  # fmt: skip
        self.launched[kernel.name] += 1
        self.executed.update(counters.instructions)
        return 0


def _memory(buffers: Tensors) -> ptx.Memory:
    """Buffers of kernels at the addresses that tensors have."""
    memory = ptx.Memory()
    distinct = {tensor.data_ptr(): (name, tensor) for name, tensor in buffers.items()}
    for address, (name, tensor) in distinct.items():
        memory.map(address, tensor.detach().view(torch.uint8).numpy(), name)
    return memory


def _image_bytes(image: int) -> int:
    """Of an ELF file in memory: its headers of sections and of segments are at its end."""
    header = struct.unpack("<16xHHIQQQIHHHHHH", ctypes.string_at(image, 64))
    _, _, _, _, segments, sections, _, _, segment_bytes, num_segments, section_bytes, num, _ = (
        header
    )
    return int(max(segments + segment_bytes * num_segments, sections + section_bytes * num))
