"""A host of TensorRT's plugins for tests: what tensorrt_host.cpp calls, from Python.

Imported by processes that find the host's library at $HOST and, where they need one, a fake driver.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvgraph.kernels.shapes import AttentionShape
from kvgraph.ops import SPECS
from tests.plugins.tensorrt_fields import fields_of, shape_of

TYPES = {
    "float32": 0,
    "float16": 1,
    "int8": 2,
    "int32": 3,
    "float8_e4m3fn": 6,
    "bfloat16": 7,
    "int64": 8,
}
FIELD_TYPES = {"float32": 1, "float64": 2, "int32": 5, "char": 6, "unknown": 8, "int64": 10}
BUILD, RUNTIME = 0, 1

UPDATE = ["q", "kv_blocks", "input_row_offsets", "cache_lengths", "lookup_table", "max_lengths",
          "k", "v"]  # fmt: skip
SHAPE = shape_of()

Shape = Sequence[int]
Tensor = tuple[str, Shape]
dll = ctypes.CDLL(os.environ["HOST"])
for _name in ("h_create", "h_reload", "h_clone", "h_attach"):
    getattr(dll, _name).restype = ctypes.c_void_p
dll.h_log.restype = ctypes.c_char_p
dll.h_workspace.restype = ctypes.c_size_t
dll.h_format.restype = ctypes.c_bool


def said() -> str:
    """What was refused last."""
    text = ctypes.create_string_buffer(512)
    dll.kvg_tensorrt_message(text, ctypes.c_size_t(512))
    return text.value.decode()


def logged(present: bool = True) -> str:
    return str(dll.h_log(present).decode())


def creators() -> list[list[str]]:
    text = ctypes.create_string_buffer(1 << 14)
    dll.h_creators(text, ctypes.c_size_t(1 << 14))
    return [line.split("|") for line in text.value.decode().splitlines()]


def _rows(shapes: Sequence[Shape]) -> Any:
    rows = np.zeros((max(len(shapes), 1), 9), np.int64)
    for row, shape in zip(rows, shapes, strict=False):
        row[: len(shape) + 1] = [len(shape), *shape]
    return rows


def _ints(values: Sequence[int]) -> Any:
    return np.asarray(values, np.int32)


def _at(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def field(value: Any) -> tuple[str, bytes, int]:
    """(type, bytes, length) as a parser makes it; a tuple is taken as it is."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, int):
        return "int32", np.int32(value).tobytes(), 1
    if isinstance(value, float):
        return "float32", np.float32(value).tobytes(), 1
    if isinstance(value, str):
        return "char", value.encode() + b"\0", len(value.encode()) + 1
    return "unknown", value, len(value)


class Plugin:
    def __init__(self, op: str, handle: int | None) -> None:
        self.op, self.handle = op, handle

    def __bool__(self) -> bool:
        return bool(self.handle)

    @classmethod
    def of(cls, op: str, fields: Mapping[str, Any], phase: int = BUILD) -> Plugin:
        made = {name: field(value) for name, value in fields.items() if value is not None}
        names = (ctypes.c_char_p * len(made))(*(name.encode() for name in made))
        buffers = [ctypes.create_string_buffer(data, len(data) + 1) for _, data, _ in made.values()]
        data = (ctypes.c_void_p * len(made))(*(ctypes.addressof(b) for b in buffers))
        types = _ints([FIELD_TYPES[kind] for kind, _, _ in made.values()])
        lengths = _ints([length for _, _, length in made.values()])
        handle = dll.h_create(op.encode(), phase, len(made), names, _at(types), _at(lengths), data)
        return cls(op, handle)

    def call(self, function: str, *arguments: Any) -> Any:
        return getattr(dll, function)(ctypes.c_void_p(self.handle), *arguments)

    def text(self, function: str) -> str:
        buffer = ctypes.create_string_buffer(1 << 14)
        self.call(function, buffer, ctypes.c_size_t(1 << 14))
        return buffer.value.decode()

    def clone(self) -> Plugin:
        return Plugin(self.op, self.call("h_clone"))

    def attach(self) -> Plugin:
        return Plugin(self.op, self.call("h_attach"))

    def reload(self) -> Plugin:
        return Plugin(self.op, self.call("h_reload", self.op.encode()))

    def delete(self) -> None:
        self.call("h_delete")

    def num_outputs(self) -> int:
        return int(self.call("h_num_outputs"))

    def aliased(self) -> list[int]:
        return [int(self.call("h_aliased", i)) for i in range(-1, self.num_outputs() + 1)][1:-1]

    def types(self, given: Sequence[str]) -> list[str] | str:
        out = _ints([-1] * self.num_outputs())
        codes = _ints([TYPES[name] for name in given])
        if self.call("h_types", _at(out), len(out), _at(codes), len(codes)):
            return said()
        return [next(n for n, c in TYPES.items() if c == code) for code in out]

    def shapes(self, given: Sequence[Shape]) -> list[list[Any]] | str:
        """Outputs' dims: numbers, or "input.axis" for the dynamic dim of an input."""
        out, rows = _rows([()] * self.num_outputs()), _rows(given)
        if self.call("h_shapes", _at(rows), len(given), _at(out), len(out)):
            return said()
        return [[_dim(int(d)) for d in row[1 : 1 + row[0]]] for row in out]

    def formats(self, position: int, num_in: int) -> list[tuple[str, int]]:
        """(dtype, format) that it takes at a position."""
        return [
            (name, layout)
            for name, code in TYPES.items()
            for layout in range(13)
            if self.call("h_format", position, code, layout, num_in, self.num_outputs())
        ]

    def workspace(self, operands: Mapping[str, tuple[str, Shape]]) -> int:
        rows, codes = self._described(operands)
        return int(self.call("h_workspace", _at(rows), _at(codes), len(codes), self.num_outputs()))

    def configure(self, operands: Mapping[str, tuple[str, Shape]]) -> str:
        rows, codes = self._described(operands)
        status = self.call("h_configure", _at(rows), _at(codes), len(codes), self.num_outputs())
        return said() if status else ""

    def enqueue(
        self,
        operands: Mapping[str, tuple[str, Shape]],
        addresses: Mapping[str, int],
        workspace: int = 0,
        stream: int = 0,
    ) -> str:
        """The refusal, or "". `addresses` of the operands, then of the outputs."""
        rows, codes = self._described(operands)
        given = [addresses[name] for name in operands]
        out = [address for name, address in addresses.items() if name not in operands]
        status = self.call(
            "h_enqueue", _at(rows), _at(codes), len(codes),
            (ctypes.c_void_p * len(given))(*given), len(out), (ctypes.c_void_p * len(out))(*out),
            ctypes.c_void_p(workspace), ctypes.c_void_p(stream),
        )  # fmt: skip
        return said() if status else ""

    def _described(self, operands: Mapping[str, tuple[str, Shape]]) -> tuple[Any, Any]:
        rows = _rows([shape for _, shape in operands.values()])
        return rows, _ints([TYPES[dtype] for dtype, _ in operands.values()])


