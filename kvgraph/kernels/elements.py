"""Device functions on elements: quantised storage, RMSNorm and rotary embedding of heads."""

import triton
import triton.language as tl

from kvgraph.kernels.halves import E4M3_BF16, E4M3_F16, IN_PTX, as_bf16, as_f16


@triton.jit
def decode(x, QUANTIZED: tl.constexpr, FP8_NATIVE: tl.constexpr, dtype: tl.constexpr):
    """Convert stored elements to `dtype`, before their scale. float8_e4m3fn is given as bytes.

    A byte of NaN becomes 480 if no instruction decodes it; the scale of its group is NaN.
    """
    if QUANTIZED == "float8_e4m3fn":
        if IN_PTX and dtype == tl.bfloat16:
            return as_bf16(x, E4M3_BF16)
        elif IN_PTX and dtype == tl.float16:
            return as_f16(x, E4M3_F16)
        elif FP8_NATIVE:
            return x.to(tl.float8e4nv, bitcast=True).to(tl.float16).to(dtype)
        else:
            bits = x.to(tl.uint16)
            half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
            return (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def round_half_even(x):
    """Round float32 of magnitude below 2^22 to the nearest integer, ties to even."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def encode(x, QUANTIZED: tl.constexpr, dtype: tl.constexpr):
    """Convert float32 to its stored form: int8 or float8_e4m3fn bytes (ties to even), or a float
    `dtype`."""
    if QUANTIZED == "int8":
        return round_half_even(x).to(tl.int8)
    elif QUANTIZED == "float8_e4m3fn":
        size = tl.minimum(tl.abs(x), 448.0)
        bits = size.to(tl.uint32, bitcast=True)
        # Normal: drop 20 mantissa bits with rounding, rebias the exponent from 127 to 7.
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - 7) << 3)
        # Below 2^-6 the spacing is 2^-9; eight steps are the smallest normal, in bits too.
        tiny = round_half_even(size * 512.0).to(tl.uint32)
        code = tl.where(size < 0.015625, tiny, normal)
        code = tl.where(x != x, 0x7F, code)
        sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
        return (code | sign).to(tl.uint8)
    else:
        return x.to(dtype)


@triton.jit
def prepare(
    x,
    pointers,
    mask,
    width,
    norm,
    cos_sin,
    position,
    HEAD_DIM: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Normalise rows of heads `x [M, W]`, loaded from `pointers` under `mask`, with the weight
    `norm [HEAD_DIM]` (if NORM), and rotate them to `position [M]` (if ROTARY).

    `width`: `arange(0, W)`. Elements from ROTARY on are not rotated. The result has x's dtype.
    """
    wide = x.to(tl.float32)
    if NORM:
        rate = tl.rsqrt(tl.sum(wide * wide, 1) / HEAD_DIM + EPSILON)[:, None]
        weight = tl.load(norm + width, mask=width < HEAD_DIM, other=0.0).to(tl.float32) + OFFSET
        wide = wide * rate * weight[None, :]
    if ROTARY:
        half: tl.constexpr = ROTARY // 2
        if INTERLEAVED:
            angle = width // 2
            second = (width % 2) == 1
            away = tl.where(second, -1, 1)
        else:
            angle = width % half
            second = width >= half
            away = tl.where(second, -half, half)
        turns = width < ROTARY
        away = tl.where(turns, away, 0)
        live = mask & turns[None, :]
        partner = tl.load(pointers + away[None, :], mask=live, other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(norm + width + away, mask=turns, other=0.0).to(tl.float32) + OFFSET
            partner = partner * rate * weight[None, :]
        table = position.to(tl.int64)[:, None] * ROTARY + angle[None, :]
        cos = tl.load(cos_sin + table, mask=live, other=1.0)
        sin = tl.load(cos_sin + table + half, mask=live, other=0.0)
        sin = tl.where(second[None, :], sin, -sin)
        wide = tl.where(live, wide * cos + partner * sin, wide)
    return wide.to(x.dtype)
