"""Kernel of rms_norm, alone or after the sum with a residual stream."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm(
    x,
    weight,
    residual,
    out,
    num_rows,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    EPSILON: tl.constexpr,
    WEIGHT_OFFSET: tl.constexpr,
    ROUND_FIRST: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`out = y / sqrt(mean(y^2) + EPSILON) * (WEIGHT_OFFSET + weight)` of BLOCK_R rows of WIDTH.

    y is x, or x + residual rounded to their dtype; the sum is then stored in residual. In float32,
    rounded at the end, and with ROUND_FIRST also before the weight is applied (as in Llama, but not
    in Gemma). X_STRIDE: elements between x's rows, which may be parts of larger rows.
    Grid: (ceil(num_rows / BLOCK_R),).
    """
    row_R = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    d = tl.arange(0, BLOCK_D)
    mask_RD = (row_R < num_rows)[:, None] & (d < WIDTH)[None, :]
    at_RD = row_R.to(tl.int64)[:, None] * WIDTH + d[None, :]
    of_x_RD = row_R.to(tl.int64)[:, None] * X_STRIDE + d[None, :]
    y_RD = tl.load(x + of_x_RD, mask=mask_RD, other=0.0).to(tl.float32)
    if RESIDUAL:
        y_RD += tl.load(residual + at_RD, mask=mask_RD, other=0.0).to(tl.float32)
        stored_RD = y_RD.to(x.dtype.element_ty)
        tl.store(residual + at_RD, stored_RD, mask=mask_RD)
        y_RD = stored_RD.to(tl.float32)
    rate_R = tl.rsqrt(tl.sum(y_RD * y_RD, 1) / WIDTH + EPSILON)
    weight_D = tl.load(weight + d, mask=d < WIDTH, other=0.0).to(tl.float32) + WEIGHT_OFFSET
    normal_RD = y_RD * rate_R[:, None]
    if ROUND_FIRST:
        normal_RD = normal_RD.to(out.dtype.element_ty).to(tl.float32)
    out_RD = normal_RD * weight_D[None, :]
    tl.store(out + at_RD, out_RD.to(out.dtype.element_ty), mask=mask_RD)
