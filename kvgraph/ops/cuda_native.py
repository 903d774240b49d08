"""The CUDA launcher, called through its C ABI (`plugins/include/kvgraph/launch.h`).

It loads cubins and launches kernels, on addresses and streams of any framework, without a CUDA
toolkit. The driver is looked for by the first method that needs it. The GIL is released while the
driver works, and several threads may call everything here at once.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvgraph.errors import DeviceError, KernelError
from kvgraph.ops.native import MESSAGE_BYTES, library_path, opened

LAUNCH_ABI_VERSION = 3
"""Version of the C ABI in launch.h."""

# Structs of launch.h. An argument is a kind, the alignment of a pointer, and 8 bytes of value.
DEVICE = struct.Struct("IIiiiii")
IMAGE = struct.Struct("IIPQPPii")
LAUNCH = struct.Struct("IIQPPI3I3IIIP")
ARGUMENTS_AT, GRID, STREAM, FIRST_VALUE = 4, slice(6, 9), 14, 17
"""Places in a Kernel's values that a launch fills in; argument i is at FIRST_VALUE + 3i."""

KINDS = {"*": (1, "Q"), "i32": (2, "i4x"), "i64": (3, "q"), "fp32": (4, "f4x")}
"""(number, struct layout) by Triton's name of a parameter's type; "*" is any pointer."""

REFUSED = 1


