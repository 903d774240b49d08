"""Kernel of silu_mul: the gate of a gated MLP."""

import triton
import triton.language as tl


@triton.jit
def silu_mul(
    gate,
    up,
    out,
    WIDTH: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write `out = gate * sigmoid(gate) * up` for BLOCK_D of the WIDTH elements of one row.

    In float32, rounded to out's dtype before `up` and at the end, as the two operators round.
    The strides are elements between rows, so that gate and up may be halves of one tensor.
    Grid: (num_rows * ceil(WIDTH / BLOCK_D),).
    """
    blocks: tl.constexpr = (WIDTH + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = d < WIDTH
    gate_D = tl.load(gate + row * GATE_STRIDE + d, mask=mask, other=0.0).to(tl.float32)
    up_D = tl.load(up + row * UP_STRIDE + d, mask=mask, other=0.0).to(tl.float32)
    silu_D = (gate_D * tl.sigmoid(gate_D)).to(out.dtype.element_ty)
    out_D = silu_D.to(tl.float32) * up_D
    tl.store(out + row * WIDTH + d, out_D.to(out.dtype.element_ty), mask=mask)
