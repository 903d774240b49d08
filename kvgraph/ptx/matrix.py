"""Matrices of a warp: ldmatrix, stmatrix and mma.sync (PTX ISA 9.7.14: fragments by lane).

Products are exact. Sums are in float32, in NumPy's order, which differs from the hardware's.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kvgraph.ptx.operands import Decoder, Kind, Reader
from kvgraph.ptx.shared import RaceError
from kvgraph.ptx.state import LANES, FaultError, Lanes, Mask, State, Step

COUNTS = {"x1": 1, "x2": 2, "x4": 4}
ROW_BYTES = 16
LANE = np.arange(LANES)
ROW, PAIR = LANE // 4, LANE % 4

INPUTS: dict[str, Kind] = {
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8),
}
DEPTHS = {"f16": (8, 16), "bf16": (8, 16), "e4m3": (32,), "e5m2": (32,), "s8": (32,), "u8": (32,)}
"""K of `mma.sync.m16n8k*` by input type."""


def whole_warps(state: State, mask: Mask) -> npt.NDArray[np.intp]:
    """Indices of the warps that take the step; FaultError if only a part of a warp does."""
    if mask is None:
        return np.arange(state.shape[0])
    every = np.logical_and.reduce(mask, axis=1)
    parted = np.logical_or.reduce(mask, axis=1) & ~every
    if parted.any():
        said = "expected all threads of a warp, got a part of them"
        raise FaultError(said, mask & parted[:, None])
    return np.flatnonzero(every)


def ldmatrix(decoder: Decoder) -> Step:
    """ldmatrix: load 8 x 8 matrices of 16 bits; lanes 0-7, 8-15, ... give the rows' addresses."""
    count, transposed = _shape(decoder)
    puts = [decoder.write(name) for name in decoder.vector(decoder.operands[0])]
    address = decoder.address(decoder.operands[1], "u32")
    if len(puts) != count:
        raise decoder.refuse(f"{count} registers")

    def step(state: State, mask: Mask) -> None:
        warps = whole_warps(state, mask)
        places, code = _places(state, warps, address(state), count)
        if state.shared.checks:
            try:
                state.shared.read(places.reshape(-1), ROW_BYTES, code.reshape(-1))
            except RaceError as error:
                raise _fault(state, warps, count, error) from None
        rows = state.shared.views[ROW_BYTES][places // ROW_BYTES].view(np.uint16)
        matrices = rows.reshape(len(warps), count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(len(warps), count, LANES)
        for place, put in enumerate(puts):
            put(state, spread(state, warps, pairs[:, place]), mask)

    return step


def stmatrix(decoder: Decoder) -> Step:
    """stmatrix: store 8 x 8 matrices of 16 bits, the reverse of ldmatrix."""
    count, transposed = _shape(decoder)
    readers = [decoder.read(name, "b32") for name in decoder.vector(decoder.operands[1])]
    address = decoder.address(decoder.operands[0], "u32")
    if len(readers) != count:
        raise decoder.refuse(f"{count} registers")

    def step(state: State, mask: Mask) -> None:
        warps = whole_warps(state, mask)
        places, code = _places(state, warps, address(state), count)
        given = [np.broadcast_to(read(state), state.shape)[warps] for read in readers]
        pairs = np.stack(given, 1)
        matrices = np.ascontiguousarray(pairs).view(np.uint16).reshape(len(warps), count, 8, 8)
        if transposed:
            matrices = matrices.swapaxes(2, 3)
        rows = np.ascontiguousarray(matrices).view(np.uint8).reshape(-1, ROW_BYTES)
        try:
            state.shared.write(places.reshape(-1), ROW_BYTES, code.reshape(-1), rows)
        except RaceError as error:
            raise _fault(state, warps, count, error) from None

    return step


def _shape(decoder: Decoder) -> tuple[int, bool]:
    known = ("sync", "aligned", "m8n8", *COUNTS, "trans", "shared", "shared::cta", "b16")
    decoder.expect_parts(*known)
    decoder.expect_operands(2)
    counts = [COUNTS[part] for part in decoder.parts if part in COUNTS]
    if len(counts) != 1 or "m8n8" not in decoder.parts or decoder.type != "b16":
        raise decoder.refuse()
    return counts[0], "trans" in decoder.parts


def _places(
    state: State, warps: npt.NDArray[np.intp], address: Lanes, count: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Check the rows' addresses; return their places `[warps, 8 * count]` and warps' codes."""
    rows = np.broadcast_to(address, state.shape)[warps, : 8 * count]
    if state.counters.profile:
        state.counters.shared_access(rows, ROW_BYTES, None)
    bad = rows % ROW_BYTES != 0
    if bad.any():
        raise _fault(
            state,
            warps,
            count,
            RaceError(f"expected rows at multiples of 16, got {rows[bad][0]:#x}", bad.reshape(-1)),
        )
    try:
        state.shared.require_inside(rows.reshape(-1), ROW_BYTES)
    except RaceError as error:
        raise _fault(state, warps, count, error) from None
    code = np.broadcast_to(state.code()[warps], rows.shape)
    return rows + state.block[warps] * state.shared.stride, code


def _fault(state: State, warps: npt.NDArray[np.intp], count: int, error: RaceError) -> FaultError:
    lanes = np.zeros(state.shape, bool)
    lanes[warps, : 8 * count] = error.lanes.reshape(len(warps), 8 * count)
    return FaultError(str(error), lanes)


def spread(state: State, warps: npt.NDArray[np.intp], values: Lanes) -> Lanes:
    """Values of all warps, from the values of some; zeros for the others."""
    if len(warps) == state.shape[0]:
        return values
    out = np.zeros(state.shape, values.dtype)
    out[warps] = values
    return out


def mma(decoder: Decoder) -> Step:
    """Decode `mma.sync.aligned.m16n8kK.row.col{.satfinite}.d.a.b.c {D}, {A}, {B}, {C}`.
    `satfinite`: sums of integers are clamped to int32."""
    parts, saturates = list(decoder.parts), decoder.parts[6:7] == ["satfinite"]
    if saturates:
        del parts[6]
    decoder.expect_operands(4)
    if parts[1:3] != ["sync", "aligned"] or parts[4:6] != ["row", "col"] or len(parts) != 10:
        raise decoder.refuse()
    shape, (d_type, a_type, b_type, c_type) = parts[3], parts[6:]
    depth = next((k for k in DEPTHS.get(a_type, ()) if shape == f"m16n8k{k}"), 0)
    sums = "s32" if a_type in ("s8", "u8") else "f32"
    if not depth or b_type != a_type or d_type not in (sums, "f16") or c_type != d_type:
        raise decoder.refuse()
    if (d_type == "f16" and a_type != "f16") or (saturates and sums != "s32"):
        raise decoder.refuse()
    kind = INPUTS[a_type]
    a, b = (
        [decoder.read(name, "b32") for name in decoder.vector(o)] for o in decoder.operands[1:3]
    )
    c = [decoder.read(name, "b32") for name in decoder.vector(decoder.operands[3])]
    puts = [decoder.write(name) for name in decoder.vector(decoder.operands[0])]
    wide = np.int32 if sums == "s32" else np.float32
    stored = np.dtype(np.float16) if d_type == "f16" else np.dtype(wide)
    per = 4 // kind.itemsize
    if (len(a), len(b)) != (depth // (2 * per), depth // (4 * per)) or len(c) != len(puts):
        raise decoder.refuse("as many registers as the shape has")

    def step(state: State, mask: Mask) -> None:
        warps = whole_warps(state, mask)
        a_MK = fragment_a([elements(read, state, warps, kind) for read in a], depth).astype(wide)
        b_KN = _fragment_b([elements(read, state, warps, kind) for read in b], depth).astype(wide)
        sums_MN = np.matmul(a_MK, b_KN)
        halves = [elements(read, state, warps, stored) for read in c]
        before = np.concatenate([half.reshape(len(warps), LANES, -1) for half in halves], 2)
        columns = PAIR * 2
        out = np.empty_like(before)
        for place in range(4):
            found = sums_MN[:, ROW + 8 * (place // 2), columns + place % 2]
            if saturates:
                whole = found.astype(np.int64) + before[..., place]
                found = np.clip(whole, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
                out[..., place] = found
            else:
                out[..., place] = found + before[..., place].astype(wide)
        packed = np.ascontiguousarray(out).view(np.uint32)
        for place, put in enumerate(puts):
            put(state, spread(state, warps, packed[..., place]), mask)
        state.counters.mma += len(warps) * 16 * 8 * depth

    return step


def elements(read: Reader, state: State, warps: npt.NDArray[np.intp], kind: Kind) -> Lanes:
    """Elements of a register, `[warps, 32, elements]`."""
    values = np.ascontiguousarray(np.broadcast_to(read(state), state.shape)[warps])
    return values.view(kind).reshape(len(warps), LANES, -1)


def fragment_a(registers: list[Lanes], depth: int) -> Lanes:
    """Matrix A `[warps, 16, depth]` from its registers: register i has rows of half i % 2 and
    columns of part i // 2."""
    per = registers[0].shape[-1]
    out = np.empty((len(registers[0]), 16, depth), registers[0].dtype)
    for i, values in enumerate(registers):
        for e in range(per):
            out[:, ROW + 8 * (i % 2), PAIR * per + e + 4 * per * (i // 2)] = values[..., e]
    return out


def _fragment_b(registers: list[Lanes], depth: int) -> Lanes:
    """Matrix B `[warps, depth, 8]` from its registers."""
    per = registers[0].shape[-1]
    out = np.empty((len(registers[0]), depth, 8), registers[0].dtype)
    for i, values in enumerate(registers):
        for e in range(per):
            out[:, PAIR * per + e + 4 * per * i, ROW] = values[..., e]
    return out


FAMILY = {"ldmatrix": ldmatrix, "stmatrix": stmatrix, "mma": mma}
