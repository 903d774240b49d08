"""Zeros, subnormal numbers, NaNs and places beyond a width: what the PTX ISA says of them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgraph.errors import KernelError
from tests.ptx.programs import Array, elementwise, kernel, run

KINDS = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
}
REGISTER = {2: "%h", 4: "%r", 8: "%d"}


def unary(opcode: str, given: Array, out: np.dtype) -> Array:
    """`opcode` of each element of `given`, whose register has its size, as has that of `out`."""
    wide_in, wide_out = given.itemsize, out.itemsize
    x, d = f"{REGISTER[wide_in]}4", f"{REGISTER[wide_out]}5"
    found = np.zeros(32, out)
    text = elementwise(
        opcode.format(d=d, x=x),
        f"ld.global.b{8 * wide_in} {x}, [%d1];",
        f"st.global.b{8 * wide_out} [%d2], {d};",
        wide_in,
        wide_out,
    )
    run(text, np.resize(given, 32), found)
    return found


def binary(opcode: str, kind: str, pairs: Array) -> Array:
    """`opcode.kind` of both columns of `pairs`, repeated: 32 values, of a packed kind 64."""
    dtype, count = KINDS[kind.removesuffix("x2")], 1 + kind.endswith("x2")
    width = dtype.itemsize * count
    x, y, d = (f"{REGISTER[width]}{i}" for i in (4, 5, 6))
    given = np.resize(pairs.astype(dtype), (32, count, 2)).swapaxes(1, 2)
    found = np.zeros(32 * count, dtype)
    text = elementwise(
        f"{opcode}.{kind} {d}, {x}, {y};",
        f"ld.global.v2.b{8 * width} {{{x}, {y}}}, [%d1];",
        f"st.global.b{8 * width} [%d2], {d};",
        2 * width,
        width,
    )
    run(text, np.ascontiguousarray(given), found)
    return found


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64", "f16x2", "bf16x2"])
def test_the_least_and_the_largest(kind: str) -> None:
    """A number of a number and a NaN, and -0 is less than +0, in both orders."""
    numbers = [[np.nan, 1], [1, np.nan], [0.0, -0.0], [-0.0, 0.0], [2, -3]]
    pairs = np.array([*numbers, [np.nan, np.nan]])
    for name, want in (("min", [1, 1, -0.0, -0.0, -3]), ("max", [1, 1, 0.0, 0.0, 2])):
        found = binary(name, kind, pairs)
        assert found[:5].tolist() == want
        assert np.signbit(found[:5]).tolist() == np.signbit(want).tolist()
        assert found[5:6].tobytes().strip(b"\xff") == b"\x7f"


@pytest.mark.parametrize("name", ["min", "max"])
def test_the_least_and_the_largest_of_a_warp(name: str) -> None:
    values = np.array([0.0, -0.0, np.nan, -0.0], np.float32)
    found = unary(f"redux.sync.{name}.f32 {{d}}, {{x}}, -1;", values, KINDS["f32"])
    assert (found == 0).all()
    assert (np.signbit(found) == (name == "min")).all()
    nans = np.full(32, 0xFFC00001, np.uint32).view(np.float32)
    found = unary(f"redux.sync.{name}.f32 {{d}}, {{x}}, -1;", nans, KINDS["f32"])
    assert (found.view(np.uint32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize("kind", ["f16", "f32", "f16x2", "f32x2"])
def test_subnormal_operands_and_results_are_flushed(kind: str) -> None:
    tiny = float(ml_dtypes.finfo(KINDS[kind.removesuffix("x2")]).smallest_normal)
    pairs = np.array([[tiny / 4, tiny], [-tiny / 4, -0.0], [1.5 * tiny, -tiny], [np.inf, 1]])
    assert binary("add.rn", kind, pairs)[:4].tolist() == [1.25 * tiny, -tiny / 4, tiny / 2, np.inf]
    found = binary("add.rn.ftz", kind, pairs)[:4]
    assert found.tolist() == [tiny, 0, 0, np.inf]
    assert np.signbit(found).tolist() == [False, True, False, False]


def test_pairs_of_integers_have_no_modifiers() -> None:
    pairs = np.zeros((32, 2), np.int32)
    text = elementwise("add.ftz.s16x2 %r3, %r1, %r1;", "", "", 8, 4)
    with pytest.raises(KernelError, match=r"expected an instruction that is modelled, got 'add\.f"):
        run(text, pairs, pairs)


@pytest.mark.parametrize("beyond", [-1, 0, 8, 100])
@pytest.mark.parametrize("bits", [32, 64])
def test_bit_fields_beyond_the_width(bits: int, beyond: int) -> None:
    """Of a signed number they are its sign, unless they have no length."""
    values = np.array([-5, 5, -1 << bits - 1], f"i{bits // 8}")
    signs, at = np.resize(values < 0, 32), bits + beyond
    for type_, count, want in (("s", 4, -1), ("s", 0, 0), ("u", 4, int(at < bits))):
        code = f"bfe.{type_}{bits} {{d}}, {{x}}, {at}, {count};"
        assert (unary(code, values, values.dtype) == np.where(signs, want, 0)).all()


@pytest.mark.parametrize(
    ("conversion", "given", "out", "want"),
    [
        ("s32.f32", "f32", np.int32, 0),
        ("u32.f32", "f32", np.uint32, 0),
        ("s16.f16", "f16", np.int16, 0),
        ("s64.f32", "f32", np.int64, -1 << 63),
        ("u64.f32", "f32", np.uint64, 1 << 63),
        ("s64.f16", "f16", np.int64, -1 << 63),
        ("s32.f64", "f64", np.int32, -1 << 31),
        ("u32.f64", "f64", np.uint32, 1 << 31),
        ("u64.f64", "f64", np.uint64, 1 << 63),
    ],
)
def test_what_is_no_number_becomes_an_integer(
    conversion: str, given: str, out: type, want: int
) -> None:
    values = np.array([np.nan, 3.5, -np.inf, np.inf]).astype(KINDS[given])
    found = unary(f"cvt.rzi.{conversion} {{d}}, {{x}};", values, np.dtype(out))
    limits = np.iinfo(out)
    assert found[:4].tolist() == [want, 3, limits.min, limits.max]


@pytest.mark.parametrize(
    ("code", "sentence"),
    [
        ("ld.param.b64 %zz9, [p0];", "expected a register instead of '%zz9', got 'ld.param.b64"),
        ("ld.global.b32 %zz9, [%d1];", "expected a register instead of '%zz9'"),
        ("cvt.u32.u16 %zz9, %h1;", "expected a register instead of '%zz9'"),
        ("@%zz9 mov.b32 %r1, 0;", "expected a register instead of '%zz9'"),
        ("@%r2 mov.b32 %r1, 0;", "expected %r2 to hold pred"),
        ("selp.b32 %r1, %r2, %r3, %r4;", "expected %r4 to hold pred"),
        (".reg .b128 %q<4>;", "%q0: expected a register of a type that is modelled, got 'b128'"),
        (".reg .b32 %q<99999999999>;", "expected fewer than 1000000 registers, got 99999999999"),
        ("mov.b32 %r1, %tid;", "expected a special register that is modelled instead of %tid"),
        ("mov.b32 %r1, %tid.w;", "expected a special register that is modelled instead of %tid.w"),
        ("setp;", "expected an instruction that is modelled, got 'setp'"),
        ("bar.warp.sync;", "expected an instruction that is modelled, got 'bar.warp.sync'"),
        ("mul.wide.pred %p1, %p2, %p3;", "expected "),
        ("mov.b32 {}, %r1;", "expected an instruction that is modelled, got 'mov.b32 {}, %r1'"),
        ("shl.f32 %r1, %r2, %r3;", "expected "),
    ],
)
def test_code_that_is_not_whole_is_refused(code: str, sentence: str) -> None:
    with pytest.raises(KernelError) as raised:
        run(kernel(f"{code}\nret;"), np.zeros(32, np.int32), np.zeros(32, np.int32))
    assert sentence in str(raised.value)


def test_operands_of_another_kind_are_a_fault() -> None:
    code = "mov.b32 %r1, 5;\nshr.f32 %r2, %r1, %r1;\nret;"
    with pytest.raises(KernelError, match=r"^k, line \d+"):
        run(kernel(code), np.zeros(32, np.int32), np.zeros(32, np.int32))