def _dim(code: int) -> Any:
    return code if code >= 0 else f"{(-2 - code) // 8}.{(-2 - code) % 8}"


def mask(op: str, names: Sequence[str]) -> int:
    spec = next(spec for spec in SPECS if spec.name == op)
    return sum(1 << i for i, operand in enumerate(spec.inputs) if operand.name in names)


# ---- nodes and operands of tests ----------------------------------------------------------------


def fields(
    shape: AttentionShape = SHAPE,
    archs: Sequence[str] = ("sm_86",),
    given: Sequence[str] = UPDATE,
    op: str = "update_and_attend",
    **changed: Any,
) -> dict[str, Any]:
    """Of a node of layer 3; None leaves one out."""
    kernels, images = fields_of(shape, archs)
    made = {"layer": 3, "kernels": kernels, "images": images, "inputs": mask(op, given)}
    if op != "store_kv":
        made |= {"scale": shape.scale, "window": shape.window}
    return {**made, **changed}


def plugin(op: str = "update_and_attend", **options: Any) -> Plugin:
    return Plugin.of(op, fields(op=op, **options))


def refused(op: str = "update_and_attend", **options: Any) -> str:
    assert not plugin(op, **options)
    return said()


def operands(
    batch: int = -1,
    tokens: int = -1,
    pages: int = -1,
    width: int = -1,
    steps: int = 1,
    given: Sequence[str] = UPDATE,
    dtype: str = "bfloat16",
    pool: str = "bfloat16",
) -> dict[str, Tensor]:
    every: dict[str, Tensor] = {
        "q": (dtype, (tokens, 8, 64)), "kv_blocks": (pool, (pages, 2, 4, 16, 2, 64)),
        "k": (dtype, (tokens, 2, 64)), "v": (dtype, (tokens, 2, 64)),
        "input_row_offsets": ("int32", (batch + (batch > 0),)),
        "cache_lengths": ("int32", (batch,)), "lookup_table": ("int32", (batch, width)),
        "max_lengths": ("int32", (steps, 2)),
        "kv_scales": ("float32", (pages, 2, 4, 16, 2, 1)), "sinks": ("float32", (8,)),
        "cos_sin": ("float32", (4096, 64)), "q_norm": (dtype, (64,)), "k_norm": (dtype, (64,)),
    }  # fmt: skip
    return {name: every[name] for name in given}


def changed(given: Mapping[str, Tensor], name: str, shape: Shape) -> list[Shape]:
    return [shape if n == name else s for n, (_, s) in given.items()]


def addresses(
    given: Mapping[str, Tensor], outputs: Sequence[str] = ("out", "kv_blocks")
) -> dict[str, int]:
    made = {name: 0x100000 * (i + 1) for i, name in enumerate(given)}
    made["to:out"] = 0xA00000
    if "kv_blocks" in outputs:
        made["to:kv_blocks"] = made["kv_blocks"]
    if "kv_scales" in given:
        made["to:kv_scales"] = made["kv_scales"]
    return made


def driver_calls() -> list[str]:
    function = ctypes.CDLL("libcuda.so.1").fake_log
    function.restype = ctypes.c_char_p
    return str(function().decode()).splitlines()


def kernels_launched() -> list[str]:
    return [call for call in driver_calls() if call.startswith("cuLaunch")]
