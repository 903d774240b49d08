"""Kernels of quantized_linear: linear layers of one input over weights in fewer bits."""

import triton
import triton.language as tl

from kvgraph.kernels.elements import decode, encode
from kvgraph.kernels.products import gated, product, stored_bytes, stored_nibbles


@triton.jit(do_not_specialize=["num_rows", "in_features", "part_blocks"])
def quantized_linear(
    x,
    rounded,
    row_scales,
    weight,
    scales,
    group_bytes,
    bias,
    out,
    out_1,
    out_2,
    sums,
    num_rows,
    in_features,
    part_blocks,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    GATED: tl.constexpr,
    SPLIT: tl.constexpr,
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
    """Multiply BLOCK_M rows of x by BLOCK_N columns; the columns of all outputs are concatenated.

    GATED: columns alternate gate and up, and the one output has half as many columns. Grid: (row
    tiles, columns / BLOCK_N): programs of the same columns are neighbours, and find their weights
    in the L2 cache.

    x may be absent: then `rounded` is x in numbers of the weight's kind, with `row_scales`.

    SPLIT: write sums over parts of `part_blocks` blocks of inputs to `sums [parts, M, columns]`.
    Grid: (row tiles, parts * columns / BLOCK_N).
    """
    COLUMNS: tl.constexpr = 2 * OUT if GATED else OUT + OUT_1 + OUT_2
    row_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live_M = row_M < num_rows
    tile, begin, end = tl.program_id(1), 0, in_features
    if SPLIT:
        TILES: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
        BLOCK: tl.constexpr = 2 * BLOCK_K if BITS == 4 else BLOCK_K
        part, tile = tile // TILES, tile % TILES
        begin = part * part_blocks * BLOCK
        end = tl.minimum(begin + part_blocks * BLOCK, in_features)
    n_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    y_NM = product(
        rounded if x is None else x, row_M, live_M, weight, scales, group_bytes, n_N, begin, end,
        IN, COLUMNS, BITS, GROUP, CODES, FP8_NATIVE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, SLICES,
    )  # fmt: skip
    if row_scales is not None:
        y_NM *= tl.load(row_scales + row_M, mask=live_M, other=0.0)[None, :]
    if SPLIT:
        sums += part.to(tl.int64) * num_rows * COLUMNS
        _store(sums, row_M, live_M, n_N, tl.trans(y_NM), COLUMNS)
    else:
        if bias is not None:
            y_NM += tl.load(bias + n_N, mask=n_N < COLUMNS, other=0.0)[:, None]
        if GATED:
            y_NM = gated(y_NM, BLOCK_M, BLOCK_N, 0, 1.0, 0.0, 0.0)
            n_N = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        y_MN = tl.trans(y_NM).to(out.dtype.element_ty)
        _store(out, row_M, live_M, n_N, y_MN, OUT)
        if OUT_1:
            _store(out_1, row_M, live_M, n_N - OUT, y_MN, OUT_1)
        if OUT_2:
            _store(out_2, row_M, live_M, n_N - OUT - OUT_1, y_MN, OUT_2)


@triton.jit
def _store(out, row_M, live_M, n_N, y_MN, OUT: tl.constexpr):
    """Store the columns `n_N` that are in [0, OUT)."""
    mask_N = (n_N >= 0) & (n_N < OUT)
    to_MN = out + row_M.to(tl.int64)[:, None] * OUT + n_N[None, :]
    tl.store(to_MN, y_MN, mask=live_M[:, None] & mask_N[None, :])


@triton.jit
def round_rows(
    x,
    rounded,
    row_scales,
    restored,
    IN: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Round a row of x to numbers of the weight's kind and a scale; write these, or, if `restored`
    is given, their product in x's dtype. Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK_D)
    x_D = tl.load(x + row * IN + d, mask=d < IN, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(x_D), 0)
    # The maximum ignores NaN, so a row with a NaN gets a scale of NaN.
    largest = tl.where(tl.max((x_D != x_D).to(tl.int32), 0) > 0, float("nan"), largest)
    scale = tl.div_rn(largest, LARGEST)
    divisor = tl.where(scale == 0, 1.0, scale)
    number_D = tl.div_rn(x_D, tl.full((BLOCK_D,), 1.0, tl.float32) * divisor)
    number_D = encode(number_D, QUANTIZED, None)
    if restored is None:
        tl.store(row_scales + row, scale)
        tl.store(rounded + row * IN + d, number_D, mask=d < IN)
    else:
        y_D = decode(number_D, QUANTIZED, False, tl.float32) * scale
        tl.store(restored + row * IN + d, y_D.to(restored.dtype.element_ty), mask=d < IN)


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def sum_linear(
    sums,
    products,
    bias,
    out,
    out_1,
    out_2,
    num_rows,
    num_parts,
    OUT: tl.constexpr,
    OUT_1: tl.constexpr,
    OUT_2: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write outputs from BLOCK_D columns of one row of `sums [parts, M, columns]`, added in the
    order of the parts, of a quantized_linear that was split; or from `products [M, columns]`, which
    are rounded already. Grid: (rows, columns / BLOCK_D)."""
    COLUMNS: tl.constexpr = 2 * OUT if GATED else OUT + OUT_1 + OUT_2
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_D = d < COLUMNS
    at = row * COLUMNS
    if sums is None:
        y_D = tl.load(products + at + d, mask=in_D, other=0.0).to(tl.float32)
    else:
        y_D = tl.zeros((BLOCK_D,), tl.float32)
        for _ in range(0, num_parts):
            y_D += tl.load(sums + at + d, mask=in_D, other=0.0)
            at += num_rows.to(tl.int64) * COLUMNS
    if bias is not None:
        y_D += tl.load(bias + d, mask=in_D, other=0.0)
    if GATED:
        y_D = tl.reshape(gated(y_D[:, None], 1, BLOCK_D, 0, 1.0, 0.0, 0.0), (BLOCK_D // 2,))
        d = tl.program_id(1) * (BLOCK_D // 2) + tl.arange(0, BLOCK_D // 2)
    y_D = y_D.to(out.dtype.element_ty)
    tl.store(out + row * OUT + d, y_D, mask=d < OUT)
    if OUT_1:
        tl.store(out_1 + row * OUT_1 + d - OUT, y_D, mask=(d >= OUT) & (d < OUT + OUT_1))
    if OUT_2:
        behind = d - OUT - OUT_1
        tl.store(out_2 + row * OUT_2 + behind, y_D, mask=(behind >= 0) & (behind < OUT_2))


@triton.jit(do_not_specialize=["first", "num_columns"])
def expand_weight(
    weight,
    scales,
    group_bytes,
    plain,
    first,
    num_columns,
    IN: tl.constexpr,
    COLUMNS: tl.constexpr,
    GATED: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Write `num_columns` columns of a weight from `first` on, in the activations' dtype, to
    `plain [num_columns, IN]`. GATED: gates first, then ups.
    Grid: (num_columns / BLOCK_N, blocks of inputs).
    """
    c_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_N = c_N < num_columns
    n_N = first + c_N
    row_N = c_N // 2 + c_N % 2 * (num_columns // 2) if GATED else c_N
    to_N = plain + row_N.to(tl.int64)[:, None] * IN
    block = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    if BITS == 4:
        SPAN: tl.constexpr = 2 * BLOCK_K
        SPANS: tl.constexpr = (IN + SPAN - 1) // SPAN
        at_NH = n_N.to(tl.int64)[:, None] * (SPANS * BLOCK_K) + (block * BLOCK_K + k)[None, :]
        byte_NH = tl.load(weight + at_NH, mask=in_N[:, None], other=0)
        for half in tl.static_range(2):
            at = block * SPAN + half * BLOCK_K
            scale_at_N = at // GROUP * COLUMNS + n_N
            live_N = c_N < tl.where(at < IN, num_columns, 0)
            w_NH = stored_nibbles(
                byte_NH, half == 1, scales, group_bytes, scale_at_N, live_N, CODES,
                plain.dtype.element_ty,
            )  # fmt: skip
            mask_NH = in_N[:, None] & (at + k < IN)[None, :]
            tl.store(to_N + (at + k)[None, :], w_NH, mask=mask_NH)
    else:
        at = block * BLOCK_K
        mask_NK = in_N[:, None] & (at + k < IN)[None, :]
        at_NK = n_N.to(tl.int64)[:, None] * IN + (at + k)[None, :]
        byte_NK = tl.load(weight + at_NK, mask=mask_NK, other=0)
        scale_at_N = at // GROUP * COLUMNS + n_N if GROUP else n_N
        w_NK = stored_bytes(
            byte_NK, scales, group_bytes, scale_at_N, in_N, CODES, FP8_NATIVE,
            plain.dtype.element_ty,
        )  # fmt: skip
        tl.store(to_N + (at + k)[None, :], w_NK, mask=mask_NK)
