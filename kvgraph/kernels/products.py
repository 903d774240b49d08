"""Device functions of matrix products: rows of a weight times rows of activations.

A weight is stored with its inputs next to each other, one row per output column: in the
activations' dtype, as bytes (int8, FP8), or as nibbles (integers, FP4). It is the first factor,
which tensor cores take from registers, where bytes and nibbles are converted; this way a tile of
few rows wastes little.

Legend: M rows of activations, N output columns, K inputs, H half a span of inputs.
"""

import triton
import triton.language as tl

from kvgraph.kernels.elements import decode
from kvgraph.kernels.halves import (
    E2M1_HIGH_BF16,
    E2M1_HIGH_F16,
    E2M1_LOW_BF16,
    E2M1_LOW_F16,
    IN_PTX,
    INT4_HIGH_BF16,
    INT4_HIGH_F16,
    INT4_LOW_BF16,
    INT4_LOW_F16,
    as_bf16,
    as_f16,
)

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)

E2M1 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
EIGHTHS = tl.constexpr(5)

TWICE_E2M1 = tl.constexpr(0xC8643210)
"""Nibble m of this constant is twice the magnitude of FP4 number m."""


@triton.jit
def product(
    x,
    row_M,
    live_M,
    weight,
    scales,
    group_bytes,
    n_N,
    begin,
    end,
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
    SLICES: tl.constexpr,
):
    """Product `[N, M]` in float32: columns `n_N` of one weight `[OUT, IN]` times rows `row_M` of x,
    over the inputs [begin, end), which begin and end at blocks of the weight.

    BITS: 0 for a weight of x's dtype, 8 for bytes, 4 for nibbles. Scales `[groups, OUT]`: one per
    GROUP inputs, or one for all inputs if 0. A step loads BLOCK_K bytes of a row, a divisor of
    GROUP. For nibbles they are one span: its byte h holds inputs h and h + BLOCK_K, so that both
    halves meet contiguous inputs of x. A span is one group, or two.

    x may have the weight's kind of bytes (int8, or FP8 as uint8): tensor cores multiply both
    without a conversion, and x's row scales are not applied to the result.

    SLICES: parts of the inputs that are summed separately; 1 in float32, and for [begin, end) that
    is not all inputs. `end` is a run-time value: the compiler would unroll a loop of two known
    steps, and write accumulators behind the fence that products of four warps need.
    """
    rows_M = row_M.to(tl.int64) * IN
    in_N = n_N < OUT
    if SLICES > 1:
        acc_SNM = _product_of_slices(
            x, rows_M, live_M, weight, scales, group_bytes, n_N, in_N, end, IN, OUT, BITS, GROUP,
            CODES, FP8_NATIVE, BLOCK_M, BLOCK_N, BLOCK_K, SLICES,
        )  # fmt: skip
        acc_NM = tl.sum(acc_SNM, 0)
        if BITS == 8 and not GROUP:
            acc_NM *= tl.load(scales + n_N, mask=in_N, other=0.0)[:, None]
    else:
        acc_NM = _product_of_all(
            x, rows_M, live_M, weight, scales, group_bytes, n_N, in_N, begin, end, IN, OUT, BITS,
            GROUP, CODES, FP8_NATIVE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    return acc_NM


@triton.jit
def _product_of_all(
    x,
    rows_M,
    live_M,
    weight,
    scales,
    group_bytes,
    n_N,
    in_N,
    begin,
    end,
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
    k = tl.arange(0, BLOCK_K)
    acc_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    if BITS == 4:
        SPAN: tl.constexpr = 2 * BLOCK_K
        SPANS: tl.constexpr = (IN + SPAN - 1) // SPAN
        for span in range(begin // SPAN, (end + SPAN - 1) // SPAN):
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
            low_NH = _numbers(byte_NH, False, CODES, x_MH.dtype)
            low_NH = _with_offsets(low_NH, group_bytes, low_N, in_N, CODES)
            high_NH = _numbers(byte_NH, True, CODES, x_MH.dtype)
            high_NH = _with_offsets(high_NH, group_bytes, high_N, in_high_N, CODES)
            part_NM = tl.dot(low_NH, tl.trans(x_MH), input_precision=PRECISION)
            if GROUP < SPAN:
                acc_NM += part_NM * _scales(scales, group_bytes, low_N, in_N, CODES)[:, None]
                part_NM = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            part_NM = tl.dot(high_NH, tl.trans(y_MH), part_NM, input_precision=PRECISION)
            acc_NM += part_NM * _scales(scales, group_bytes, high_N, in_high_N, CODES)[:, None]
    else:
        if BITS and not GROUP:
            scale_N = tl.load(scales + n_N, mask=in_N, other=0.0)
        for start in range(begin, end, BLOCK_K):
            x_MK = _load_rows(x, rows_M, live_M, start + k, IN)
            at_NK = n_N.to(tl.int64)[:, None] * IN + (start + k)[None, :]
            mask_NK = in_N[:, None] & (start + k < IN)[None, :]
            w_NK = tl.load(weight + at_NK, mask=mask_NK, other=0)
            w_NK, x_MK = _factors(w_NK, x_MK, CODES, FP8_NATIVE)
            if BITS:
                if GROUP:
                    at_N = start // GROUP * OUT + n_N
                    scale_N = _scales(scales, group_bytes, at_N, in_N, CODES)
                # Scaling here waits for the product: the next step's numbers may be written to the
                # registers that the product reads (kvgraph/kernels/sass.py).
                part_NM = tl.dot(w_NK, tl.trans(x_MK), input_precision=PRECISION)
                acc_NM += part_NM.to(tl.float32) * scale_N[:, None]
            else:
                acc_NM = tl.dot(w_NK, tl.trans(x_MK), acc_NM, input_precision=PRECISION)
    return acc_NM


@triton.jit
def _product_of_slices(
    x,
    rows_M,
    live_M,
    weight,
    scales,
    group_bytes,
    n_N,
    in_N,
    inputs,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Product `[S, N, M]`: each slice sums every SLICES-th block of inputs. Slices go to different
    warps, so that few columns keep many warps busy and many bytes in flight."""
    s = tl.arange(0, SLICES)
    k = tl.arange(0, BLOCK_K)[None, None, :]
    rows_M = rows_M[None, :, None]
    live_M = live_M[None, :, None]
    acc_SNM = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
    if BITS == 4:
        SPAN: tl.constexpr = 2 * BLOCK_K
        SPANS: tl.constexpr = (IN + SPAN - 1) // SPAN
        rows_N = (n_N.to(tl.int64) * (SPANS * BLOCK_K))[None, :, None]
        for first in range(0, (inputs + SPAN - 1) // SPAN, SLICES):
            span_S = first + s
            in_SN = (span_S < SPANS)[:, None] & in_N[None, :]
            at_SNH = rows_N + (span_S * BLOCK_K)[:, None, None] + k
            byte_SNH = tl.load(weight + at_SNH, mask=in_SN[:, :, None], other=0)
            low_S = span_S * SPAN
            high_S = low_S + BLOCK_K
            low_SN = (low_S // GROUP * OUT)[:, None] + n_N[None, :]
            high_SN, in_high_SN = low_SN, in_SN
            if GROUP < SPAN:
                high_SN += OUT
                in_high_SN = in_SN & (high_S < IN)[:, None]
            at_SK = low_S[:, None, None] + k
            x_SMH = tl.load(x + rows_M + at_SK, mask=live_M & (at_SK < IN), other=0.0)
            at_SK = high_S[:, None, None] + k
            y_SMH = tl.load(x + rows_M + at_SK, mask=live_M & (at_SK < IN), other=0.0)
            low_SNH = _numbers(byte_SNH, False, CODES, x_SMH.dtype)
            low_SNH = _with_offsets(low_SNH, group_bytes, low_SN, in_SN, CODES)
            high_SNH = _numbers(byte_SNH, True, CODES, x_SMH.dtype)
            high_SNH = _with_offsets(high_SNH, group_bytes, high_SN, in_high_SN, CODES)
            part_SNM = tl.dot(low_SNH, tl.permute(x_SMH, (0, 2, 1)))
            if GROUP < SPAN:
                acc_SNM += part_SNM * _scales(scales, group_bytes, low_SN, in_SN, CODES)[:, :, None]
                part_SNM = tl.zeros((SLICES, BLOCK_N, BLOCK_M), tl.float32)
            part_SNM = tl.dot(high_SNH, tl.permute(y_SMH, (0, 2, 1)), part_SNM)
            scale_SN = _scales(scales, group_bytes, high_SN, in_high_SN, CODES)
            acc_SNM += part_SNM * scale_SN[:, :, None]
    else:
        rows_N = (n_N.to(tl.int64) * IN)[None, :, None]
        for start in range(0, inputs, SLICES * BLOCK_K):
            first_S = start + s * BLOCK_K
            at_SK = first_S[:, None, None] + k
            in_K = at_SK < IN
            x_SMK = tl.load(x + rows_M + at_SK, mask=live_M & in_K, other=0.0)
            w_SNK = tl.load(weight + rows_N + at_SK, mask=in_N[None, :, None] & in_K, other=0)
            w_SNK, x_SMK = _factors(w_SNK, x_SMK, CODES, FP8_NATIVE)
            x_SKM = tl.permute(x_SMK, (0, 2, 1))
            if GROUP:
                part_SNM = tl.dot(w_SNK, x_SKM).to(tl.float32)
                at_SN = (first_S // GROUP * OUT)[:, None] + n_N[None, :]
                in_SN = (first_S < IN)[:, None] & in_N[None, :]
                scale_SN = _scales(scales, group_bytes, at_SN, in_SN, CODES)
                acc_SNM += part_SNM * scale_SN[:, :, None]
            else:
                acc_SNM = tl.dot(w_SNK, x_SKM, acc_SNM)
    return acc_SNM


@triton.jit
def _factors(w, x, CODES: tl.constexpr, FP8_NATIVE: tl.constexpr):
    """Operands of a tensor core, from a weight's bytes (or numbers) and x."""
    if x.dtype == tl.uint8:
        return w.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True)
    else:
        return _bytes(w, CODES, FP8_NATIVE, x.dtype), x


@triton.jit
def _bytes(w, CODES: tl.constexpr, FP8_NATIVE: tl.constexpr, dtype: tl.constexpr):
    if CODES == E4M3:
        return decode(w, "float8_e4m3fn", FP8_NATIVE, dtype)
    else:
        return w.to(dtype)


@triton.jit
def _numbers(byte, HIGH: tl.constexpr, CODES: tl.constexpr, dtype: tl.constexpr):
    """Numbers of the low or high nibbles of bytes."""
    if CODES == E2M1:
        return _e2m1(byte, HIGH, dtype)
    else:
        return _int4(byte, HIGH, dtype)


@triton.jit
def _with_offsets(numbers, group_bytes, at, live, CODES: tl.constexpr):
    """Add the offsets at `at` to numbers `[..., H]` of one group each; the sum is exact: it has at
    most 8 bits."""
    if CODES == E2M1 or group_bytes is None:
        return numbers
    else:
        offsets = tl.expand_dims(tl.load(group_bytes + at, mask=live, other=0), -1)
        offsets = offsets.to(tl.float32) * 0.125 if CODES == EIGHTHS else offsets
        if IN_PTX:
            return numbers + offsets.to(numbers.dtype)
        else:  # Triton's interpreter does not add bfloat16
            return (numbers.to(tl.float32) + offsets.to(tl.float32)).to(numbers.dtype)


@triton.jit
def _int4(byte, HIGH: tl.constexpr, dtype: tl.constexpr):
    if IN_PTX and dtype == tl.bfloat16:
        return as_bf16(byte, INT4_HIGH_BF16 if HIGH else INT4_LOW_BF16)
    elif IN_PTX and dtype == tl.float16:
        return as_f16(byte, INT4_HIGH_F16 if HIGH else INT4_LOW_F16)
    elif HIGH:
        return (byte >> 4).to(dtype)
    else:
        return ((byte << 4) >> 4).to(dtype)


@triton.jit
def _e2m1(byte, HIGH: tl.constexpr, dtype: tl.constexpr):
    if IN_PTX and dtype == tl.bfloat16:
        return as_bf16(byte, E2M1_HIGH_BF16 if HIGH else E2M1_LOW_BF16)
    elif IN_PTX and dtype == tl.float16:
        return as_f16(byte, E2M1_HIGH_F16 if HIGH else E2M1_LOW_F16)
    else:
        code = byte >> 4 if HIGH else (byte << 4) >> 4
        sizes = tl.full(code.shape, TWICE_E2M1, tl.uint32)
        size = ((sizes >> ((code & 7).to(tl.uint32) * 4)) & 15).to(tl.float32) * 0.5
        return tl.where(code < 0, -size, size).to(dtype)


@triton.jit
def _scales(scales, group_bytes, at_N, in_N, CODES: tl.constexpr):
    """Scales of one group; for E2M1 2^(exponent - 127)."""
    if CODES == E2M1:
        exponent_N = tl.load(group_bytes + at_N, mask=in_N, other=0).to(tl.int32) & 255
        return (exponent_N << 23).to(tl.float32, bitcast=True)
    else:
        return tl.load(scales + at_N, mask=in_N, other=0.0)


@triton.jit
def stored_nibbles(
    byte_NH,
    HIGH: tl.constexpr,
    scales,
    group_bytes,
    at_N,
    in_N,
    CODES: tl.constexpr,
    dtype: tl.constexpr,
):
    """Weights of the low or high nibbles of bytes, in `dtype`; columns' scales are at `at_N`."""
    w_NH = _with_offsets(_numbers(byte_NH, HIGH, CODES, dtype), group_bytes, at_N, in_N, CODES)
    return _scaled(w_NH, _scales(scales, group_bytes, at_N, in_N, CODES), dtype)


@triton.jit
def stored_bytes(
    byte_NK,
    scales,
    group_bytes,
    at_N,
    in_N,
    CODES: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    dtype: tl.constexpr,
):
    """Weights of bytes, in `dtype`; the columns' scales are at `at_N`."""
    w_NK = _bytes(byte_NK, CODES, FP8_NATIVE, dtype)
    return _scaled(w_NK, _scales(scales, group_bytes, at_N, in_N, CODES), dtype)


@triton.jit
def _scaled(w_NK, scale_N, dtype: tl.constexpr):
    return (w_NK.to(tl.float32) * scale_N[:, None]).to(dtype)


@triton.jit
def _load_rows(x, rows_M, live_M, k_K, IN: tl.constexpr):
    """Load `[M, K]`: inputs `k_K` of rows, zeros after the last input."""
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
    """Join columns that alternate gate and up, `[N, M]`, to `[N / 2, M]`:
    `activation(min(gate, LIMIT)) * (clamp(up, -LIMIT, LIMIT) + UP_OFFSET)`; LIMIT 0 means none."""
    pairs = tl.reshape(both_NM, (BLOCK_N // 2, 2, BLOCK_M))
    gate, up = tl.split(tl.permute(pairs, (0, 2, 1)))
    if LIMIT > 0:
        # Not tl.minimum, which drops a NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    if ACTIVATION == SILU:
        active = gate * tl.sigmoid(gate * ALPHA)
    elif ACTIVATION == GELU:
        active = gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        active = gate * tl.sigmoid(2.0 * inner)
    return active * (up + UP_OFFSET)
