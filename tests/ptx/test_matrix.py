"""Matrix instructions against NumPy products, and the waits and fences that they need."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgraph.errors import KernelError, KernelFaultError
from tests.ptx.programs import kernel, run

RNG = np.random.default_rng(3)
LOAD = """
    mov.u32 %r1, %tid.x;
    ld.param.b64 %d1, [p0];
    ld.param.b64 %d2, [p1];
    mov.u32 %r10, smem;
"""
GATHER = """
    // thread t copies 16 bytes of a to shared memory at 16 t
    mad.wide.s32 %d3, %r1, 16, %d1;
    ld.global.v4.b32 {%r2, %r3, %r4, %r5}, [%d3];
    shl.b32 %r6, %r1, 4;
    add.s32 %r6, %r6, %r10;
    st.shared.v4.b32 [%r6], {%r2, %r3, %r4, %r5};
    bar.sync 0;
"""


@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_are_loaded_by_row_and_stored_again(transposed: bool) -> None:
    """Four 8 x 8 matrices, one behind the other; loaded transposed and stored, they are that."""
    x = RNG.integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    y = np.zeros_like(x)
    way = ".trans" if transposed else ""
    text = kernel(
        f"""{LOAD}{GATHER}
        ldmatrix.sync.aligned.m8n8.x4{way}.shared.b16 {{%r2, %r3, %r4, %r5}}, [%r6];
        bar.sync 0;
        stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r6], {{%r2, %r3, %r4, %r5}};
        bar.sync 0;
        ld.shared.v4.b32 {{%r2, %r3, %r4, %r5}}, [%r6];
        mad.wide.s32 %d3, %r1, 16, %d2;
        st.global.v4.b32 [%d3], {{%r2, %r3, %r4, %r5}};
        ret;"""
    )
    run(text, x, y, shared=512)
    assert (y == (x.swapaxes(1, 2) if transposed else x)).all()


KINDS = {
    "f16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "s8": np.int8,
}


def numbers(kind: str, *shape: int) -> np.ndarray:
    scale = 50 if kind == "s8" else 1
    return (RNG.standard_normal(shape) * scale).astype(KINDS[kind])


@pytest.mark.parametrize(
    ("kind", "end"), [("f16", ""), ("bf16", ""), ("e4m3", ""), ("s8", ""), ("s8", ".satfinite")]
)
def test_products_of_a_warp(kind: str, end: str) -> None:
    """A row of a factor has 32 bytes, whatever its numbers. One is added to each sum; whole sums
    that saturate are added to the largest number."""
    depth = 32 // np.dtype(KINDS[kind]).itemsize
    a, b = numbers(kind, 16, depth), numbers(kind, depth, 8)
    both = np.concatenate([a.reshape(-1), np.ascontiguousarray(b.T).reshape(-1)])
    wide, sums = (np.int32, "s32") if kind == "s8" else (np.float32, "f32")
    c = np.zeros((16, 8), wide)
    one = "0f3F800000" if sums == "f32" else "0x7fffffff" if end else "1"
    shape = f"m16n8k{depth}.row.col{end}.{sums}.{kind}.{kind}.{sums}"
    text = kernel(
        f"""{LOAD}
        // a's fragment: rows t / 4 and that + 8, columns 2 (t % 4) and that + 8
        shr.u32 %r20, %r1, 2;
        and.b32 %r21, %r1, 3;
        shl.b32 %r22, %r21, 2;
        mad.lo.s32 %r23, %r20, 32, %r22;
        cvt.u64.u32 %d3, %r23;
        add.s64 %d3, %d1, %d3;
        ld.global.b32 %r2, [%d3];
        ld.global.b32 %r3, [%d3+256];
        ld.global.b32 %r4, [%d3+16];
        ld.global.b32 %r5, [%d3+272];
        // b's, transposed: row t / 4 of 16 columns
        ld.global.b32 %r6, [%d3+512];
        ld.global.b32 %r7, [%d3+528];
        mov.b32 %r11, {one};
        mma.sync.aligned.{shape} {{%r12, %r13, %r14, %r15}},
            {{%r2, %r3, %r4, %r5}}, {{%r6, %r7}}, {{%r11, %r11, %r11, %r11}};
        shl.b32 %r24, %r21, 3;
        mad.lo.s32 %r25, %r20, 32, %r24;
        cvt.u64.u32 %d4, %r25;
        add.s64 %d4, %d2, %d4;
        st.global.v2.b32 [%d4], {{%r12, %r13}};
        st.global.v2.b32 [%d4+256], {{%r14, %r15}};
        ret;"""
    )
    counters = run(text, both, c)
    want = a.astype(wide) @ b.astype(wide)
    want = want + 1 if not end else np.minimum(want.astype(np.int64) + 0x7FFFFFFF, 0x7FFFFFFF)
    assert np.allclose(c, want, rtol=1e-5, atol=1e-5)
    assert counters.mma == 16 * 8 * depth


DESCRIPTOR = 1 << 62 | 64 << 32 | 64 << 16
"""Rows of 128 bytes, swizzled; atoms of 1024 bytes, one behind the other, in both directions."""

PLACE = """
    // swizzled, where thread t's 16 bytes go: row t / 8, part t % 8
    shr.u32 %r7, %r1, 3;
    xor.b32 %r8, %r7, %r1;
    and.b32 %r8, %r8, 7;
    shl.b32 %r8, %r8, 4;
    mad.lo.s32 %r6, %r7, 128, %r8;
    add.s32 %r6, %r6, %r10;
    mad.wide.s32 %d3, %r1, 16, %d1;"""

LANE = """
    shr.u32 %r20, %r1, 2;
    and.b32 %r20, %r20, 7;
    and.b32 %r21, %r1, 3;
    shl.b32 %r21, %r21, 1;"""

STORE = """
    // rows 16 w + t / 4 and that + 8, columns 2 (t % 4)
    shr.u32 %r40, %r1, 5;
    mad.lo.s32 %r41, %r40, 16, %r20;
    mul.lo.s32 %r41, %r41, 32;
    shl.b32 %r42, %r21, 2;
    add.s32 %r41, %r41, %r42;
    cvt.u64.u32 %d6, %r41;
    add.s64 %d6, %d2, %d6;
    st.global.v2.b32 [%d6], {%r12, %r13};
    st.global.v2.b32 [%d6+256], {%r14, %r15};
    ret;"""

PARTS = {"load": LOAD, "place": PLACE, "lane": LANE, "store": STORE}
"""Of both programs of four warps."""

PRODUCT = """
    {load}
    {place}
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d3];
    st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
    {proxy}
    bar.sync 0;
    mov.b32 %r12, 0f40000000;
    mov.b32 %r13, %r12;
    mov.b32 %r14, %r12;
    mov.b32 %r15, %r12;
    mov.b64 %d5, {b};
    // a's fragment: one where its row is its column, of each warp's 16 rows
    {lane}
    mov.b32 %r30, 0;
    setp.eq.s32 %p1, %r20, %r21;
    @%p1 mov.b32 %r30, 0x3C00;
    add.s32 %r22, %r21, 1;
    setp.eq.s32 %p1, %r20, %r22;
    @%p1 mov.b32 %r30, 0x3C000000;
    mov.b32 %r31, 0;
    mov.b32 %r32, 0;
    mov.b32 %r33, %r30;
    mov.pred %p2, -1;
    {fence}
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {{%r12, %r13, %r14, %r15}},
        {{%r30, %r31, %r32, %r33}}, %d5, {adds}, 1, 1, {transposed};
    wgmma.commit_group.sync.aligned;
    {wait}
    {store}"""

PLAIN = PARTS | {
    "proxy": "fence.proxy.async.shared::cta;",
    "fence": "wgmma.fence.sync.aligned;",
    "wait": "wgmma.wait_group.sync.aligned 0;",
    "adds": "%p2",
    "transposed": "0",
    "b": str(DESCRIPTOR),
}


def product(**changes: str) -> tuple[np.ndarray, np.ndarray]:
    """The 16 rows of 64 that are in shared memory, and what came of them."""
    x = RNG.standard_normal((16, 64)).astype(np.float16)
    y = np.zeros((64, 8), np.float32)
    run(kernel(PRODUCT.format(**PLAIN | changes)), x, y, threads=128, shared=2048)
    return x.astype(np.float32), y


def test_products_of_four_warps() -> None:
    """A is the unit matrix in each warp's rows, so D is B (K-major: 8 rows of K), four times."""
    x, y = product()
    assert (y == np.tile(x[:8, :16].T, (4, 1)) + 2).all()
    x, y = product(adds="0")
    assert (y == np.tile(x[:8, :16].T, (4, 1))).all()


