"""Mends bfloat16 in Triton's interpreter, which keeps such tensors as their 16-bit patterns.

As of 3.9 it truncates where hardware rounds to nearest even, and multiplies the patterns
themselves in a dot. Tests of kernels would otherwise test that.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def mend() -> None:
    builder: Any = interpreter.InterpreterBuilder
    cast, dot = builder.cast_impl, builder.create_dot
    handle: Any = interpreter.TensorHandle

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        kinds = src.dtype.scalar, dst_type.scalar
        if kinds == (tl.float32, tl.bfloat16):
            data = src.data.astype(ml_dtypes.bfloat16).view(np.uint16)
            return handle(data, tl.bfloat16)
        if kinds[1] == tl.bfloat16 and kinds[0].is_int():
            return cast_impl(self, cast(self, src, tl.float32), dst_type)
        if kinds == (tl.bfloat16, tl.float32):
            return handle(src.data.view(ml_dtypes.bfloat16).astype(np.float32), tl.float32)
        return cast(self, src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [
            cast_impl(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)
        ]
        return dot(self, *wide, *rest)

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
