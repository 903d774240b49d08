"""Mends Triton's interpreter, as of 3.9.

It keeps bfloat16 tensors as their 16-bit patterns, truncates where hardware rounds to nearest even,
and multiplies the patterns themselves in a dot: tests of kernels would otherwise test that. It
patches Triton's language for each function that a kernel calls, though a launch has done it; and
computes whether integers overflow, for an assertion that it makes in debug mode only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@cache
def _languages(function: Callable[..., Any]) -> list[Any]:
    """Modules of Triton's language that a function reads."""
    seen = function.__globals__.values()
    return [module for module in (tl, tl.core) if any(each is module for each in seen)]


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

    def call_inside(self: Any, *args: Any, **named: Any) -> Any:
        if any(tl.core.is_builtin(language.full) for language in _languages(self.fn)):
            interpreter._patch_lang(self.fn)
        try:
            return self.rewrite()(*args, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    builder.cast_impl, builder.create_dot = cast_impl, create_dot
    function: Any = interpreter.InterpretedFunction
    function.__call__ = call_inside
    running: Any = interpreter.interpreter_builder
    running.options = replace(running.options, sanitize_overflow=running.options.debug)
