"""The attributes `kernels` and `images` of a graph's node, which are fields of TensorRT's plugins.

`kernels` is one flat record (`plugins/include/kvgraph/launch.h`). It has the constants that an
attention's kernels were compiled for, and for each architecture the tiling, and the launch data and
hash of each kernel. `images` holds cubins by SHA-256. A graph has equal cubins once, in the first
node that needs them.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Iterable, Mapping, Sequence

from kvgraph.errors import KernelError
from kvgraph.kernels import launch
from kvgraph.kernels.aot import Compiled
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import ALIGNMENT, Parameter
from kvgraph.ops import UPDATE_AND_ATTEND, launch_native
from kvgraph.ops.launch_names import ROLES, SCRATCH, VALUES
from kvgraph.ops.launch_native import ArchRecord, KernelParameter, KernelRecord, KernelsHeader
from kvgraph.ops.specs import ABI_VERSION

KERNEL_ROLES = {"store_kv": "store", "merge_parts": "merge"}
"""Role in a plan, by kernel; the variants of paged_attention have their own roles."""

IMAGE_HEADER = struct.Struct("<32sQ")

OPERANDS = tuple(o.name for o in UPDATE_AND_ATTEND.inputs + UPDATE_AND_ATTEND.outputs)


def pack_kernels(shape: AttentionShape, compiled: Mapping[str, Sequence[Compiled]]) -> bytes:
    """Make the record for every op of `shape`, from its kernels by architecture.

    KernelError for kernels that no host can launch.
    """
    header = KernelsHeader(
        version=launch_native.KERNELS_VERSION,
        contract_version=ABI_VERSION,
        arch_size=ctypes.sizeof(ArchRecord),
        num_archs=len(compiled),
        constants=launch.constants(shape),
    )
    record = bytes(header) + b"".join(_arch(shape, *entry) for entry in compiled.items())
    launch_native.check_kernels(record, UPDATE_AND_ATTEND.name, stores=True)
    return record


def image_digests(record: bytes) -> list[str]:
    """SHA-256 of every image in a record, each once, in the record's order."""
    kernels = (kernel for arch in archs_of(record) for kernel in arch.kernels if kernel.function)
    return list(dict.fromkeys(bytes(kernel.sha256).hex() for kernel in kernels))


def new_images(record: bytes, carried: set[str]) -> list[str]:
    """SHA-256 of every image in a record that is not in `carried`, to which they are added."""
    new = [digest for digest in image_digests(record) if digest not in carried]
    carried.update(new)
    return new


def images_of(kernels: Iterable[Compiled]) -> dict[str, bytes]:
    """The cubins of `kernels` by SHA-256."""
    return {hashlib.sha256(kernel.cubin).hexdigest(): kernel.cubin for kernel in kernels}


def pack_images(images: Iterable[bytes]) -> bytes:
    """Make the attribute `images`: SHA-256, size (u64, little-endian) and bytes of each image."""
    return b"".join(
        IMAGE_HEADER.pack(hashlib.sha256(image).digest(), len(image)) + image for image in images
    )


def archs_of(record: bytes) -> list[ArchRecord]:
    """Copies of a record's architectures."""
    at, size = ctypes.sizeof(KernelsHeader), ctypes.sizeof(ArchRecord)
    return [ArchRecord.from_buffer_copy(record, i) for i in range(at, len(record), size)]


def _arch(shape: AttentionShape, arch: str, compiled: Sequence[Compiled]) -> bytes:
    record = ArchRecord(arch=arch.encode(), tiling=launch.tiling(shape, arch))
    for kernel in compiled:
        variant = kernel.variant
        role = variant.role or KERNEL_ROLES[variant.kernel.name]
        record.kernels[ROLES.index(role)] = _kernel(kernel)
    return bytes(record)


def _kernel(kernel: Compiled) -> KernelRecord:
    variant = kernel.variant
    record = KernelRecord(
        function=kernel.entry.encode(),
        num_warps=variant.num_warps,
        shared_bytes=kernel.resources.shared,
        num_parameters=len(variant.parameters),
    )
    record.sha256[:] = hashlib.sha256(kernel.cubin).digest()
    for index, parameter in enumerate(variant.parameters):
        record.parameters[index] = _parameter(kernel.entry, parameter)
    return record


def _parameter(function: str, parameter: Parameter) -> KernelParameter:
    name, alignment = parameter.name, ALIGNMENT if parameter.aligned else 1
    if name in VALUES:
        return KernelParameter(launch_native.VALUE, VALUES.index(name), 0)
    if name in SCRATCH:
        return KernelParameter(launch_native.SCRATCH_MEMORY, SCRATCH.index(name), alignment)
    if name in OPERANDS:
        return KernelParameter(launch_native.OPERAND, OPERANDS.index(name), alignment)
    raise KernelError(
        f"{function}: {name}: expected a parameter that plans know, one of "
        f"{[*OPERANDS, *SCRATCH, *VALUES]}"
    )
