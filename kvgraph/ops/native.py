"""The native CPU kernels, called through their C ABI (`plugins/include/kvgraph/abi.h`).

`call` takes addresses, so that it works on any framework's memory without copies; `run` takes NumPy
arrays. Both release the GIL while a kernel works, and several threads may call them at once on
pages that do not overlap: each thread has its own argument buffers for each op.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np

from kvgraph.contract.devices import require_flags
from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.loading import next_step
from kvgraph.errors import KernelError
from kvgraph.ops.spec import Operand, OpSpec
from kvgraph.ops.specs import ABI_VERSION, ALL_SPECS, DTYPE_CODES
from kvgraph.signal_handlers import reraise_if_signalled

Draw = tuple[float, float, float, int, float, int]
"""Temperature, top-p, a random number in [0, 1), top-k, min-p, and the address of an Edits or 0."""

NativeOperand = tuple[int, str, tuple[int, ...]] | None
"""(address, dtype name, shape) of dense row-major memory; None if the operand is left out."""

INSTALL = "pip install --force-reinstall --no-deps . in a clone of kvgraph"
FOR_CPU = ("cpu", "onnxruntime")
"""Libraries that contain the CPU kernels."""
MAX_RANK = max(len(o.dims) for spec in ALL_SPECS for o in spec.inputs + spec.outputs)
MESSAGE_BYTES = 512

# kvg_tensor: an address, then dtype, rank and shape. kvg_call: all fields are written only once.
ADDRESS = struct.Struct("P")
TYPE_AND_SHAPE = struct.Struct(f"ii{MAX_RANK}q")
TENSOR_BYTES = ADDRESS.size + TYPE_AND_SHAPE.size
CALL = struct.Struct("IIPPIIPPPI4x")
DRAW = struct.Struct("dddqdP")
SCORED = struct.Struct("qii")
MOST_LOGPROBS = 20
LOGPROB = np.dtype([("token", np.int32), ("rank", np.int32), ("logprob", np.float64)])
MESSAGE = ctypes.c_char * MESSAGE_BYTES


def call(
    spec: OpSpec, operands: Sequence[NativeOperand], attributes: Mapping[str, float] = {}
) -> None:
    """Run `spec` on `operands`: its inputs, then its outputs, in order.

    An output that aliases an input may be None. Missing attributes have their defaults. Writes the
    outputs and the inputs that the op mutates. KernelError has the kernel's message; then nothing
    was written, unless memory ran out.
    """
    library().call(spec, operands, attributes)


def run(spec: OpSpec, *arrays: Array | None, **attributes: float) -> Any:
    """Run the native kernel with the arguments, effects and result of `spec.reference`."""
    given = [*arrays, *[None] * (len(spec.inputs) - len(arrays))]
    operands = [
        None if array is None else _described(spec, operand, array)
        for operand, array in zip(spec.inputs, given, strict=True)
    ]
    results = []
    for out in spec.outputs:
        if out.alias or out.is_left_out(attributes):
            operands.append(None)
            continue
        extents = spec.extents(out, [given and given[2] for given in operands], attributes)
        shape = [extent or 0 for extent in extents]  # for 0 the kernel raises the error
        dtype = spec.type_of(out, [given and given[1] for given in operands], str)
        assert dtype is not None
        results.append(np.empty(shape, DTYPES[dtype].numpy))
        operands.append(_described(spec, out, results[-1]))
    call(spec, operands, attributes)
    return () if not results else results[0] if len(results) == 1 else tuple(results)


def library_path(name: str) -> Path:
    """Path of the shared library `libkvgraph_{name}`, such as "cpu" (used here) or "onnxruntime".

    An editable install has several folders in the package's path; the library is in one of them.
    DeviceError if this processor cannot run it; KernelError if it is missing.
    """
    if name in FOR_CPU:
        require_flags(f"libkvgraph_{name}")
    suffix = ".dylib" if sys.platform == "darwin" else ".so"
    file = f"libkvgraph_{name}{suffix}"
    package = find_spec("kvgraph")
    for folder in (package and package.submodule_search_locations) or ():
        path = Path(folder, "_native", file)
        if path.exists():
            return path
    raise KernelError(
        f"{file}: expected in _native of the kvgraph package, found in none of its folders; "
        f"build it: {INSTALL}"
    )


def opened(
    path: Path, abi_version: int = ABI_VERSION, entry: str = "kvg_abi_version"
) -> ctypes.CDLL:
    """Open a library of this package, whose function `entry` returns its ABI version.

    KernelError if it cannot be opened, or has another version.
    """
    try:
        dll = ctypes.CDLL(str(path))
        version = getattr(dll, entry)
    except (OSError, AttributeError) as error:
        reraise_if_signalled(error)
        why = str(error).removeprefix(f"{path}: ")
        raise KernelError(
            f"{path}: expected a library of this kvgraph package, got one that cannot be opened "
            f"({why}); {next_step(why, f'install it again: {INSTALL}')}"
        ) from error
    version.restype = ctypes.c_uint32
    if (found := int(version())) != abi_version:
        raise KernelError(
            f"{path}: expected ABI version {abi_version} of this kvgraph package, "
            f"got {found}; install both from one build: {INSTALL}"
        )
    return dll


def set_num_threads(count: int) -> None:
    """Set the number of threads for kernels, the caller's included; 0: one per processor (default).

    Results do not depend on it, bit for bit. Waits for a running kernel.
    """
    if count < 0:
        raise KernelError(f"num_threads: expected at least 0, got {count}")
    library().dll.kvg_cpu_set_num_threads(count)


class Edits(ctypes.Structure):
    """kvg_edits of abi.h: changes to a row of logits before sampling. Addresses must stay valid."""

    _fields_: ClassVar = [
        *[(name, ctypes.c_void_p) for name in ("mask", "banned", "biased", "bias", "tokens")],
        *[(name, ctypes.c_int64) for name in ("num_words", "num_banned", "num_biased")],
        *[(name, ctypes.c_int64) for name in ("num_tokens", "num_prompt")],
        *[(name, ctypes.c_double) for name in ("repetition", "presence", "frequency")],
    ]


def isa() -> str:
    """The instruction set of the kernels in this process (kvg_cpu_isa of abi.h).

    KernelError if KVGRAPH_CPU_ISA names one that this processor does not support.
    """
    return library().isa()


def sample(logits_RV: Array, draws: Sequence[Draw]) -> tuple[list[int], list[int]]:
    """Draw a token for each row of dense float32 logits `[rows, vocab]`, rows in parallel.

    Returns the tokens, -1 for a row without a logit above -infinity, and for each row the number
    of tokens that had to be sorted. KernelError names the row and field out of range (abi.h).
    """
    return library().sample(logits_RV, draws)


def logprobs(
    logits_RV: Array, asked: Sequence[tuple[int, int, int]]
) -> list[list[tuple[int, int, float]]]:
    """(token, rank, log-probability) entries for each asked (row, token, most).

    Each result has MOST_LOGPROBS + 1 entries: the token, the row's `most` likeliest tokens, and
    fillers (abi.h). KernelError names the value that is out of range.
    """
    return library().logprobs(logits_RV, asked)


def round_groups(weights_GK: Array, steps_GT: Array) -> tuple[Array, Array]:
    """Round groups of weights to nibbles (kvg_cpu_round_groups of abi.h).

    Returns int8 nibbles `[groups, inputs]` in [-8, 7], and uint8 `[groups]`: the index in
    `steps_GT` of each group's step with the least squared error. KernelError unless the arguments
    are dense float32 and inputs are an even number from 2 to 256.
    """
    return library().round_groups(weights_GK, steps_GT)


def num_threads() -> int:
    """Number of threads that kernels may use."""
    return int(library().dll.kvg_cpu_num_threads())


@cache
def library() -> Library:
    """The library of CPU kernels; loaded on first use, once per process."""
    return Library(library_path("cpu"))


class Library:
    """A loaded kernel library. KernelError as of `opened`."""

    def __init__(self, path: Path, abi_version: int = ABI_VERSION) -> None:
        self.dll = opened(path, abi_version)
        self.dll.kvg_cpu_num_threads.restype = ctypes.c_uint32
        self.dll.kvg_cpu_set_num_threads.argtypes = [ctypes.c_uint32]
        self.dll.kvg_cpu_set_num_threads.restype = None
        self._frames = threading.local()
        pointer, count, size = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t
        logits, message = (pointer, size, count), (pointer, size)
        self.dll.kvg_cpu_sample.argtypes = [pointer, pointer, size, count, pointer, *message]
        self.dll.kvg_cpu_logprobs.argtypes = [*logits, pointer, size, pointer, *message]
        groups = (pointer, pointer, size, count, count)
        self.dll.kvg_cpu_round_groups.argtypes = [*groups, pointer, pointer, *message]

    def isa(self) -> str:
        """See the module's `isa`."""
        self.dll.kvg_cpu_isa.restype = ctypes.c_char_p
        found: bytes = self.dll.kvg_cpu_isa()
        if not found:
            raise KernelError(
                "KVGRAPH_CPU_ISA: expected amx, avx512_bf16, avx512 or avx2, as far as this "
                f"processor has it, got {os.environ.get('KVGRAPH_CPU_ISA')}"
            )
        return found.decode()

    def sample(self, logits_RV: Array, draws: Sequence[Draw]) -> tuple[list[int], list[int]]:
        """See the module's `sample`."""
        _require_dense("sample", "logits [rows, vocab]", logits_RV)
        rows, vocab = logits_RV.shape
        if len(draws) != rows:
            raise KernelError(f"sample: expected draws of {rows} rows, got {len(draws)}")
        packed = b"".join([DRAW.pack(*draw) for draw in draws])
        drawn, message = (ctypes.c_int32 * (2 * rows))(), MESSAGE()
        given = (logits_RV.ctypes.data, packed, rows, vocab, drawn)
        if self.dll.kvg_cpu_sample(*given, message, MESSAGE_BYTES):
            raise KernelError(message.value.decode(errors="replace"))
        found = list(drawn)
        return found[::2], found[1::2]

    def logprobs(
        self, logits_RV: Array, asked: Sequence[tuple[int, int, int]]
    ) -> list[list[tuple[int, int, float]]]:
        """See the module's `logprobs`."""
        _require_dense("logprobs", "logits [rows, vocab]", logits_RV)
        packed = b"".join([SCORED.pack(*each) for each in asked])
        found, message = np.empty((len(asked), MOST_LOGPROBS + 1), LOGPROB), MESSAGE()
        given = (logits_RV.ctypes.data, *logits_RV.shape, packed, len(asked), found.ctypes.data)
        if self.dll.kvg_cpu_logprobs(*given, message, MESSAGE_BYTES):
            raise KernelError(message.value.decode(errors="replace"))
        return cast(list[list[tuple[int, int, float]]], found.tolist())

    def round_groups(self, weights_GK: Array, steps_GT: Array) -> tuple[Array, Array]:
        """See the module's `round_groups`."""
        _require_dense("round_groups", "weights [groups, inputs]", weights_GK)
        _require_dense("round_groups", "steps [groups, tries]", steps_GT)
        groups, width = weights_GK.shape
        if len(steps_GT) != groups:
            raise KernelError(
                f"round_groups: expected steps of {groups} groups, got {len(steps_GT)}"
            )
        nibbles, chosen = np.empty(weights_GK.shape, np.int8), np.empty(groups, np.uint8)
        sizes, message = (groups, width, steps_GT.shape[1]), MESSAGE()
        given = (weights_GK.ctypes.data, steps_GT.ctypes.data, *sizes)
        found = (nibbles.ctypes.data, chosen.ctypes.data, message, MESSAGE_BYTES)
        if self.dll.kvg_cpu_round_groups(*given, *found):
            raise KernelError(message.value.decode(errors="replace"))
        return nibbles, chosen

    def call(
        self, spec: OpSpec, operands: Sequence[NativeOperand], attributes: Mapping[str, float]
    ) -> None:
        """See the module's `call`."""
        frames: dict[str, _Frame] = self._frames.__dict__
        frame = frames.get(spec.name)
        if frame is None:
            frame = frames[spec.name] = _Frame(self.dll, spec)
        frame.call(operands, attributes)


