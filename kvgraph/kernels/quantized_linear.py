"""Kernel of quantized_linear: linear layers of one input over weights in fewer bits."""

import triton
import triton.language as tl

from kvgraph.kernels.products import gated, product


@triton.jit(do_not_specialize=["num_rows", "in_features"])
def quantized_linear(
    x,
    weight,
    scales,
    group_bytes,
    bias,
    out,
    out_1,
    out_2,
    num_rows,
    in_features,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    GATED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """BLOCK_M rows of x times BLOCK_N columns of all outputs, one behind the other.

    GATED: the columns are gate and up in turn, and the one output has half as many. Grid: (row
    tiles, columns / BLOCK_N): programs of the same columns are neighbours, and find their weights
    in the L2 cache.
    """
    COLUMNS: tl.constexpr = 2 * OUT if GATED else OUT + OUT_1 + OUT_2
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_M = row_M < num_rows
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    y_NM = product(
        x, row_M, live_M, weight, scales, group_bytes, n_N, in_features, IN, COLUMNS, BITS, GROUP,
        CODES, FP8_NATIVE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, SLICES,
    )  # fmt: skip
    if bias is not None:
        y_NM += tl.load(bias + n_N, mask=n_N < COLUMNS, other=0.0)[:, None]
    if GATED:
        y_NM = gated(y_NM, BLOCK_M, BLOCK_N, 0, 1.0, 0.0, 0.0)
        n_N = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    y_MN = tl.trans(y_NM).to(out.dtype.element_ty)
    _store(out, row_M, live_M, n_N, y_MN, OUT)
    if OUT_1:
        _store(out_1, row_M, live_M, n_N - OUT, y_MN, OUT_1)
    if OUT_2:
        _store(out_2, row_M, live_M, n_N - OUT - OUT_1, y_MN, OUT_2)


@triton.jit
def _store(out, row_M, live_M, n_N, y_MN, OUT: tl.constexpr):
    """Those of the columns `n_N` that are in [0, OUT)."""
    mask_N = (n_N >= 0) & (n_N < OUT)
    to_MN = out + row_M.to(tl.int64)[:, None] * OUT + n_N[None, :]
    tl.store(to_MN, y_MN, mask=live_M[:, None] & mask_N[None, :])
