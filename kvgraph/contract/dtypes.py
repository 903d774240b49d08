"""Element types: one record per type, with its name in each framework and file format.

Code that imports a framework looks the framework's object up: `getattr(torch, name)`, or the number
`onnx` in `onnx.TensorProto.DataType`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type; a field is empty if the type has no such name.

    `name`: name in torch, NumPy or ml_dtypes, manifests and ops. `itemsize`: bytes. `onnx`: number
    in `onnx.TensorProto.DataType`. `code`: number in `kvg_dtype` of the C ABI, or 0; codes never
    change. `short`: name as a precision of weights. `triton`: element type of a kernel's pointer.
    `tensorrt`: name in `DataType`. `largest`: largest magnitude in a quantised pool; 0 for other
    types.
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
        """The NumPy dtype, or the dtype that ml_dtypes adds to NumPy."""
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, self.name, self.name))

    @property
    def plain(self) -> np.dtype[Any]:
        """NumPy's own dtype for the same bytes: an integer for types that only ml_dtypes has."""
        return self.numpy if self.numpy.isbuiltin == 1 else np.dtype(f"int{8 * self.itemsize}")


# fmt: off
ALL = (
    #     name            kind  bytes onnx safetensors code short   triton  tensorrt  largest
    DType("float32",       "float", 4, 1,  "F32",     1, "fp32", "fp32", "FLOAT"),
    DType("float16",       "float", 2, 10, "F16",     2, "fp16", "fp16", "HALF"),
    DType("bfloat16",      "float", 2, 16, "BF16",    3, "bf16", "bf16", "BF16"),
    DType("int8",          "int",   1, 3,  "I8",      4, "int8", "i8",   "INT8",  127.0),
    # Kernels read "u8" and decode the bytes: older architectures have no such type.
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
FLOATS = frozenset(d.safetensors for d in ALL if d.kind == "float" and not d.largest)
"""safetensors' names of float dtypes that need no scale."""
POOLS = (*ACTIVATIONS, *QUANTIZED)

AS_STORED = 0
WEIGHT_BITS = {"bf16": 16, "int8": 8, "int4": 4, "stored": AS_STORED}
"""Bits per element of packed weights, by the name in options and manifests; AS_STORED: each layer
keeps the form that it has in the checkpoint."""
PACKED = {32: "float32", 16: "bfloat16", 8: "int8", 4: "int8"}
"""The dtype that holds packed weights, by bits per element; one int8 holds two of 4 bits."""
PACKED_FLOAT8 = "float8_e4m3fn"
"""The dtype that holds packed weights in FP8."""
WEIGHTS = ("fp32", *WEIGHT_BITS)
"""Precisions of the weights of linear layers on a CPU."""
SMALL_WEIGHTS = ("int8", "int4")
"""Precisions to which the weights of any checkpoint can be rounded, on a CPU and on a GPU."""
GPU_WEIGHTS = (*SMALL_WEIGHTS, "stored")
"""Precisions of the weights of linear layers on a GPU, besides the activations' dtype."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of the type named `dtype`."""
    return DTYPES[dtype].itemsize