BYTES = """
    {load}
    {place}
    {quarters}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    mov.b32 %r12, 0;
    mov.b32 %r13, 0;
    mov.b32 %r14, 0;
    mov.b32 %r15, 0;
    mov.b64 %d5, {matrix};
    mov.pred %p2, -1;
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.{shape} {{%r12, %r13, %r14, %r15}}, %d5, %d5, %p2{end};
    wgmma.commit_group.sync.aligned;
    wgmma.wait_group.sync.aligned 0;
    {lane}
    {store}"""

QUARTER = """ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d3+{at}];
    st.shared.v4.b32 [%r6+{at}], {{%r2, %r3, %r4, %r5}};"""


def product_of_bytes(shape: str, end: str, kind: str) -> tuple[np.ndarray, np.ndarray]:
    """64 rows of 128 bytes, and what came of them times the first 8."""
    x = numbers(kind, 64, 128)
    y = np.zeros((64, 8), np.int32 if kind == "s8" else np.float32)
    quarters = "".join(QUARTER.format(at=2048 * i) for i in range(4))
    given = {"quarters": quarters, "matrix": str(DESCRIPTOR), "shape": shape, "end": end}
    run(kernel(BYTES.format(**PARTS | given)), x, y, threads=128, shared=8192)
    return x.astype(y.dtype), y


