"""Conversion of numbers of few bits to halves (float16, bfloat16), in PTX, four bytes at a time.

The compiler would keep each byte or nibble in its own register, and take six to ten instructions
for each. The PTX converts exactly; Triton's interpreter, which has no PTX, converts exactly in
another way.

- Integers: their bits become the mantissa of a half with a fixed exponent; the value of that
  exponent is then subtracted (as FasterTransformer converts int4).
- FP4 and FP8: exponent and mantissa move into a half's fields. The result is too small by a power
  of two, also for subnormals; the product with that power is exact.
"""

import triton
import triton.language as tl

IN_PTX = tl.constexpr(not triton.knobs.runtime.interpret)

# Selectors of `prmt.b32 d, bytes, other`: bytes 0 and 1, or 2 and 3, each below or above a byte of
# `other`.
_UNDER = ("0x4140", "0x4342")
_OVER = ("0x1404", "0x3424")


def _asm(
    kind: str,
    factor: int,
    addend: int,
    selectors: tuple[str, str],
    *,
    pair: str = "",
    four: str = "",
    other: str = "0",
) -> tl.constexpr:
    """PTX that converts four bytes in $2 to two halves each in $0 and $1. `four`: code for all
    bytes. `pair`: code for two bytes that are spread over `p`; a product with `factor` and a sum
    with `addend`, both given as bits, follow."""
    steps = [
        f"prmt.b32 p, w, {other}, {selector}; {pair} fma.rn.{kind}x2 ${number}, p, f, a;"
        for number, selector in enumerate(selectors)
    ]
    constants = f"mov.b32 f, {factor:#06x}{factor:04x}; mov.b32 a, {addend:#06x}{addend:04x};"
    text = f"mov.b32 w, $2; {constants} {four} {' '.join(steps)}"
    return tl.constexpr(f"{{ .reg .b32 w, p, s, f, a; {text} }}")


def _moved(sign: str, shift: str, mask: str) -> str:
    """PTX that moves sign, exponent and mantissa from the places of `_OVER` to a half's fields."""
    return f"{sign} and.b32 s, s, 0x80008000; {shift}; and.b32 p, p, {mask}; or.b32 p, p, s;"


_LOW = "and.b32 w, w, 0x0F0F0F0F;"
_HIGH = "shr.u32 w, w, 4; and.b32 w, w, 0x0F0F0F0F;"
_ABOVE = " xor.b32 w, w, 0x08080808;"  # n + 8
_NIBBLE, _BYTE, _ZERO = "shl.b32 s, p, 4;", "mov.b32 s, p;", 0x8000  # -0: zeros keep their sign


def _int4(kind: str, half: str) -> tl.constexpr:
    if kind == "bf16":  # 128 + 8 + n, less 136
        return _asm(kind, 0x3F80, 0xC308, _UNDER, four=half + _ABOVE, other="0x43434343")
    return _asm(kind, 0x3C00, 0xE408, _UNDER, four=half + _ABOVE, other="0x64646464")  # 1024


def _e2m1(kind: str, half: str) -> tl.constexpr:
    if kind == "bf16":  # times 2^126
        pair = _moved(_NIBBLE, "shr.u32 p, p, 2", "0x01C001C0")
        return _asm(kind, 0x7E80, _ZERO, _OVER, pair=pair, four=half)
    pair = _moved(_NIBBLE, "shl.b32 p, p, 1", "0x0E000E00")
    return _asm(kind, 0x7400, _ZERO, _OVER, pair=pair, four=half)  # times 2^14


def _e4m3(kind: str) -> tl.constexpr:
    if kind == "bf16":  # times 2^120
        pair = _moved(_BYTE, "shr.u32 p, p, 4", "0x07F007F0")
        return _asm(kind, 0x7B80, _ZERO, _OVER, pair=pair)
    pair = _moved(_BYTE, "shr.u32 p, p, 1", "0x3F803F80")
    return _asm(kind, 0x5C00, _ZERO, _OVER, pair=pair)  # times 2^8


INT4_LOW_BF16, INT4_HIGH_BF16 = _int4("bf16", _LOW), _int4("bf16", _HIGH)
INT4_LOW_F16, INT4_HIGH_F16 = _int4("f16", _LOW), _int4("f16", _HIGH)
E2M1_LOW_BF16, E2M1_HIGH_BF16 = _e2m1("bf16", _LOW), _e2m1("bf16", _HIGH)
E2M1_LOW_F16, E2M1_HIGH_F16 = _e2m1("f16", _LOW), _e2m1("f16", _HIGH)
E4M3_BF16, E4M3_F16 = _e4m3("bf16"), _e4m3("f16")


@triton.jit
def as_bf16(x, ASM: tl.constexpr):
    """Convert bytes to bfloat16 by one of the PTX texts above."""
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def as_f16(x, ASM: tl.constexpr):
    """Convert bytes to float16 by one of the PTX texts above."""
    return tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], tl.float16, is_pure=True, pack=4)
