"""Logic, shifts and bit fields (PTX ISA 9.7.8 and, for integers, 9.7.1)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvgraph.ptx.operands import TYPES, Decoder
from kvgraph.ptx.state import Lanes, Step

LOGIC: dict[str, Callable[..., Lanes]] = {
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
}


def logic(decoder: Decoder) -> Step:
    name, type_ = decoder.parts[0], decoder.type
    decoder.expect_parts("pred", "b16", "b32", "b64")
    decoder.expect_operands(2 if name == "not" else 3)
    function, put = LOGIC[name], decoder.write(decoder.operands[0])
    a = decoder.read(decoder.operands[1], type_)
    if name == "not":
        return lambda s, m: put(s, function(a(s)), m)
    b = decoder.read(decoder.operands[2], type_)
    return lambda s, m: put(s, function(a(s), b(s)), m)


def shift(decoder: Decoder) -> Step:
    """shl and shr: amounts above the width give zeros, or the sign of a signed number."""
    name, type_ = decoder.parts[0], decoder.type
    decoder.expect_parts(*(f"{kind}{bits}" for kind in "bus" for bits in (16, 32, 64)))
    decoder.expect_operands(3)
    kind = TYPES[type_]
    most = kind.itemsize * 8 - 1
    x = decoder.read(decoder.operands[1], type_)
    amount = decoder.read(decoder.operands[2], "u32")
    put = decoder.write(decoder.operands[0])
    move = np.left_shift if name == "shl" else np.right_shift

    def shifted(value: Lanes, by: Lanes) -> Lanes:
        moved: Lanes = move(value, np.minimum(by, most).astype(kind))
        if kind.kind == "i" and name == "shr":
            return moved
        return np.where(by > most, np.zeros((), kind), moved)

    if not decoder.is_register(decoder.operands[2]):  # a constant
        by = int(decoder.number(decoder.operands[2], "u32"))
        if by <= most:
            fixed = kind.type(by)
            return lambda s, m: put(s, move(x(s), fixed), m)
    return lambda s, m: put(s, shifted(x(s), amount(s)), m)


def bfe(decoder: Decoder) -> Step:
    """bfe: bits `[position, position + length)` of a; a signed field is extended by its sign.

    Bits beyond the width are the sign of a signed number, and zeros of an unsigned number.
    """
    decoder.expect_parts("u32", "s32", "u64", "s64")
    decoder.expect_operands(4)
    kind = TYPES[decoder.type]
    bits = kind.itemsize * 8
    x = decoder.read(decoder.operands[1], f"s{bits}")
    position, length = (decoder.read(operand, "u32") for operand in decoder.operands[2:])
    put = decoder.write(decoder.operands[0])
    signed, plain = np.dtype(f"i{kind.itemsize}"), np.dtype(f"u{kind.itemsize}")

    def field(value: Lanes, at: Lanes, count: Lanes) -> Lanes:
        at, count = (x.astype(np.int64) & 0xFF for x in (at, count))
        end = np.minimum(at + count, bits)
        up = np.clip(bits - end, 0, bits - 1)
        down = up + at
        left = value.view(plain) << up.astype(plain)
        moved = left.view(signed) if kind.kind == "i" else left
        found = moved >> np.clip(down, 0, bits - 1).astype(moved.dtype)
        empty = (count == 0) | ((at >= bits) & (kind.kind == "u"))
        return np.where(empty, np.zeros((), kind), found.astype(kind))

    return lambda s, m: put(s, field(np.asarray(x(s)), position(s), length(s)), m)


def bfi(decoder: Decoder) -> Step:
    """bfi: put the low bits of a into b at a position."""
    decoder.expect_parts("b32", "b64")
    decoder.expect_operands(5)
    type_ = decoder.type
    kind = TYPES[type_]
    bits = kind.itemsize * 8
    a, b = (decoder.read(operand, type_) for operand in decoder.operands[1:3])
    position, length = (decoder.read(operand, "u32") for operand in decoder.operands[3:])
    put = decoder.write(decoder.operands[0])

    def field(x: Lanes, into: Lanes, at: Lanes, count: Lanes) -> Lanes:
        at, count = (v.astype(np.uint64) & np.uint64(0xFF) for v in (at, count))
        one = np.uint64(1)
        wide = np.where(count >= 64, ~np.uint64(0), (one << np.minimum(count, 63)) - one)
        cover = np.where(at >= bits, np.uint64(0), wide << np.minimum(at, 63)).astype(kind)
        moved = (x.astype(np.uint64) << np.minimum(at, 63)).astype(kind)
        merged: Lanes = (into & ~cover) | (moved & cover)
        return merged

    return lambda s, m: put(s, field(a(s), b(s), position(s), length(s)), m)


def prmt(decoder: Decoder) -> Step:
    """prmt: four of the eight bytes of a (low) and b; bit 3 of a selector repeats a byte's sign."""
    if decoder.parts[1:] != ["b32"]:
        raise decoder.refuse()
    decoder.expect_operands(4)
    a, b, selector = (decoder.read(operand, "b32") for operand in decoder.operands[1:])
    put = decoder.write(decoder.operands[0])

    def permuted(low: Lanes, high: Lanes, chosen: Lanes) -> Lanes:
        both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
        out = np.zeros(np.broadcast(both, chosen).shape, np.uint32)
        for place in range(4):
            nibble = chosen >> np.uint32(4 * place) & np.uint32(15)
            byte = both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))
            byte = byte.astype(np.uint32) & np.uint32(255)
            sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
            byte = np.where(nibble & np.uint32(8), sign, byte)
            out |= byte << np.uint32(8 * place)
        return out

    return lambda s, m: put(s, permuted(a(s), b(s), selector(s)), m)


