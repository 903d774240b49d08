"""Arithmetic whose operands have two types, or two values each."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.programs import elementwise, run

RNG = np.random.default_rng(7)


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize(("name", "function"), [("add", np.add), ("sub", np.subtract)])
def test_a_half_and_a_float(kind: str, name: str, function: np.ufunc) -> None:
    """sm_100's instructions widen their first operand."""
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    values = RNG.standard_normal((32, 2)).astype(np.float32)
    out = np.zeros(32, np.float32)
    text = elementwise(
        f"cvt.rn.{kind}.f32 %h1, %r1;\n{name}.rn.f32.{kind} %r3, %h1, %r2;",
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        "st.global.b32 [%d2], %r3;",
        8,
        4,
    )
    run(text, values, out)
    assert (out == function(values[:, 0].astype(dtype).astype(np.float32), values[:, 1])).all()


@pytest.mark.parametrize(("name", "function"), [("add", np.add), ("max", np.maximum)])
def test_two_integers_in_a_register(name: str, function: np.ufunc) -> None:
    """Nothing is carried from one to the other."""
    values = RNG.integers(-(1 << 15), 1 << 15, (32, 2, 2)).astype(np.int16)
    out = np.zeros((32, 2), np.int16)
    text = elementwise(
        f"{name}.s16x2 %r3, %r1, %r2;",
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        "st.global.b32 [%d2], %r3;",
        8,
        4,
    )
    run(text, values, out)
    assert (out == function(values[:, 0], values[:, 1])).all()
