"""Comparison, selection, moves, shuffles (PTX ISA 9.7.6, 9.7.7, 9.7.9), votes (9.7.13)."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import numpy as np

from kvgraph.ptx.arithmetic import FUNCTIONS, canonical
from kvgraph.ptx.operands import TYPES, Decoder, Reader
from kvgraph.ptx.state import LANES, FaultError, Lanes, Mask, State, Step

COMPARISONS: dict[str, Callable[..., Lanes]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal,
    "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
UNORDERED = {f"{name}u": name for name in ("eq", "ne", "lt", "le", "gt", "ge")}
"""Comparisons that are also true if an operand is NaN."""

BOOLEAN = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def setp(decoder: Decoder) -> Step:
    """Decode `setp.comparison[.boolean].type p[|q], a, b[, c]`."""
    type_ = decoder.type
    compared = decoder.parts[1]
    extra = [part for part in decoder.parts[2:-1] if part != "ftz"]
    decoder.expect_operands(4 if extra else 3)
    if len(extra) > 1 or (extra and extra[0] not in BOOLEAN) or "ftz" in decoder.parts:
        raise decoder.refuse()
    test = _comparison(decoder, compared, TYPES[type_].kind in "fV" or type_ == "bf16")
    a, b = (decoder.read(operand, type_) for operand in decoder.operands[1:3])
    first, _, second = decoder.operands[0].partition("|")
    put = decoder.write(first)
    inverse = decoder.write(second) if second else None
    combine = BOOLEAN[extra[0]] if extra else None
    c = decoder.read(decoder.operands[3], "pred") if extra else None

    def step(state: State, mask: Mask) -> None:
        found = np.asarray(test(a(state), b(state)))
        other = ~found
        if combine is not None and c is not None:
            found, other = combine(found, c(state)), combine(other, c(state))
        put(state, found, mask)
        if inverse is not None:
            inverse(state, other, mask)

    return step


def _comparison(decoder: Decoder, name: str, is_float: bool) -> Callable[..., Lanes]:
    if name in ("nan", "num") and is_float:
        wanted = name == "nan"
        return lambda x, y: (np.isnan(x) | np.isnan(y)) == wanted
    if name in UNORDERED and is_float:
        test = COMPARISONS[UNORDERED[name]]
        return lambda x, y: test(x, y) | np.isnan(x) | np.isnan(y)
    if name not in COMPARISONS:
        raise decoder.refuse()
    if name == "ne" and is_float:
        return lambda x, y: (x != y) & ~(np.isnan(x) | np.isnan(y))
    return COMPARISONS[name]


def selp(decoder: Decoder) -> Step:
    decoder.expect_operands(4)
    type_ = decoder.type
    decoder.expect_parts(type_)
    a, b = (decoder.read(operand, type_) for operand in decoder.operands[1:3])
    chosen = decoder.read(decoder.operands[3], "pred")
    put = decoder.write(decoder.operands[0])
    return lambda s, m: put(s, np.where(chosen(s), a(s), b(s)), m)


def mov(decoder: Decoder) -> Step:
    """mov: a value, the address of a symbol, or a register from or to its parts."""
    decoder.expect_operands(2)
    type_ = decoder.type
    decoder.expect_parts(type_)
    to, source = decoder.operands
    if source.startswith("{"):
        return _joined(decoder, decoder.vector(source), type_)
    if to.startswith("{"):
        return _parted(decoder, decoder.vector(to), type_)
    read = decoder.read(source, type_)
    put = decoder.write(to)
    return lambda s, m: put(s, np.asarray(read(s)), m)


def _joined(decoder: Decoder, parts: list[str], type_: str) -> Step:
    bits = int(type_[1:]) // len(parts)
    kind = TYPES[type_]
    readers = [decoder.read(part, f"b{bits}") for part in parts]
    put = decoder.write(decoder.operands[0])

    def step(state: State, mask: Mask) -> None:
        whole = np.zeros(state.shape, kind)
        for place, read in enumerate(readers):
            whole |= read(state).astype(kind) << kind.type(bits * place)
        put(state, whole, mask)

    return step


def _parted(decoder: Decoder, parts: list[str], type_: str) -> Step:
    bits = int(type_[1:]) // len(parts)
    kind, narrow = TYPES[type_], TYPES[f"b{bits}"]
    read = decoder.read(decoder.operands[1], type_)
    writers = [decoder.write(part) for part in parts]

    def step(state: State, mask: Mask) -> None:
        whole = np.asarray(read(state))
        for place, put in enumerate(writers):
            put(state, (whole >> kind.type(bits * place)).astype(narrow), mask)

    return step


def shfl(decoder: Decoder) -> Step:
    """shfl: lane i takes the value of another lane; outside its segment it keeps its own."""
    parts = decoder.parts
    if parts[1] != "sync" or parts[2] not in ("bfly", "idx", "up", "down") or parts[3:] != ["b32"]:
        raise decoder.refuse()
    decoder.expect_operands(5)
    how = parts[2]
    to, _, valid = decoder.operands[0].partition("|")
    value = decoder.read(decoder.operands[1], "b32")
    amount, clamp, members = (decoder.read(operand, "u32") for operand in decoder.operands[2:])
    put = decoder.write(to)
    put_valid = decoder.write(valid) if valid else None

    def step(state: State, mask: Mask) -> None:
        require_members(state, mask, members)
        lane = state.lane.astype(np.int64)
        by = amount(state).astype(np.int64) & 31
        bound = clamp(state).astype(np.int64)
        segment = bound >> 8 & 31
        last = (lane & segment) | (bound & 31 & ~segment)
        first = lane & segment
        source = {
            "bfly": lane ^ by,
            "idx": first | (by & ~segment),
            "up": lane - by,
            "down": lane + by,
        }[how]
        inside = source >= last if how == "up" else source <= last
        source = np.where(inside, source, lane)
        given = np.broadcast_to(value(state), state.shape)
        if mask is not None:
            _require_active(mask, source)
        put(state, np.take_along_axis(given, source, 1), mask)
        if put_valid is not None:
            put_valid(state, np.broadcast_to(inside, state.shape), mask)

    return step


def _require_active(mask: Lanes, source: Lanes) -> None:
    silent = mask & ~np.take_along_axis(mask, source, 1)
    if silent.any():
        raise FaultError(
            "expected a value of a thread that takes part, got one that does not", silent
        )


def require_members(state: State, mask: Mask, members: Reader) -> None:
    """Raise FaultError unless the active threads of a warp are exactly those of their member masks.

    Masks of inactive threads are ignored: their registers may hold any value.
    """
    here = state.active(mask)
    named = np.where(here, members(state).astype(np.uint32), np.uint32(0))
    outside = here & ~_has_lane(state, named)
    if outside.any():
        raise FaultError("expected each thread in its own member mask, got one outside", outside)
    missing = _has_lane(state, np.bitwise_or.reduce(named, axis=1, keepdims=True)) & ~here
    if missing.any():
        raise FaultError(
            "expected all threads of the member mask, got some that are not here", missing
        )


def _has_lane(state: State, members: Lanes) -> Lanes:
    """Whether each lane is in the member mask that it holds."""
    return (members >> state.lane & np.uint32(1)).astype(bool)


def vote(decoder: Decoder) -> Step:
    """vote: all, any, uni and ballot over the active threads of a warp."""
    parts = decoder.parts
    if parts[1] != "sync" or parts[2] not in ("all", "any", "uni", "ballot"):
        raise decoder.refuse()
    decoder.expect_operands(3)
    how = parts[2]
    given = decoder.read(decoder.operands[1], "pred")
    members = decoder.read(decoder.operands[2], "u32")
    put = decoder.write(decoder.operands[0])

    def step(state: State, mask: Mask) -> None:
        require_members(state, mask, members)
        here = state.active(mask)
        value = np.broadcast_to(given(state), state.shape)
        true, false = (here & value), (here & ~value)
        if how == "ballot":
            bits = true.astype(np.uint32) << np.arange(LANES, dtype=np.uint32)
            found = bits.sum(1, dtype=np.uint32, keepdims=True)
        elif how == "any":
            found = true.any(1, keepdims=True)
        elif how == "all":
            found = ~false.any(1, keepdims=True)
        else:
            found = ~(true.any(1, keepdims=True) & false.any(1, keepdims=True))
        put(state, np.broadcast_to(found, state.shape), mask)

    return step


REDUCTIONS: dict[str, Callable[..., Lanes]] = {
    "add": lambda x, **how: np.add.reduce(x, dtype=x.dtype, **how),
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


def redux(decoder: Decoder) -> Step:
    """redux: one value of all threads of the member mask; for floats only min and max."""
    parts, type_ = decoder.parts, decoder.type
    if len(parts) != 4 or parts[1] != "sync" or parts[2] not in REDUCTIONS:
        raise decoder.refuse()
    name, is_float = parts[2], type_ == "f32"
    known = ("min", "max") if is_float or type_ in ("s32", "u32") else ("and", "or", "xor")
    if type_ not in ("s32", "u32", "b32", "f32") or name not in (*known, "add" * (not is_float)):
        raise decoder.refuse()
    decoder.expect_operands(3)
    value = decoder.read(decoder.operands[1], type_)
    members = decoder.read(decoder.operands[2], "u32")
    put = decoder.write(decoder.operands[0])
    of_lanes = _reduction_of_floats(name) if is_float else REDUCTIONS[name]

    def step(state: State, mask: Mask) -> None:
        require_members(state, mask, members)
        here = state.active(mask)
        if (here.any(1) & ~here.all(1)).any():
            raise FaultError("expected all threads of a warp, got a part of them", here)
        found = of_lanes(np.broadcast_to(value(state), state.shape), axis=1, keepdims=True)
        put(state, np.broadcast_to(found, state.shape), mask)

    return step


def _reduction_of_floats(name: str) -> Callable[..., Lanes]:
    function = FUNCTIONS[name]
    return lambda x, axis, keepdims: canonical(reduce(function, x.T))[:, None]


FAMILY = {"redux": redux, "setp": setp, "selp": selp, "mov": mov, "shfl": shfl, "vote": vote}
