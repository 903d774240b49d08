"""A host of ONNX Runtime's custom ops for tests: what onnxruntime_host.cpp calls, from Python.

Imported by processes that find the host's library at $HOST and, where they need one, a fake driver.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvgraph.kernels import launch
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.ops import SPECS
from tests.plugins.tensorrt_fields import SHARED_BYTES, entry_of, fields_of, shape_of

TYPES = {
    "float32": 1,
    "int8": 3,
    "int32": 6,
    "float16": 10,
    "bfloat16": 16,
    "float8_e4m3fn": 17,
}
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SCRATCH, STREAM = 0x7000000, 0x77
UPDATE = ["q", "kv_blocks", "input_row_offsets", "cache_lengths", "lookup_table", "max_lengths",
          "k", "v"]  # fmt: skip
SHAPE = shape_of()

Tensor = tuple[str, Sequence[int]]

dll = ctypes.CDLL(os.environ["HOST"])
for _name in ("o_said", "o_log", "o_ops"):
    getattr(dll, _name).restype = ctypes.c_char_p
for _name in ("o_register", "o_compute"):
    getattr(dll, _name).restype = ctypes.c_bool
dll.o_create.restype = ctypes.c_void_p


def said() -> str:
    """The sentence of the last call, "" where it was content."""
    return str(dll.o_said().decode())


def log() -> list[str]:
    """What the host was asked for: outputs, scratch memory, allocators."""
    return str(dll.o_log().decode()).splitlines()


def register(newest: int = 24, version: str = "1.28.0") -> str:
    dll.o_register(ctypes.c_uint32(newest), version.encode())
    return said()


def ops() -> list[list[str]]:
    return [line.split("|") for line in dll.o_ops().decode().splitlines()]


def spec_of(op: str) -> Any:
    return next(spec for spec in SPECS if spec.name == op)


def attributes(
    shape: AttentionShape = SHAPE, archs: Sequence[str] = ("sm_86",), **changed: Any
) -> dict[str, Any]:
    """Of a node of layer 3; None leaves one out. `kernels` and `images` are tensors of bytes."""
    kernels, images = fields_of(shape, archs)
    made = {
        "layer": 3, "scale": shape.scale, "window": shape.window, "kernels": kernels,
        "images": images, "rope_style": int(bool(shape.rope and shape.rope.interleaved)),
        "norm_epsilon": shape.norm and shape.norm.epsilon,
        "norm_offset": shape.norm and shape.norm.offset,
    }  # fmt: skip
    return {name: value for name, value in {**made, **changed}.items() if value is not None}


def operands(
    batch: int = 2,
    tokens: int = 2,
    width: int = 10,
    *,
    given: Sequence[str] = UPDATE,
    dtype: str = "bfloat16",
    pool: str = "bfloat16",
    **changed: Tensor,
) -> dict[str, Tensor]:
    every: dict[str, Tensor] = {
        "q": (dtype, (tokens, 8, 64)), "kv_blocks": (pool, (900, 2, 4, 16, 2, 64)),
        "k": (dtype, (tokens, 2, 64)), "v": (dtype, (tokens, 2, 64)),
        "input_row_offsets": ("int32", (batch + 1,)), "cache_lengths": ("int32", (batch,)),
        "lookup_table": ("int32", (batch, width)), "max_lengths": ("int32", (1, 2)),
        "kv_scales": ("float32", (900, 2, 4, 16, 2, 1)), "sinks": ("float32", (8,)),
        "cos_sin": ("float32", (16 * width, 64)), "q_norm": (dtype, (64,)),
        "k_norm": (dtype, (64,)),
    }  # fmt: skip
    return {name: changed.get(name, every[name]) for name in given}


class Kernel:
    """A kernel of a node; false where it was refused."""

    def __init__(
        self,
        op: str = "update_and_attend",
        given: Mapping[str, Any] | None = None,
        provider: str = CUDA,
    ) -> None:
        if not ops():
            assert register() == ""
        self.spec = spec_of(op)
        line = next(i for i, (_, name, on, *_) in enumerate(ops()) if (name, on) == (op, provider))
        values = attributes() if given is None else dict(given)
        names = (ctypes.c_char_p * len(values))(*(name.encode() for name in values))
        texts = [v if isinstance(v, bytes) else None for v in values.values()]
        numbers = [0.0 if isinstance(v, bytes) else float(v) for v in values.values()]
        self.handle = dll.o_create(
            line, len(values), names, (ctypes.c_double * len(values))(*numbers),
            (ctypes.c_char_p * len(values))(*texts),
            (ctypes.c_int64 * len(values))(*(len(t or b"") for t in texts)),
        )  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self.handle)

    def destroy(self) -> None:
        dll.o_destroy(ctypes.c_void_p(self.handle))

    def compute(
        self,
        tensors: Mapping[str, Tensor],
        lengths: tuple[int, int] = (1, 100),
        *,
        at: Mapping[str, int] | None = None,
        stream: int = STREAM,
        **outputs: int | None,
    ) -> str:
        """The refusal, or "". Input i of the op is at 0x100000 * (i + 1) and `out` at 0xA00000, or
        all are where `at` says; a pool's output is at its input's address, unless `outputs` says
        another (None: not taken)."""
        host = np.asarray([lengths], np.int32)
        if at is None:
            at = {o.name: 0x100000 * (i + 1) for i, o in enumerate(self.spec.inputs)}
            at["out"] = 0xA00000
        rows = np.zeros((len(self.spec.inputs), 9), np.int64)
        types, data = [], []
        for row, operand in zip(rows, self.spec.inputs, strict=True):
            dtype, shape = tensors.get(operand.name, ("", ()))
            row[: len(shape) + 1] = [len(shape), *shape]
            types.append(TYPES.get(dtype, 0))
            hosted = operand.name == "max_lengths"
            data.append(host.ctypes.data if hosted else at.get(operand.name))
        made, out_types = [], []
        for output in self.spec.outputs:
            source = output.alias or "q"
            given = source in tensors
            address = at[output.alias or "out"] if given else None
            made.append(outputs.get(output.name, address))
            out_types.append(TYPES[tensors[source][0]] if given else 0)
        dll.o_compute(
            ctypes.c_void_p(self.handle), len(types), ctypes.c_void_p(rows.ctypes.data),
            (ctypes.c_int32 * len(types))(*types), (ctypes.c_void_p * len(data))(*data), len(made),
            (ctypes.c_int32 * len(made))(*out_types), (ctypes.c_void_p * len(made))(*made),
            ctypes.c_void_p(stream),
        )  # fmt: skip
        return said()


def driver_calls() -> list[str]:
    function = ctypes.CDLL("libcuda.so.1").fake_log
    function.restype = ctypes.c_char_p
    return str(function().decode()).splitlines()


def launched() -> list[str]:
    return [call for call in driver_calls() if call.startswith("cuLaunch")]


def planned(
    sizes: Sizes, shape: AttentionShape = SHAPE, arch: str = "sm_86", *, stores: bool = True
) -> list[str]:
    """What the driver gets where the CUDA session runs the step (sessions/launches.py), which plans
    for the device's own multiprocessors."""
    plan = launch.plan_update_and_attend(shape, arch, sizes, 3, stores=stores, multiprocessors=132)
    inputs = spec_of("update_and_attend").inputs
    at = {o.name: 0x100000 * (i + 1) for i, o in enumerate(inputs)} | {"out": 0xA00000}
    free = SCRATCH
    for name, elements in plan.scratch.items():
        at[name] = free
        free += -(-elements * 4 // 256) * 256
    made = []
    for step in plan.launches:
        values = [f"p{at[a]:x}" if isinstance(a, str) else f"i{a}" for a in step.arguments]
        made.append(
            f"cuLaunchKernel {entry_of(step.variant)} in 0x1000 grid {step.grid[0]},{step.grid[1]}"
            f",1 block {32 * step.variant.num_warps},1,1 shared {SHARED_BYTES} stream "
            f"{STREAM:x}: {' '.join(values)} s0 s0 extra0"
        )
    return made