def lop3(decoder: Decoder) -> Step:
    """lop3: any function of three bits, given by its table of eight bits."""
    if decoder.parts[1:] != ["b32"]:
        raise decoder.refuse()
    decoder.expect_operands(5)
    readers = [decoder.read(operand, "b32") for operand in decoder.operands[1:4]]
    table = int(decoder.number(decoder.operands[4], "u32"))
    put = decoder.write(decoder.operands[0])

    def function(x: Lanes, y: Lanes, z: Lanes) -> Lanes:
        out = np.zeros(np.broadcast(x, y, z).shape, np.uint32)
        for row in (row for row in range(8) if table >> row & 1):
            term = x if row & 4 else ~x
            out |= term & (y if row & 2 else ~y) & (z if row & 1 else ~z)
        return out

    return lambda s, m: put(s, function(*(read(s) for read in readers)), m)


def count(decoder: Decoder) -> Step:
    """popc, clz and brev of 32 bits."""
    name = decoder.parts[0]
    if decoder.parts[1:] != ["b32"]:
        raise decoder.refuse()
    decoder.expect_operands(2)
    x, put = decoder.read(decoder.operands[1], "b32"), decoder.write(decoder.operands[0])

    def counted(value: Lanes) -> Lanes:
        bits = value[..., None] >> np.arange(32, dtype=np.uint32) & np.uint32(1)
        if name == "popc":
            found = bits.sum(-1)
        elif name == "brev":
            found = (bits << np.arange(31, -1, -1, dtype=np.uint32)).sum(-1)
        else:
            found = np.where(bits.any(-1), bits[..., ::-1].argmax(-1), 32)
        counts: Lanes = found.astype(np.uint32)
        return counts

    return lambda s, m: put(s, counted(np.asarray(x(s))), m)


FAMILY = {
    **dict.fromkeys(LOGIC, logic),
    "shl": shift,
    "shr": shift,
    "bfe": bfe,
    "bfi": bfi,
    "prmt": prmt,
    "lop3": lop3,
    "popc": count,
    "clz": count,
    "brev": count,
}