class _Frame:
    """Argument memory of one thread for one op.

    It remembers the operands' dtypes and shapes, so that a call with those of the previous call
    writes only addresses.
    """

    def __init__(self, dll: ctypes.CDLL, spec: OpSpec) -> None:
        self.spec = spec
        self.operands = spec.inputs + spec.outputs
        self.described: list[tuple[str, tuple[int, ...]] | None] = [None] * len(self.operands)
        self.tensors = ctypes.create_string_buffer(TENSOR_BYTES * len(self.operands))
        kinds = "".join({"int": "q", "float": "d"}[a.kind] for a in spec.attributes)
        self.packing = struct.Struct(kinds)
        self.values = ctypes.create_string_buffer(self.packing.size)
        self.names = frozenset(a.name for a in spec.attributes)
        self.defaults = [(a.name, a.default) for a in spec.attributes]
        self.message = MESSAGE()
        self.frame = ctypes.create_string_buffer(
            CALL.pack(
                ABI_VERSION,
                CALL.size,
                ctypes.addressof(self.tensors),
                ctypes.addressof(self.values),
                len(self.operands),
                len(spec.attributes),
                0,
                0,
                0,
                0,
            ),
            CALL.size,
        )
        self.entry = getattr(dll, f"kvg_cpu_{spec.name}")
        self.entry.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self.entry.restype = ctypes.c_int32
        self.arguments = (
            ctypes.c_void_p(ctypes.addressof(self.frame)),
            ctypes.c_void_p(ctypes.addressof(self.message)),
            ctypes.c_size_t(MESSAGE_BYTES),
        )

    def call(self, operands: Sequence[NativeOperand], attributes: Mapping[str, float]) -> None:
        if len(operands) != len(self.operands):
            raise KernelError(
                f"{self.spec.name}: expected {len(self.operands)} operands, got {len(operands)}"
            )
        described, tensors, write = self.described, self.tensors, ADDRESS.pack_into
        for i, operand in enumerate(operands):
            kind = operand[1:] if operand is not None else None
            if kind != described[i]:
                self._describe(i, kind)
            if operand is not None:
                write(tensors, i * TENSOR_BYTES, operand[0])
        self._fill(attributes)
        if self.entry(*self.arguments):
            raise KernelError(self.message.value.decode(errors="replace"))

    def _describe(self, index: int, kind: tuple[str, tuple[int, ...]] | None) -> None:
        code = 0
        shape: tuple[int, ...] = ()
        if kind is not None:
            dtype, shape = kind
            if dtype not in DTYPE_CODES:
                operand = self.operands[index]
                raise KernelError(
                    f"{self.spec.name}: {operand.name}: expected dtype "
                    f"{' or '.join(operand.dtypes)}, got {dtype}"
                )
            code = DTYPE_CODES[dtype]
        extents = [*shape[:MAX_RANK], *[0] * (MAX_RANK - len(shape))]
        at = index * TENSOR_BYTES + ADDRESS.size
        self.described[index] = ("", ())  # matches no operand until it is written
        TYPE_AND_SHAPE.pack_into(self.tensors, at, code, len(shape), *extents)
        self.described[index] = kind

    def _fill(self, attributes: Mapping[str, float]) -> None:
        values = [attributes.get(name, default) for name, default in self.defaults]
        if None in values or not attributes.keys() <= self.names:
            required = [name for name, default in self.defaults if default is None]
            raise KernelError(
                f"{self.spec.name}: expected attributes {', '.join(required)} and none but "
                f"{', '.join(sorted(self.names))}, got {', '.join(sorted(attributes)) or 'none'}"
            )
        self.packing.pack_into(self.values, 0, *values)


def _described(spec: OpSpec, operand: Operand, array: Array) -> NativeOperand:
    """Describe an array; KernelError if a kernel cannot use its memory: writes to a copy would be
    lost."""
    if not array.flags.c_contiguous:
        raise KernelError(
            f"{spec.name}: {operand.name}: expected dense row-major memory, got strides"
        )
    if operand.name in spec.mutated and not array.flags.writeable:
        raise KernelError(f"{spec.name}: {operand.name}: expected writable memory, got read-only")
    return array.ctypes.data, str(array.dtype), array.shape


def _require_dense(call: str, what: str, array: Array) -> None:
    dense = array.dtype == np.float32 and array.flags.c_contiguous
    if not dense or array.ndim != 2:
        raise KernelError(
            f"{call}: expected dense float32 {what}, got {array.dtype} "
            f"{array.shape} with strides {array.strides}"
        )
