"""Matrix instructions against NumPy products, and the waits and fences that they need."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from kvgraph.errors import KernelFaultError
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


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_products_of_a_warp(kind: str) -> None:
    dtype = np.float16 if kind == "f16" else ml_dtypes.bfloat16
    a, b = (RNG.standard_normal(shape).astype(dtype) for shape in ((16, 16), (16, 8)))
    both = np.concatenate([a.reshape(-1), np.ascontiguousarray(b.T).reshape(-1)])
    c = np.zeros((16, 8), np.float32)
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
        mov.b32 %r11, 0f3F800000;
        mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{%r12, %r13, %r14, %r15}},
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
    want = a.astype(np.float32) @ b.astype(np.float32) + 1
    assert np.allclose(c, want, rtol=1e-5, atol=1e-5)
    assert counters.mma == 16 * 8 * 16


DESCRIPTOR = 1 << 62 | 64 << 32 | 64 << 16
"""Rows of 128 bytes, swizzled; atoms of 1024 bytes, one behind the other, in both directions."""

PRODUCT = """
    {load}
    // thread t swizzles its 16 bytes: row t / 8, part t % 8
    mad.wide.s32 %d3, %r1, 16, %d1;
    ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%d3];
    shr.u32 %r7, %r1, 3;
    xor.b32 %r8, %r7, %r1;
    and.b32 %r8, %r8, 7;
    shl.b32 %r8, %r8, 4;
    mad.lo.s32 %r6, %r7, 128, %r8;
    add.s32 %r6, %r6, %r10;
    st.shared.v4.b32 [%r6], {{%r2, %r3, %r4, %r5}};
    {proxy}
    bar.sync 0;
    mov.b32 %r12, 0f40000000;
    mov.b32 %r13, %r12;
    mov.b32 %r14, %r12;
    mov.b32 %r15, %r12;
    mov.b64 %d5, {b};
    // a's fragment: one where its row is its column, of each warp's 16 rows
    shr.u32 %r20, %r1, 2;
    and.b32 %r20, %r20, 7;
    and.b32 %r21, %r1, 3;
    shl.b32 %r21, %r21, 1;
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
    // rows 16 w + t / 4 and that + 8, columns 2 (t % 4)
    shr.u32 %r40, %r1, 5;
    mad.lo.s32 %r41, %r40, 16, %r20;
    mul.lo.s32 %r41, %r41, 32;
    shl.b32 %r42, %r21, 2;
    add.s32 %r41, %r41, %r42;
    cvt.u64.u32 %d6, %r41;
    add.s64 %d6, %d2, %d6;
    st.global.v2.b32 [%d6], {{%r12, %r13}};
    st.global.v2.b32 [%d6+256], {{%r14, %r15}};
    ret;"""

PLAIN = {
    "load": LOAD,
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
