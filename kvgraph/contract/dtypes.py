"""Element types: one record of each, with every name that it has elsewhere.

A framework's own object is looked up where the framework is: `getattr(torch, name)`, or the number
`onnx` of `onnx.TensorProto.DataType`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type. An empty field: the type has no such name.

    `name`: in torch, in NumPy or ml_dtypes, in manifests and ops. `itemsize` in bytes. `onnx`: in
    `onnx.TensorProto.DataType`. `code`: in `kvg_dtype` of the C ABI, or 0; codes never change.
    `short`: as a precision of weights. `triton`: what a kernel's pointer points to. `tensorrt`: in
    `DataType`. `largest`: the largest magnitude in a quantised pool; 0 for other types.
    """

    name: str
    kind: Literal["float", "int", "bool"]
    itemsize: int
    onnx: int
    safetensors: str
    code: int = 0
    short: str = ""
    triton: str = ""
    tensorrt: str = ""
    largest: float = 0.0

    @property
    def numpy(self) -> np.dtype[Any]:
        """NumPy's type, or the one that ml_dtypes adds to it."""
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.name, self.name))

    @property
    def plain(self) -> np.dtype[Any]:
        """NumPy's own type of the same bytes: an integer for what only ml_dtypes has."""
        return self.numpy if self.numpy.isbuiltin == 1 else np.dtype(f"int{8 * self.itemsize}")


# fmt: off
ALL = (
    #     name            kind  bytes onnx safetensors code short   triton  tensorrt  largest
    DType("float32",       "float", 4, 1,  "F32",     1, "fp32", "fp32", "FLOAT"),
    DType("float16",       "float", 2, 10, "F16",     2, "fp16", "fp16", "HALF"),
    DType("bfloat16",      "float", 2, 16, "BF16",    3, "bf16", "bf16", "BF16"),
    DType("int8",          "int",   1, 3,  "I8",      4, "int8", "i8",   "INT8",  127.0),
    # Kernels decode its bytes, "u8": older architectures have no such type.
    DType("float8_e4m3fn", "float", 1, 17, "F8_E4M3", 5, "",     "u8",   "FP8",   448.0),
    DType("int32",         "int",   4, 6,  "I32",     6, "",     "i32",  "INT32"),
    DType("int64",         "int",   8, 7,  "I64"),
    DType("int16",         "int",   2, 5,  "I16"),
    DType("uint8",         "int",   1, 2,  "U8"),
    DType("bool",          "bool",  1, 9,  "BOOL"),
    DType("float64",       "float", 8, 11, "F64"),
)
# fmt: on
DTYPES: Mapping[str, DType] = {dtype.name: dtype for dtype in ALL}

QUANTIZED = tuple(dtype.name for dtype in ALL if dtype.largest)
"""Types of pools whose elements have a scale."""
ACTIVATIONS = tuple(d.name for d in ALL if d.kind == "float" and d.code and not d.largest)
POOLS = (*ACTIVATIONS, *QUANTIZED)

AS_STORED = 0
WEIGHT_BITS = {"bf16": 16, "int8": 8, "int4": 4, "stored": AS_STORED}
"""Bits of an element of packed weights, by their name in options and manifests; AS_STORED: each
layer in the form in which the checkpoint has it."""
PACKED = {32: "float32", 16: "bfloat16", 8: "int8", 4: "int8"}
"""Bits of an element of packed weights -> the dtype that holds it; two of 4 bits are an int8."""
PACKED_FLOAT8 = "float8_e4m3fn"
"""The dtype that holds packed weights in FP8."""
WEIGHTS = ("fp32", *WEIGHT_BITS)
"""What linear layers on a CPU may keep."""
SMALL_WEIGHTS = ("int8", "int4")
"""What those of any checkpoint may be rounded to, on a CPU and on a GPU."""
GPU_WEIGHTS = (*SMALL_WEIGHTS, "stored")
"""What they may keep on a GPU, besides the activations' dtype."""


def itemsize(dtype: str) -> int:
    """Bytes of one element."""
    return DTYPES[dtype].itemsize