class DeviceProperties(NamedTuple):
    """Properties of a device that launches need. `shared_bytes`: most shared memory of a block."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_bytes: int


class Module(NamedTuple):
    """A loaded cubin: one per image and context, until the process ends."""

    handle: int
    arch: str


@dataclass(frozen=True, slots=True, eq=False)
class Kernel:
    """A function of a module, with the values that all its launches share, as in launch.h."""

    name: str
    parameters: tuple[str, ...]
    values: list[int]
    packing: struct.Struct
    memory: type[ctypes.Array[ctypes.c_char]]
    """Type of the memory of one launch and its error message; each launch allocates its own."""
    name_bytes: ctypes.Array[ctypes.c_char]


def plugins_path() -> Path:
    """Path of the library of TensorRT plugins. KernelError if it is missing, damaged or of another
    build."""
    path = library_path("tensorrt")
    opened(path, LAUNCH_ABI_VERSION, "kvg_cuda_abi_version")
    return path


@cache
def launcher() -> Launcher:
    """The launcher of this process. KernelError if the library is missing."""
    return Launcher()


class Launcher:
    """The launcher's library. It raises DeviceError if this machine cannot run the code (no driver,
    an old driver, another architecture, a driver error), otherwise KernelError."""

    def __init__(self, path: Path | None = None, abi_version: int = LAUNCH_ABI_VERSION) -> None:
        self.dll = opened(path or library_path("cuda"), abi_version, "kvg_cuda_abi_version")
        self._launch = self.dll.kvg_cuda_launch
        self._launch.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def device_count(self) -> int:
        """Number of devices; 0 if there is a driver but no device."""
        count = ctypes.c_int32()
        self.call("device_count", ctypes.byref(count))
        return count.value

    def device(self, ordinal: int = 0) -> DeviceProperties:
        frame = ctypes.create_string_buffer(
            DEVICE.pack(LAUNCH_ABI_VERSION, DEVICE.size, ordinal, 0, 0, 0, 0), DEVICE.size
        )
        self.call("describe", frame)
        major, minor, multiprocessors, shared = DEVICE.unpack(frame.raw)[3:]
        return DeviceProperties((major, minor), multiprocessors, shared)

    def compute_capability(self, ordinal: int = 0) -> tuple[int, int]:
        """Compute capability of a device, such as (9, 0) for an H100."""
        return self.device(ordinal).capability

    def check_arch(self, arch: str, ordinal: int = 0) -> None:
        """Raise DeviceError if code for `arch` ("sm_90", or "sm_90a" for 9.0 only) cannot run."""
        self.call("check_arch", arch.encode(), ctypes.c_int32(ordinal))

    def load(
        self,
        image: bytes,
        arch: str,
        *,
        device: int = 0,
        sha256: str | None = None,
        min_driver: tuple[int, int] = (0, 0),
    ) -> Module:
        """Load a cubin compiled for `arch` into the thread's context, or the device's primary one.

        `sha256`: hash that the image must have, in hexadecimal. `min_driver`: CUDA version of the
        ptxas that made the image, if `arch` does not need a newer one. The same image is loaded
        only once.
        """
        digest = ctypes.create_string_buffer(_digest(sha256), 32) if sha256 else None
        name = ctypes.create_string_buffer(arch.encode())
        frame = IMAGE.pack(
            LAUNCH_ABI_VERSION,
            IMAGE.size,
            _address(image),
            len(image),
            ctypes.addressof(name),
            ctypes.addressof(digest) if digest else 0,
            device,
            1000 * min_driver[0] + 10 * min_driver[1],
        )
        handle = ctypes.c_uint64()
        self.call("load", frame, ctypes.byref(handle))
        return Module(handle.value, arch)

    def kernel(
        self,
        module: Module,
        name: str,
        parameters: Sequence[str],
        *,
        num_warps: int,
        shared_bytes: int = 0,
    ) -> Kernel:
        """Find a function and allow its shared memory, so that a launch needs no other call.

        `parameters`: Triton's types ("*bf16", "i32", "i64", "fp32"), without the two trailing
        scratch pointers; "*bf16:16" is an address that must be a multiple of 16.
        """
        kinds = [_kind(name, index, type_) for index, type_ in enumerate(parameters)]
        packing = struct.Struct(LAUNCH.format + "".join(f"II{layout}" for _, _, layout in kinds))
        memory = ctypes.c_char * (packing.size + MESSAGE_BYTES)
        name_bytes = ctypes.create_string_buffer(name.encode())
        values = [LAUNCH_ABI_VERSION, LAUNCH.size, module.handle, ctypes.addressof(name_bytes), 0]
        values += [len(kinds), 1, 1, 1, 0, 0, 0, num_warps, shared_bytes, 0]
        for number, alignment, _ in kinds:
            values += [number, alignment, 0]
        kernel = Kernel(name, tuple(parameters), values, packing, memory, name_bytes)
        self.call(
            "prepare", ctypes.c_uint64(module.handle), name.encode(), ctypes.c_uint32(shared_bytes)
        )
        return kernel

    def launch(
        self,
        kernel: Kernel,
        grid: Sequence[int],
        arguments: Sequence[float],
        stream: int = 0,
    ) -> None:
        """Enqueue a launch on `stream` (a CUstream's address). `grid`: blocks, in 1 to 3 dims.

        Pointers are passed as addresses. An error while the kernel runs is raised by a later call.
        """
        if len(arguments) != len(kernel.parameters):
            raise KernelError(
                f"{kernel.name}: expected {len(kernel.parameters)} arguments, got {len(arguments)}"
            )
        if not 1 <= len(grid) <= 3:
            raise KernelError(f"{kernel.name}: grid: expected 1 to 3 dims, got {tuple(grid)}")
        values: list[float] = kernel.values.copy()  # type: ignore[assignment]
        values[GRID] = (*grid, 1, 1)[:3]
        values[STREAM] = stream
        values[FIRST_VALUE::3] = arguments
        size = kernel.packing.size
        memory = kernel.memory()
        address = ctypes.addressof(memory)
        values[ARGUMENTS_AT] = address + LAUNCH.size
        try:
            kernel.packing.pack_into(memory, 0, *values)
        except struct.error as error:
            raise _misfit(kernel, grid, arguments, error) from None
        status = self._launch(address, address + size, MESSAGE_BYTES)
        if status:
            raise _refusal(status, memory.raw[size:])

    def call(self, name: str, *arguments: object) -> None:
        """Call the library's `kvg_cuda_<name>`, which takes memory for a message last."""
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        entry = getattr(self.dll, f"kvg_cuda_{name}")
        status = entry(*arguments, message, ctypes.c_size_t(MESSAGE_BYTES))
        if status:
            raise _refusal(status, message.raw)


def _refusal(status: int, message: bytes) -> KernelError | DeviceError:
    sentence = message.partition(b"\0")[0].decode(errors="replace")
    return KernelError(sentence) if status == REFUSED else DeviceError(sentence)


def _kind(kernel: str, index: int, type_: str) -> tuple[int, int, str]:
    """(number, alignment, layout) of a parameter's type."""
    base, _, alignment = type_.partition(":")
    kind = KINDS.get("*" if base.startswith("*") else base)
    if kind is None or (alignment and not alignment.isdecimal()):
        raise KernelError(
            f"{kernel}: parameter {index}: expected *TYPE, *TYPE:ALIGNMENT, i32, i64 or fp32, "
            f"got {type_!r}"
        )
    return kind[0], int(alignment or 0), kind[1]


def _misfit(
    kernel: Kernel, grid: Sequence[int], arguments: Sequence[float], error: struct.error
) -> KernelError:
    """The KernelError that names the argument with a value outside its type."""
    for index, (type_, value) in enumerate(zip(kernel.parameters, arguments, strict=True)):
        try:
            struct.pack(_kind(kernel.name, index, type_)[2], value)
        except struct.error:
            return KernelError(f"{kernel.name}: argument {index}: expected {type_}, got {value!r}")
    return KernelError(f"{kernel.name}: grid {tuple(grid)}, num_warps or stream: {error}")


def _digest(text: str) -> bytes:
    try:
        digest = bytes.fromhex(text)
    except ValueError:
        digest = b""
    if len(digest) != 32:
        raise KernelError(f"sha256: expected 64 hexadecimal digits, got {text!r}")
    return digest


def _address(data: bytes) -> int:
    """Address of the bytes, which the caller must keep alive."""
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
