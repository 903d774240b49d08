"""Arithmetic, logic, conversions and moves against NumPy, exactly."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.ptx.programs import Array, addresses, elementwise, kernel, run

RNG = np.random.default_rng(7)
INTS = np.concatenate([RNG.integers(-(2**31), 2**31, 28), [0, -1, 2**31 - 1, -(2**31)]]).astype(
    np.int32
)
PAIRS = np.stack([INTS, INTS[::-1] // 3 + 1], 1).astype(np.int32)
FLOATS = np.concatenate(
    [RNG.standard_normal(26) * 100, [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40]]
).astype(np.float32)
FLOAT_PAIRS = np.stack([FLOATS, RNG.permutation(FLOATS)], 1)


def binary(opcode: str, given: Array, out: str = "b32") -> Array:
    result = np.zeros(len(given), {"b32": np.uint32, "b64": np.uint64}[out])
    d = "%r3" if out == "b32" else "%d3"
    text = elementwise(
        f"{opcode} {d}, %r1, %r2;",
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        f"st.global.{out} [%d2], {d};",
        8,
        result.itemsize,
    )
    run(text, given, result)
    return result


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add.s32", np.add),
        ("sub.s32", np.subtract),
        ("mul.lo.s32", np.multiply),
        ("min.s32", np.minimum),
        ("max.s32", np.maximum),
        ("and.b32", np.bitwise_and),
        ("or.b32", np.bitwise_or),
        ("xor.b32", np.bitwise_xor),
        ("div.s32", lambda x, y: np.trunc(x / y.astype(np.float64)).astype(np.int32)),
        ("rem.s32", lambda x, y: np.fmod(x, y)),
    ],
)
def test_integers(opcode: str, function: np.ufunc) -> None:
    pairs = PAIRS[PAIRS[:, 1] != 0]
    pairs = np.resize(pairs, (32, 2))
    with np.errstate(over="ignore"):
        want = function(pairs[:, 0], pairs[:, 1])
    assert (binary(opcode, pairs).view(np.int32) == want).all()


def test_halves_of_a_product() -> None:
    x, y = PAIRS.astype(np.int64).T
    assert (binary("mul.wide.s32", PAIRS, "b64").view(np.int64) == x * y).all()
    assert (binary("mul.hi.s32", PAIRS).view(np.int32) == (x * y) >> 32).all()
    unsigned = PAIRS.view(np.uint32).astype(np.uint64)
    high = (unsigned[:, 0] * unsigned[:, 1]) >> np.uint64(32)
    assert (binary("mul.hi.u32", PAIRS) == high).all()


@pytest.mark.parametrize("opcode", ["shl.b32", "shr.u32", "shr.s32"])
def test_shifts_beyond_the_width(opcode: str) -> None:
    amounts = np.arange(32) * 3
    pairs = np.stack([INTS, amounts], 1).astype(np.int32)
    kept = [int(x) if opcode == "shr.s32" else int(x) & 0xFFFFFFFF for x in INTS]
    want = [
        (x << int(n)) & 0xFFFFFFFF if opcode == "shl.b32" else (x >> int(n)) & 0xFFFFFFFF
        for x, n in zip(kept, amounts, strict=True)
    ]
    assert binary(opcode, pairs).tolist() == want


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(("at", "count"), [(0, 1), (4, 3), (16, 16), (31, 1), (20, 30), (3, 0)])
def test_bit_fields(signed: bool, at: int, count: int) -> None:
    type_ = "s32" if signed else "u32"
    text = elementwise(
        f"bfe.{type_} %r3, %r1, {at}, {count};",
        "ld.global.b32 %r1, [%d1];",
        "st.global.b32 [%d2], %r3;",
        4,
        4,
    )
    out = np.zeros(32, np.int32)
    run(text, INTS, out)
    inside = min(count, 32 - at)
    for x, found in zip(INTS.tolist(), out.tolist(), strict=True):
        field = (x & 0xFFFFFFFF) >> at & ((1 << inside) - 1)
        sign = field >> (inside - 1) & 1 if inside else 0
        want = field - (sign << inside) if signed else field
        assert found & 0xFFFFFFFF == want & 0xFFFFFFFF


@pytest.mark.parametrize("selector", [0x3210, 0x5410, 0x7632, 0x9991, 0xBBB3, 0x3340, 0x0123])
def test_permuted_bytes(selector: int) -> None:
    found = binary_with("prmt.b32 %r3, %r1, %r2, {}", f"{selector:#x}U")
    for (low, high), got in zip(PAIRS.view(np.uint32).tolist(), found.tolist(), strict=True):
        both = (low | high << 32).to_bytes(8, "little")
        want = []
        for place in range(4):
            nibble = selector >> 4 * place & 15
            byte = both[nibble & 7]
            want.append((255 if byte & 128 else 0) if nibble & 8 else byte)
        assert got == int.from_bytes(bytes(want), "little")


def binary_with(code: str, constant: str) -> Array:
    out = np.zeros(32, np.uint32)
    text = elementwise(
        code.format(constant) + ";",
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        "st.global.b32 [%d2], %r3;",
        8,
        4,
    )
    run(text, PAIRS, out)
    return out


def test_any_function_of_three_bits() -> None:
    table = 0b11100010  # x ? y : z with x the highest
    found = binary_with("lop3.b32 %r3, %r1, %r2, 0x0F0F0F0F, {}", str(table))
    x, y = PAIRS.view(np.uint32).T
    z = np.uint32(0x0F0F0F0F)
    want = np.zeros(32, np.uint32)
    for row in range(8):
        if table >> row & 1:
            want |= (x if row & 4 else ~x) & (y if row & 2 else ~y) & (z if row & 1 else ~z)
    assert (found == want).all()


@pytest.mark.parametrize(
    ("opcode", "function"),
    [
        ("add.f32", np.add),
        ("sub.f32", np.subtract),
        ("mul.f32", np.multiply),
        ("div.rn.f32", np.divide),
        ("min.f32", np.fmin),
        ("max.f32", np.fmax),
    ],
)
def test_floats(opcode: str, function: np.ufunc) -> None:
    with np.errstate(all="ignore"):
        want = function(FLOAT_PAIRS[:, 0], FLOAT_PAIRS[:, 1])
    found = binary(opcode, FLOAT_PAIRS).view(np.float32)
    assert np.array_equal(found, want, equal_nan=True)
    assert (found.view(np.uint32)[np.isnan(found)] == 0x7FFFFFFF).all()


def test_a_fused_product_is_rounded_once() -> None:
    x = np.array([[1 + 2**-12, 1 - 2**-12]] * 32, np.float32)
    out = np.zeros(32, np.float32)
    text = elementwise(
        "fma.rn.f32 %r3, %r1, %r2, 0fBF800000;",  # - 1
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        "st.global.b32 [%d2], %r3;",
        8,
        4,
    )
    run(text, x, out)
    assert (out == np.float32(-(2**-24))).all()


def test_subnormal_numbers_are_flushed_where_asked() -> None:
    x = np.full(32, -127.0, np.float32)
    for opcode, want in (("ex2.approx.f32", 2.0**-127), ("ex2.approx.ftz.f32", 0.0)):
        out = np.ones(32, np.float32)
        text = elementwise(
            f"{opcode} %r3, %r1;",
            "ld.global.b32 %r1, [%d1];",
            "st.global.b32 [%d2], %r3;",
            4,
            4,
        )
        run(text, x, out)
        assert (out == want).all()


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_pairs_of_halves(kind: str) -> None:
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    values = RNG.standard_normal((32, 2)).astype(np.float32)
    out = np.zeros((32, 2), dtype)
    text = elementwise(
        f"cvt.rn.{kind}x2.f32 %r3, %r2, %r1;\nmul.{kind}x2 %r3, %r3, %r3;",
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        "st.global.b32 [%d2], %r3;",
        8,
        4,
    )
    run(text, values, out)
    halves = values.astype(dtype)
    assert (out == halves * halves).all()


@pytest.mark.parametrize(
    ("conversion", "stored", "want"),
    [
        ("cvt.rzi.s32.f32", np.int32, np.trunc),
        ("cvt.rni.s32.f32", np.int32, np.rint),
        ("cvt.rmi.s32.f32", np.int32, np.floor),
        ("cvt.rzi.u32.f32", np.uint32, np.trunc),
    ],
)
def test_floats_become_integers_in_range(conversion: str, stored: type, want: np.ufunc) -> None:
    out = np.zeros(32, stored)
    text = elementwise(
        f"{conversion} %r3, %r1;",
        "ld.global.b32 %r1, [%d1];",
        "st.global.b32 [%d2], %r3;",
        4,
        4,
    )
    run(text, FLOATS, out)
    limits = np.iinfo(stored)
    finite = np.nan_to_num(FLOATS.astype(np.float64), nan=0.0, posinf=1e30, neginf=-1e30)
    assert (out == np.clip(want(finite), limits.min, limits.max).astype(stored)).all()


def test_bytes_become_wider() -> None:
    given = np.arange(-16, 16, dtype=np.int8)
    out = np.zeros((32, 2), np.float32)
    text = elementwise(
        "cvt.rn.f32.s16 %r3, %h1;\ncvt.s8.s32 %h2, %r5;\ncvt.rn.f32.s16 %r4, %h2;",
        "ld.global.s8 %h1, [%d1];\nmov.b32 %r5, 0x1FF;",
        "st.global.v2.b32 [%d2], {%r3, %r4};",
        1,
        8,
    )
    run(text, given, out)
    assert (out[:, 0] == given).all()
    assert (out[:, 1] == -1).all()


def test_eights_become_halves_and_back() -> None:
    codes = RNG.permutation(np.arange(0, 128, 2, dtype=np.uint8))[:64].reshape(32, 2)
    out = np.zeros((32, 2), np.float16)
    text = elementwise(
        "cvt.rn.f16x2.e4m3x2 %r3, %h1;",
        "ld.global.b16 %h1, [%d1];",
        "st.global.b32 [%d2], %r3;",
        2,
        4,
    )
    run(text, codes, out)
    assert (out == codes.view(ml_dtypes.float8_e4m3fn).astype(np.float16)).all()
    values = (RNG.standard_normal((32, 2)) * 300).astype(np.float32)
    back = np.zeros((32, 2), np.uint8)
    text = elementwise(
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %r2, %r1;",
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        "st.global.b16 [%d2], %h1;",
        8,
        2,
    )
    run(text, values, back)
    want = np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert (back.view(ml_dtypes.float8_e4m3fn) == want).all()


@pytest.mark.parametrize(
    ("test", "function"),
    [
        ("lt", np.less),
        ("ge", np.greater_equal),
        ("eq", np.equal),
        ("ne", lambda x, y: (x < y) | (x > y)),
        ("neu", np.not_equal),
        ("ltu", lambda x, y: ~(x >= y)),
        ("nan", lambda x, y: np.isnan(x) | np.isnan(y)),
        ("num", lambda x, y: ~(np.isnan(x) | np.isnan(y))),
    ],
)
def test_comparisons_of_what_is_no_number(test: str, function: np.ufunc) -> None:
    out = np.zeros(32, np.int32)
    text = elementwise(
        f"setp.{test}.f32 %p1, %r1, %r2;\nselp.b32 %r3, 1, 0, %p1;",
        "ld.global.v2.b32 {%r1, %r2}, [%d1];",
        "st.global.b32 [%d2], %r3;",
        8,
        4,
    )
    run(text, FLOAT_PAIRS, out)
    with np.errstate(invalid="ignore"):
        assert (out == function(FLOAT_PAIRS[:, 0], FLOAT_PAIRS[:, 1])).all()


def test_registers_are_joined_and_parted() -> None:
    out = np.zeros(32, np.uint64)
    code = """
    mov.b64 %d3, {%r1, %r2};
    mov.b64 {%r3, _}, %d3;
    mov.b32 {%h1, %h2}, %r3;
    mov.b32 %r4, {%h2, %h1};
    mov.b64 %d4, {%r2, %r4};
    """
    text = elementwise(
        code, "ld.global.v2.b32 {%r1, %r2}, [%d1];", "st.global.b64 [%d2], %d4;", 8, 8
    )
    run(text, PAIRS, out)
    x, y = PAIRS.view(np.uint32).astype(np.uint64).T
    swapped = (x >> np.uint64(16)) | ((x & np.uint64(0xFFFF)) << np.uint64(16))
    assert (out == (y | swapped << np.uint64(32))).all()


@pytest.mark.parametrize(
    ("how", "source"),
    [
        ("bfly.b32 %r3, %r1, 5, 31, -1", lambda i: i ^ 5),
        ("idx.b32 %r3, %r1, 9, 31, -1", lambda i: np.full(32, 9)),
        ("up.b32 %r3, %r1, 3, 0, -1", lambda i: np.where(i >= 3, i - 3, i)),
        ("down.b32 %r3, %r1, 3, 31, -1", lambda i: np.where(i + 3 <= 31, i + 3, i)),
        ("bfly.b32 %r3, %r1, 1, 0x1c1f, -1", lambda i: i ^ 1),
    ],
)
def test_shuffles(how: str, source: np.ufunc) -> None:
    out = np.zeros(32, np.int32)
    text = elementwise(
        f"shfl.sync.{how};",
        "ld.global.b32 %r1, [%d1];",
        "st.global.b32 [%d2], %r3;",
        4,
        4,
    )
    run(text, INTS, out)
    assert (out == INTS[source(np.arange(32))]).all()


def test_votes() -> None:
    out = np.zeros((32, 2), np.uint32)
    text = elementwise(
        """setp.gt.s32 %p1, %r1, 0;
        vote.sync.ballot.b32 %r3, %p1, -1;
        vote.sync.any.pred %p2, %p1, -1;
        selp.b32 %r4, 1, 0, %p2;""",
        "ld.global.b32 %r1, [%d1];",
        "st.global.v2.b32 [%d2], {%r3, %r4};",
        4,
        8,
    )
    run(text, INTS, out)
    want = sum(1 << i for i in range(32) if INTS[i] > 0)
    assert (out == [want, 1]).all()


@pytest.mark.parametrize(
    ("how", "function"),
    [
        ("add.s32", np.add),
        ("min.s32", np.minimum),
        ("max.u32", np.maximum),
        ("or.b32", np.bitwise_or),
    ],
)
def test_reductions_of_a_warp(how: str, function: np.ufunc) -> None:
    given = INTS if how.endswith("s32") else INTS.view(np.uint32)
    out = np.zeros(32, given.dtype)
    text = elementwise(
        f"redux.sync.{how} %r3, %r1, -1;",
        "ld.global.b32 %r1, [%d1];",
        "st.global.b32 [%d2], %r3;",
        4,
        4,
    )
    run(text, given, out)
    with np.errstate(over="ignore"):
        assert (out == function.reduce(given, dtype=given.dtype)).all()


def test_branches_part_and_meet_again() -> None:
    """Threads of one warp loop as often as their number says; all take part in the shuffle."""
    out = np.zeros(64, np.int32)
    text = kernel(
        f"""{addresses(4, 4)}
        mov.u32 %r1, %tid.x;
        mov.b32 %r2, 0;
        LOOP:
        setp.ge.s32 %p1, %r2, %r1;
        @%p1 bra DONE;
        add.s32 %r2, %r2, 1;
        bra LOOP;
        DONE:
        shfl.sync.bfly.b32 %r3, %r2, 1, 31, -1;
        st.global.b32 [%d2], %r3;
        ret;"""
    )
    run(text, np.zeros(64, np.int32), out, grid=2)
    assert (out == np.tile(np.arange(32) ^ 1, 2)).all()