@pytest.mark.parametrize(
    ("kind", "shape", "end"),
    [("e4m3", "m64n8k32.f32.e4m3.e4m3", ", 1, 1"), ("s8", "m64n8k32.s32.s8.s8", "")],
)
def test_products_of_bytes_by_four_warps(kind: str, shape: str, end: str) -> None:
    x, y = product_of_bytes(shape, end, kind)
    assert np.allclose(y, x[:, :32] @ x[:8, :32].T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "shape", "end"),
    [
        ("s8", "m64n8k16.s32.s8.s8", ""),
        ("s8", "m64n40k32.s32.s8.s8", ""),
        ("s8", "m64n8k32.f32.s8.s8", ", 1, 1"),
        ("s8", "m64n8k32.s32.s8.s8", ", 1, 1"),
        ("e4m3", "m64n8k32.f32.e4m3.e4m3", ", 1, 1, 0, 0"),
        ("e4m3", "m64n8k32.f32.e4m3.e4m3", ", 1, -1"),
    ],
)
def test_products_of_bytes_that_there_are_not(kind: str, shape: str, end: str) -> None:
    with pytest.raises(KernelError, match="expected"):
        product_of_bytes(shape, end, kind)


def test_products_of_a_matrix_whose_rows_are_k() -> None:
    x, y = product(transposed="1")
    assert (y == np.tile(x[:16, :8], (4, 1)) + 2).all()


@pytest.mark.parametrize(
    ("left_out", "sentence"),
    [
        ("proxy", "expected a fence.proxy.async between the write and this read"),
        ("fence", "expected a wgmma.fence between the write of a register and this product"),
        ("wait", "expected a wgmma.wait_group between a product and the use of its registers"),
    ],
)
def test_fences_and_waits_that_are_missing(left_out: str, sentence: str) -> None:
    with pytest.raises(KernelFaultError, match=sentence):
        product(**{left_out: ""})


def test_what_a_product_reads_is_not_written_before_its_wait() -> None:
    wait = "st.shared.v4.b32 [%r6], {%r2, %r3, %r4, %r5};\n" + PLAIN["wait"]
    with pytest.raises(
        KernelFaultError, match="no matrix product under way that reads these bytes"
    ):
        product(wait=wait)


def test_a_part_of_a_group_makes_no_product() -> None:
    fence = PLAIN["fence"] + "setp.lt.s32 %p3, %r1, 64; @%p3 bra OUT;"
    wait = PLAIN["wait"] + "OUT:"
    with pytest.raises(KernelFaultError, match="expected the four warps of a group"):
        product(fence=fence, wait=wait)


def test_a_matrix_outside_of_shared_memory_is_a_fault() -> None:
    with pytest.raises(KernelFaultError, match="expected a matrix inside of 2048 bytes"):
        product(b=str(DESCRIPTOR + (2048 >> 4)))
