"""Device functions of matrix products: rows of a weight times rows of activations.

A weight is stored with its inputs next to each other, one row for an output column: in the
activations' dtype, as bytes (int8, FP8), or as nibbles (whole numbers, FP4). It is the first
factor: tensor cores take that from registers, where bytes and nibbles are converted, and a tile of
few rows wastes little.

Legend: M rows of activations, N output columns, K inputs, H half a span of inputs.
"""

import triton
import triton.language as tl

from kvgraph.kernels.elements import decode

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)

E2M1 = tl.constexpr(1)
E4M3 = tl.constexpr(2)

TWICE_E2M1 = tl.constexpr(0xC8643210)
"""Nibble m: twice the magnitude of FP4 number m."""


@triton.jit
def product(
    x,
    row_M,
    live_M,
    weight,
    scales,
    group_bytes,
    n_N,
    inputs,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`[N, M]` float32: columns `n_N` of one weight `[OUT, IN]` times rows `row_M` of x.

    BITS 0: the weight is of x's dtype; 8: bytes; 4: nibbles. Scales `[groups, OUT]` are of GROUP
    inputs each; 0: of all. BLOCK_K bytes of a row are loaded at once, which divide GROUP. Of
    nibbles they are a span: byte h holds inputs h and h + BLOCK_K of it, so that both halves meet
    whole rows of x. A span is one group, or two.

    `inputs` is IN as a value: a loop of two steps that the compiler knows is unrolled, and writes
    accumulators behind the fence that products of four warps need.
    """
    rows_M = row_M.to(tl.int64) * IN
    k = tl.arange(0, BLOCK_K)
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    in_N = n_N < OUT
    if BITS == 4:
        SPAN: tl.constexpr = 2 * BLOCK_K
        SPANS: tl.constexpr = (IN + SPAN - 1) // SPAN
        for span in range(0, (inputs + SPAN - 1) // SPAN):
            at_NH = n_N.to(tl.int64)[:, None] * (SPANS * BLOCK_K) + (span * BLOCK_K + k)[None, :]
            byte_NH = tl.load(weight + at_NH, mask=in_N[:, None], other=0)
            low, high = span * SPAN, span * SPAN + BLOCK_K
            low_N = low // GROUP * OUT + n_N
            high_N, in_high_N = low_N, in_N
            if GROUP < SPAN:
                high_N += OUT
                in_high_N = in_N & (high < IN)
            x_MH = _load_rows(x, rows_M, live_M, low + k, IN)
            y_MH = _load_rows(x, rows_M, live_M, high + k, IN)
            low_NH = _numbers((byte_NH << 4) >> 4, group_bytes, low_N, in_N, CODES)
            high_NH = _numbers(byte_NH >> 4, group_bytes, high_N, in_high_N, CODES)
            part_NM = tl.dot(low_NH.to(x_MH.dtype), tl.trans(x_MH), input_precision=PRECISION)
            if GROUP < SPAN:
                acc_NM += part_NM * _scales(scales, group_bytes, low_N, in_N, CODES)[:, None]
                part_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            part_NM = tl.dot(
                high_NH.to(x_MH.dtype), tl.trans(y_MH), part_NM, input_precision=PRECISION
            )
            acc_NM += part_NM * _scales(scales, group_bytes, high_N, in_high_N, CODES)[:, None]
    else:
        for start in range(0, inputs, BLOCK_K):
            x_MK = _load_rows(x, rows_M, live_M, start + k, IN)
            at_NK = n_N.to(tl.int64)[:, None] * IN + (start + k)[None, :]
            mask_NK = in_N[:, None] & (start + k < IN)[None, :]
            w_NK = tl.load(weight + at_NK, mask=mask_NK, other=0)
            if CODES == E4M3:
                w_NK = decode(w_NK, "float8_e4m3fn", FP8_NATIVE, x_MK.dtype)
            else:
                w_NK = w_NK.to(x_MK.dtype)
            if GROUP:
                part_NM = tl.dot(w_NK, tl.trans(x_MK), input_precision=PRECISION)
                at_N = start // GROUP * OUT + n_N
                acc_NM += part_NM * _scales(scales, group_bytes, at_N, in_N, CODES)[:, None]
            else:
                acc_NM = tl.dot(w_NK, tl.trans(x_MK), acc_NM, input_precision=PRECISION)
        if BITS == 8 and not GROUP:
            acc_NM *= tl.load(scales + n_N, mask=in_N, other=0.0)[:, None]
    return acc_NM


@triton.jit
def _numbers(nibble_NH, group_bytes, at_N, in_N, CODES: tl.constexpr):
    """int8 numbers of nibbles of one group, with its offsets; those of E2M1 twice."""
    if CODES == E2M1:
        return _twice(nibble_NH)
    elif group_bytes is not None:
        return nibble_NH + tl.load(group_bytes + at_N, mask=in_N, other=0)[:, None]
    else:
        return nibble_NH


@triton.jit
def _twice(code):
    """FP4 numbers, of which `code` has the bits and is negative with them, times two: int8."""
    sizes = tl.full(code.shape, TWICE_E2M1, tl.uint32)
    size = ((sizes >> ((code & 7).to(tl.uint32) * 4)) & 15).to(tl.int8)
    return tl.where(code < 0, -size, size)


@triton.jit
def _scales(scales, group_bytes, at_N, in_N, CODES: tl.constexpr):
    """Of one group; of E2M1 half of 2^(exponent - 127)."""
    if CODES == E2M1:
        exponent_N = tl.load(group_bytes + at_N, mask=in_N, other=0).to(tl.int32) & 255
        return (exponent_N << 23).to(tl.float32, bitcast=True) * 0.5
    else:
        return tl.load(scales + at_N, mask=in_N, other=0.0)


@triton.jit
def _load_rows(x, rows_M, live_M, k_K, IN: tl.constexpr):
    """`[M, K]`: inputs `k_K` of rows, zeros behind the last."""
    return tl.load(
        x + rows_M[:, None] + k_K[None, :], mask=live_M[:, None] & (k_K < IN)[None, :], other=0.0
    )


@triton.jit
def gated(
    both_NM,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
):
    """`[N / 2, M]` of columns that are gate and up in turn:
    `activation(min(gate, LIMIT)) * (clamp(up, -LIMIT, LIMIT) + UP_OFFSET)`; LIMIT 0: none."""
    pairs = tl.reshape(both_NM, (BLOCK_N // 2, 2, BLOCK_M))
    gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    if ACTIVATION == SILU:
        active = gate * tl.sigmoid(gate * ALPHA)
    elif ACTIVATION == GELU:
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)
    return active * (up + UP_OFFSET)
