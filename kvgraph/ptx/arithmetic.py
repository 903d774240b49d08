"""Arithmetic on integers and floating-point numbers (PTX ISA 9.7.1 to 9.7.5).

Float32 results are those of IEEE 754, rounded to nearest even. `fma` multiplies in float64, exactly
for operands of at most 32 bits, and rounds the sum twice (to float64, then to its type): in rare
ties it differs by one in the last place. Approximations (`.approx`, `.full`, ex2, rsqrt) are
NumPy's float32 functions, which are within the bounds of the ISA.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from kvgraph.ptx.operands import TYPES, Decoder, Reader
from kvgraph.ptx.state import Lanes, Mask, State, Step

HALVES = ("f16", "bf16")
PACKED = {
    "f16x2": ("b32", "f16"),
    "bf16x2": ("b32", "bf16"),
    "f32x2": ("b64", "f32"),
    "s16x2": ("b32", "s16"),
    "u16x2": ("b32", "u16"),
}
"""Types of the register and of each value, by the type of two values in one register."""
PAIRED = ("add", "min", "max")
"""Operations on two integers in one register."""

CANONICAL = {
    TYPES[name]: np.array(bits, f"u{TYPES[name].itemsize}").view(TYPES[name])[()]
    for name, bits in (
        ("f16", 0x7FFF),
        ("bf16", 0x7FFF),
        ("f32", 0x7FFFFFFF),
        ("f64", (1 << 63) - 1),
    )
}

TINY = {kind: ml_dtypes.finfo(kind).smallest_normal for kind in CANONICAL}
"""The smallest positive normal number of each floating-point type."""

INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def flushed(x: Lanes) -> Lanes:
    """Replace subnormal numbers by zeros of their sign (.ftz)."""
    return np.where(np.abs(x) < TINY[x.dtype], np.copysign(x.dtype.type(0), x), x)


def canonical(x: Lanes) -> Lanes:
    """Replace each NaN by the one bit pattern that a GPU gives (0x7FFFFFFF for float32)."""
    if not np.isnan(np.add.reduce(x, axis=None)):
        return x
    return np.where(np.isnan(x), CANONICAL[x.dtype], x)


def _divide(x: Lanes, y: Lanes) -> Lanes:
    """Divide toward zero. Division by zero sets all bits, as the hardware does (the ISA does not
    define it)."""
    zero = y == 0
    if np.issubdtype(x.dtype, np.floating):
        quotient: Lanes = x / y
        return quotient
    safe = np.where(zero, y.dtype.type(1), y)
    if x.dtype.kind == "u":
        return np.where(zero, np.array(~np.uint64(0)).astype(x.dtype), x // safe)
    down: Lanes = x // safe
    inexact = (down * safe != x) & ((x < 0) != (safe < 0))
    found: Lanes = np.where(zero, x.dtype.type(-1), down + inexact.astype(x.dtype))
    return found


def _remainder(x: Lanes, y: Lanes) -> Lanes:
    return np.where(y == 0, x, np.fmod(x, np.where(y == 0, y.dtype.type(1), y)))


def _smaller(x: Lanes, y: Lanes) -> Lanes:
    """The smaller value: of a NaN and a number the number, of two zeros the negative one."""
    if x.dtype.kind in "iu":
        return np.minimum(x, y)
    bits = f"u{x.dtype.itemsize}"
    return np.where(x == y, (x.view(bits) | y.view(bits)).view(x.dtype), np.fmin(x, y))


def _larger(x: Lanes, y: Lanes) -> Lanes:
    """The larger value: of a NaN and a number the number, of two zeros the positive one."""
    if x.dtype.kind in "iu":
        return np.maximum(x, y)
    bits = f"u{x.dtype.itemsize}"
    return np.where(x == y, (x.view(bits) & y.view(bits)).view(x.dtype), np.fmax(x, y))


def _fma(x: Lanes, y: Lanes, z: Lanes) -> Lanes:
    wide = np.multiply(x, y, dtype=np.float64) if x.dtype == np.float32 else _wide(x) * _wide(y)
    return (wide + z.astype(np.float64)).astype(x.dtype)


def _wide(x: Lanes) -> Lanes:
    return x.astype(np.float64)


def _high(x: Lanes, y: Lanes) -> Lanes:
    wide = np.dtype(f"{x.dtype.kind}{2 * x.dtype.itemsize}")
    product = np.multiply(x, y, dtype=wide)
    high: Lanes = (product >> wide.type(x.dtype.itemsize * 8)).astype(x.dtype)
    return high


FUNCTIONS: dict[str, Callable[..., Lanes]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _divide,
    "rem": _remainder,
    "min": _smaller,
    "max": _larger,
    "fma": _fma,
    "mad": lambda x, y, z: x * y + z,
    "neg": np.negative,
    "abs": np.abs,
    "ex2": np.exp2,
    "lg2": np.log2,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: (1 / np.sqrt(x)).astype(x.dtype),
    "rcp": lambda x: (x.dtype.type(1) / x).astype(x.dtype),
    "tanh": np.tanh,
}

UNARY = ("neg", "abs", "ex2", "lg2", "sqrt", "rsqrt", "rcp", "tanh")
TERNARY = ("fma", "mad")
ROUNDED = {
    "add": ("rn",), "sub": ("rn",), "mul": ("rn",), "fma": ("rn",),
    "div": ("rn", "full", "approx"), "ex2": ("approx",), "lg2": ("approx",),
    "sqrt": ("rn", "approx"), "rsqrt": ("approx",), "rcp": ("rn", "approx"), "tanh": ("approx",),
}  # fmt: skip
"""Roundings and accuracies that are modelled for floats, by instruction."""


def arithmetic(decoder: Decoder) -> Step:
    """Decode `op[.modifiers].type d, a[, b[, c]]`."""
    name, type_ = decoder.parts[0], decoder.type
    if type_ in INTEGERS:
        return _integer(decoder, name, type_)
    if type_ not in (*HALVES, *PACKED, "f32", "f64"):
        raise decoder.refuse()
    if type_ in ("s16x2", "u16x2") and (name not in PAIRED or len(decoder.parts) != 2):
        raise decoder.refuse()
    if type_ in HALVES and "f32" in decoder.parts:
        return _mixed(decoder, type_)
    decoder.expect_parts(type_, "ftz", *ROUNDED.get(name, ()))
    function = FUNCTIONS[name]
    if "ftz" in decoder.parts:
        function = _flushing(function)
    count = 1 if name in UNARY else 3 if name in TERNARY else 2
    counts = (2, 3) if name in ("min", "max") else (count,)
    decoder.expect_operands(*(1 + each for each in counts))
    if type_ in PACKED:
        return _packed(decoder, function, type_)
    readers = [decoder.read(operand, type_) for operand in decoder.operands[1:]]
    return _apply(decoder, function, readers, canonical)


def _mixed(decoder: Decoder, type_: str) -> Step:
    """Decode `op.rn.f32.type d, a[, b], c` with type f16 or bf16: all operands except the last are
    of this type, which float32 holds exactly."""
    name = decoder.parts[0]
    if name not in ("add", "sub", "fma"):
        raise decoder.refuse()
    decoder.expect_parts("rn", "f32", type_)
    decoder.expect_operands(4 if name == "fma" else 3)
    *halves, last = decoder.operands[1:]
    readers = [_widened(decoder.read(operand, type_)) for operand in halves]
    return _apply(decoder, FUNCTIONS[name], [*readers, decoder.read(last, "f32")], canonical)


def _widened(read: Reader) -> Reader:
    return lambda state: read(state).astype(np.float32)


def _flushing(function: Callable[..., Lanes]) -> Callable[..., Lanes]:
    return lambda *given: flushed(function(*map(flushed, given)))


def _integer(decoder: Decoder, name: str, type_: str) -> Step:
    if name in ("mul", "mad"):
        return _product(decoder, name, type_)
    decoder.expect_parts(type_)
    if name not in ("add", "sub", "div", "rem", "min", "max", "neg", "abs"):
        raise decoder.refuse()
    decoder.expect_operands(2 if name in UNARY else 3)
    readers = [decoder.read(operand, type_) for operand in decoder.operands[1:]]
    return _apply(decoder, FUNCTIONS[name], readers)


def _product(decoder: Decoder, name: str, type_: str) -> Step:
    """Decode mul and mad: the low half, the high half, or all of the product (.wide)."""
    part = decoder.parts[1]
    decoder.expect_parts(type_, "lo", "hi", "wide")
    decoder.expect_operands(4 if name == "mad" else 3)
    readers = [decoder.read(operand, type_) for operand in decoder.operands[1:3]]
    wide = f"{type_[0]}{2 * int(type_[1:])}"
    if name == "mad":
        readers.append(decoder.read(decoder.operands[3], wide if part == "wide" else type_))
    if part == "wide":
        kind = TYPES[wide]

        def whole(x: Lanes, y: Lanes, z: Lanes | None = None) -> Lanes:
            product = np.multiply(x, y, dtype=kind)
            return product if z is None else product + z

        return _apply(decoder, whole, readers)
    if part == "hi":
        if type_.endswith("64") or name == "mad":
            raise decoder.refuse()
        return _apply(decoder, _high, readers)
    return _apply(decoder, FUNCTIONS[name], readers)


def _apply(
    decoder: Decoder,
    function: Callable[..., Lanes],
    readers: list[Reader],
    finish: Callable[[Lanes], Lanes] = lambda x: x,
) -> Step:
    put = decoder.write(decoder.operands[0])
    if len(readers) == 1:
        (a,) = readers
        return lambda s, m: put(s, finish(function(a(s))), m)
    if len(readers) == 2:
        a, b = readers
        return lambda s, m: put(s, finish(function(a(s), b(s))), m)
    a, b, c = readers
    if decoder.parts[0] in ("min", "max"):
        return lambda s, m: put(s, finish(function(function(a(s), b(s)), c(s))), m)
    return lambda s, m: put(s, finish(function(a(s), b(s), c(s))), m)


def _packed(decoder: Decoder, function: Callable[..., Lanes], type_: str) -> Step:
    """Decode an operation on two values in one register, the first in its low half."""
    whole, inner = PACKED[type_]
    kind = TYPES[inner]
    put = decoder.write(decoder.operands[0])
    readers = [decoder.read(operand, whole) for operand in decoder.operands[1:]]

    def step(state: State, mask: Mask) -> None:
        given: list[Lanes] = []
        for read in readers:
            x = np.ascontiguousarray(np.broadcast_to(read(state), state.shape))
            given.append(x.view(kind).reshape(*state.shape, 2))
        pair = np.ascontiguousarray(canonical(function(*given).astype(kind, copy=False)))
        put(state, pair.view(TYPES[whole])[..., 0], mask)

    return step


FAMILY = dict.fromkeys(FUNCTIONS, arithmetic)
