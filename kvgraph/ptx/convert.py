"""cvt: conversion between integers, floats and pairs of floats (PTX ISA 9.7.9, `cvt`)."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np

from kvgraph.ptx.arithmetic import flushed
from kvgraph.ptx.operands import TYPES, Decoder, Kind
from kvgraph.ptx.state import Lanes, Step

FLOATS = ("f16", "bf16", "f32", "f64")
PAIRS = {"f16x2": np.dtype(np.float16), "bf16x2": np.dtype(ml_dtypes.bfloat16)}
EIGHTS = {
    "e4m3x2": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0),
    "e5m2x2": (np.dtype(ml_dtypes.float8_e5m2), 57344.0),
}
"""Dtype of one value, and the largest finite number, by type of a pair."""

ROUNDINGS = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def convert(decoder: Decoder) -> Step:
    """Decode `cvt[.rounding][.ftz][.satfinite].to.from d, a[, b]`."""
    to, type_ = decoder.parts[-2], decoder.type
    if to in PAIRS or to in EIGHTS or type_ in EIGHTS:
        return _pair(decoder, to, type_)
    if to not in TYPES or type_ not in TYPES:
        raise decoder.refuse()
    decoder.expect_operands(2)
    read = decoder.read(decoder.operands[1], type_)
    function = _function(decoder, to, type_)
    store = _stored(decoder, to)
    put = decoder.write(decoder.operands[0])
    return lambda s, m: put(s, store(function(read(s))), m)


def _function(decoder: Decoder, to: str, type_: str) -> Callable[[Lanes], Lanes]:
    kind = TYPES[to]
    modifiers = decoder.parts[1:-2]
    if to in FLOATS and type_ in FLOATS:
        decoder.expect_parts(to, type_, "rn", "ftz")
        if kind.itemsize < TYPES[type_].itemsize and "rn" not in modifiers:
            raise decoder.refuse()
        if "ftz" in modifiers and "f32" in (to, type_):
            return lambda x: flushed(x.astype(kind)) if to == "f32" else flushed(x).astype(kind)
        return lambda x: x.astype(kind)
    if to in FLOATS:
        decoder.expect_parts(to, type_, "rn")
        return lambda x: x.astype(kind)
    if type_ in FLOATS:
        if len(modifiers) != 1 or modifiers[0] not in ROUNDINGS:
            raise decoder.refuse()
        rounded = ROUNDINGS[modifiers[0]]
        bits = 8 * kind.itemsize
        most = type_ == "f64" or bits == 64
        of_nan = np.array(1 << bits - 1 if most else 0, f"u{kind.itemsize}").view(kind)
        return lambda x: _to_integer(rounded(x.astype(np.float64)), kind, of_nan)
    if modifiers:
        raise decoder.refuse()
    return lambda x: x.astype(kind)


def _to_integer(x: Lanes, kind: Kind, of_nan: Lanes) -> Lanes:
    """The nearest integer in range; `of_nan` for a NaN."""
    limits = np.iinfo(kind)
    low, high = float(limits.min), float(limits.max)
    inside = np.clip(x, low, high)
    # 2^63 - 1 is no float64: its neighbour 2^63 would wrap.
    found = np.where(inside >= high, kind.type(limits.max), inside.astype(kind))
    return np.where(np.isnan(x), of_nan, found)


def _stored(decoder: Decoder, to: str) -> Callable[[Lanes], Lanes]:
    """Function that extends a result to a wider register, by its sign if signed (PTX ISA 9.4.1)."""
    register = decoder.operands[0]
    if not decoder.is_register(register):
        return lambda x: x
    wide = decoder.kind(register)
    kind = TYPES[to]
    if kind.itemsize == wide.itemsize:
        return lambda x: x
    if kind.itemsize > wide.itemsize or kind.kind not in "iu":
        raise decoder.refuse(f"{register} to hold {to}")
    extended = np.dtype(f"{kind.kind}{wide.itemsize}")
    return lambda x: x.astype(extended)


def _pair(decoder: Decoder, to: str, type_: str) -> Step:
    """Decode a conversion of two values in one register; the second of two operands is the low
    half."""
    put = decoder.write(decoder.operands[0])
    if to in PAIRS and type_ == "f32":
        decoder.expect_parts(to, type_, "rn")
        decoder.expect_operands(3)
        kind = PAIRS[to]
        high, low = (decoder.read(operand, "f32") for operand in decoder.operands[1:])

        def packed(x: Lanes) -> Lanes:
            return x.astype(kind).view(np.uint16).astype(np.uint32)

        return lambda s, m: put(s, packed(high(s)) << np.uint32(16) | packed(low(s)), m)
    if to in EIGHTS and type_ == "f32":
        decoder.expect_parts(to, type_, "rn", "satfinite")
        decoder.expect_operands(3)
        eight, most = EIGHTS[to]
        high, low = (decoder.read(operand, "f32") for operand in decoder.operands[1:])

        def saturated(x: Lanes) -> Lanes:
            inside = np.clip(x, np.float32(-most), np.float32(most))
            return inside.astype(eight).view(np.uint8).astype(np.uint16)

        return lambda s, m: put(s, saturated(high(s)) << np.uint16(8) | saturated(low(s)), m)
    if to == "f16x2" and type_ in EIGHTS:
        decoder.expect_parts(to, type_, "rn")
        decoder.expect_operands(2)
        eight = EIGHTS[type_][0]
        read = decoder.read(decoder.operands[1], "b16")

        def halves(x: Lanes) -> Lanes:
            parts = [(x >> np.uint16(8 * i)).astype(np.uint8).view(eight) for i in (0, 1)]
            low, high = (p.astype(np.float16).view(np.uint16).astype(np.uint32) for p in parts)
            both: Lanes = low | high << np.uint32(16)
            return both

        return lambda s, m: put(s, halves(read(s)), m)
    raise decoder.refuse()


FAMILY = {"cvt": convert}
