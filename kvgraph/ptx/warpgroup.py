"""Matrix products of four warps, and the fences around them (PTX ISA 9.7.15: wgmma).

A product is computed when it is issued. Until its wait, a use of its accumulators, or a write to
its inputs, is a fault. Registers that were written need a wgmma.fence before the product, and
shared memory that threads wrote needs a fence.proxy.async.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from kvgraph.ptx.matrix import (
    INPUTS,
    PAIR,
    ROW,
    ROW_BYTES,
    elements,
    fragment_a,
    spread,
    whole_warps,
)
from kvgraph.ptx.operands import Decoder, Kind
from kvgraph.ptx.shared import RaceError
from kvgraph.ptx.state import LANES, FaultError, Issued, Lanes, Mask, State, Step

GROUP = 4
SHAPE = re.compile(r"m64n(\d+)k(16|32)")
INPUT_BYTES = 32
"""Bytes of a factor's row in one product."""
SUMS = {"f16": "f32", "bf16": "f32", "e4m3": "f32", "s8": "s32"}
"""Type of accumulators, by type of both factors."""
SWIZZLES = {0: 16, 1: 128, 2: 64, 3: 32}
"""Bytes of a swizzled row, by the mode of a matrix descriptor."""

ANY_WARP = 62
"""Stands for the reading warp of a product, since all four warps read."""


def product(decoder: Decoder) -> Step:
    """Decode `wgmma.mma_async.sync.aligned.m64nNkK.d.a.b D, A, B-descriptor, ...`, with A in
    registers or by a descriptor: D = A B + (scale-d ? D : 0). K is 16, or 32 for bytes, which are
    never transposed."""
    parts = decoder.parts
    shape = SHAPE.fullmatch(parts[4]) if len(parts) == 8 else None
    if parts[1:4] != ["mma_async", "sync", "aligned"] or shape is None:
        raise decoder.refuse()
    if SUMS.get(parts[6]) != parts[5] or parts[7] != parts[6]:
        raise decoder.refuse()
    columns, depth, kind, sum_type = int(shape[1]), int(shape[2]), INPUTS[parts[6]], parts[5]
    if depth * kind.itemsize != INPUT_BYTES or not _has_columns(columns, sum_type):
        raise decoder.refuse()
    from_registers = decoder.operands[1].startswith("{")
    num_scales = 2 if sum_type == "f32" else 0
    num_transposed = 2 - from_registers if kind.itemsize == 2 else 0
    decoder.expect_operands(4 + num_scales + num_transposed)
    accumulators = decoder.vector(decoder.operands[0])
    if len(accumulators) != columns // 2:
        raise decoder.refuse(f"{columns // 2} accumulators")
    if any(decoder.number(o, "s32") != 1 for o in decoder.operands[4 : 4 + num_scales]):
        raise decoder.refuse("scales of 1")
    slots = tuple(decoder.slot(name) for name in accumulators)
    puts = [decoder.write(name) for name in accumulators]
    a = (
        [decoder.read(name, "b32") for name in decoder.vector(decoder.operands[1])]
        if from_registers
        else []
    )
    a_slots = (
        tuple(decoder.slot(n) for n in decoder.vector(decoder.operands[1]))
        if from_registers
        else ()
    )
    a_matrix = None if from_registers else decoder.read(decoder.operands[1], "b64")
    b_matrix = decoder.read(decoder.operands[2], "b64")
    adds = decoder.read(decoder.operands[3], "pred")
    always = decoder.operands[3] not in ("0", "false")
    sums = [decoder.read(name, sum_type) for name in accumulators] if always else []
    wide = np.int32 if sum_type == "s32" else np.float32
    said = decoder.operands[4 + num_scales :]
    transposed = [False, False, *(bool(decoder.number(o, "s32")) for o in said)]
    a_transposed = transposed[-2] if not from_registers else False
    b_transposed = transposed[-1]

    def step(state: State, mask: Mask) -> None:
        warps = _groups(state, mask)
        count = len(warps) // GROUP
        first = warps[::GROUP]
        _require_fenced(state, warps, (*a_slots, *(slots if always else ())))
        b_NK, read = _matrix(state, first, b_matrix(state), columns, b_transposed, kind)
        if a_matrix is None:
            registers = [elements(each, state, warps, kind) for each in a]
            a_MK = fragment_a(registers, depth).reshape(count, 64, depth)
        else:
            a_MK, more = _matrix(state, first, a_matrix(state), 64, a_transposed, kind)
            read = np.concatenate([read, more], 1)
        granules = _begin(state, first, read)
        everything = (*slots, *a_slots)
        found = np.matmul(a_MK.astype(wide), b_NK.astype(wide).swapaxes(1, 2))
        tiles = found.reshape(len(warps), 16, columns)
        keeps = np.broadcast_to(adds(state), state.shape)[warps]
        for place, put in enumerate(puts):
            row, column = ROW + 8 * (place // 2 % 2), PAIR * 2 + place % 2 + 8 * (place // 4)
            value = tiles[:, row, column]
            if always:
                before = np.broadcast_to(sums[place](state), state.shape)[warps]
                value = np.where(keeps, value + before, value)
            put(state, spread(state, warps, value), mask)
        for group, warp in enumerate(first):
            committed = int(state.groups.committed[warp])
            state.groups.issued.append(Issued(int(warp), committed, everything, granules[group]))
        for slot in everything:
            _flags(state.groups.locked, slot, state)[warps] = True
        state.counters.mma += count * 64 * columns * depth

    return step


def _has_columns(columns: int, sums: str) -> bool:
    """Whether N is valid: a multiple of 8 up to 256; for integers above 32 a multiple of 16."""
    step = 16 if sums == "s32" and columns > 32 else 8
    return 0 < columns <= 256 and columns % step == 0


def _groups(state: State, mask: Mask) -> npt.NDArray[np.intp]:
    """Indices of the active warps; FaultError unless they are whole groups of four."""
    warps = whole_warps(state, mask)
    groups = warps.reshape(-1, GROUP) if len(warps) % GROUP == 0 else None
    if groups is None or not (groups == groups[:, :1] // GROUP * GROUP + np.arange(GROUP)).all():
        raise FaultError("expected the four warps of a group, got a part of them", mask)
    return warps


def _require_fenced(state: State, warps: npt.NDArray[np.intp], slots: tuple[int, ...]) -> None:
    for slot in slots:
        flags = state.groups.unfenced.get(slot)
        if flags is not None and flags[warps].any():
            raise FaultError(
                "expected a wgmma.fence between the write of a register and this product, got none"
            )


def _matrix(
    state: State,
    first: npt.NDArray[np.intp],
    descriptor: Lanes,
    rows: int,
    transposed: bool,
    kind: Kind,
) -> tuple[Lanes, npt.NDArray[np.int64]]:
    """Matrix `[groups, rows, K]` of a matrix descriptor, and the places of its elements.

    Bits 0-13 of a descriptor are its start, 16-29 the leading and 32-45 the stride offset, in units
    of 16 bytes, 49-51 the base offset, 62-63 the swizzle. K-major: 8 rows are a swizzle atom;
    atoms are `stride` apart. Otherwise an atom is 8 of K; atoms are `stride` apart along K and
    `leading` apart along rows with a swizzle, and the reverse without one.
    """
    given = np.broadcast_to(descriptor, state.shape)
    own = given[first, 0].astype(np.uint64)
    if (given.reshape(-1, GROUP * LANES)[first // GROUP] != own[:, None]).any():
        raise FaultError("expected one matrix descriptor in the four warps, got several")
    start, leading, stride = (
        ((own >> np.uint64(bit) & np.uint64(0x3FFF)).astype(np.int64) << 4)[:, None, None]
        for bit in (0, 16, 32)
    )
    mode = int(own[0] >> np.uint64(62))
    if (own >> np.uint64(62) != mode).any() or (own >> np.uint64(49) & np.uint64(7)).any():
        raise FaultError("expected one swizzle and no base offset in the matrix descriptors")
    width = SWIZZLES[mode]
    size = kind.itemsize
    row, k = np.arange(rows)[:, None], np.arange(INPUT_BYTES // size)
    per_line = ROW_BYTES // size
    if transposed and mode:
        per = width // 2
        address = start + row // per * leading + row % per * 2 + k % 8 * width + k // 8 * stride
    elif transposed:
        address = start + row // 8 * stride + row % 8 * 2 + k % 8 * 16 + k // 8 * leading
    elif mode:
        address = start + row // 8 * stride + row % 8 * width + k * size
    else:
        line = k // per_line * leading + k % per_line * size
        address = start + row // 8 * stride + row % 8 * ROW_BYTES + line
    address = address ^ (address >> 7 & (width // 16 - 1)) << 4
    outside = (address < 0) | (address > state.shared.size - size)
    if outside.any():
        raise FaultError(
            f"expected a matrix inside of {state.shared.size} bytes of shared memory, got byte "
            f"{address[outside][0]}"
        )
    places = address + (state.block[first] * state.shared.stride)[:, :, None]
    values = state.shared.views[size][places // size].view(kind)
    return values, places.reshape(len(first), -1)


def _begin(
    state: State, first: npt.NDArray[np.intp], places: npt.NDArray[np.int64]
) -> list[npt.NDArray[np.int64]]:
    """Check the reads of each group's product and forbid writes until its wait; return the granules
    that each product reads."""
    shared = state.shared
    if not shared.checks:
        return [np.empty(0, np.int64)] * len(first)
    found = []
    for group, warp in enumerate(first):
        at = np.unique(shared.granules(places[group] & ~1, 2))
        code = np.full(at.size, state.epoch[state.block[warp, 0]] * 64 + ANY_WARP)
        try:
            shared.begin_product(at, code)
        except RaceError as error:
            lanes = np.zeros(state.shape, bool)
            lanes[warp : warp + GROUP] = True
            raise FaultError(str(error), lanes) from None
        found.append(at)
    return found


def _flags(table: dict[int, npt.NDArray[np.bool_]], slot: int, state: State) -> Lanes:
    return table.setdefault(slot, np.zeros(state.shape[0], bool))


def wgmma(decoder: Decoder) -> Step:
    if decoder.parts[1] == "mma_async":
        return product(decoder)
    if decoder.parts[2:] != ["sync", "aligned"]:
        raise decoder.refuse()
    if decoder.parts[1] == "fence":
        decoder.expect_operands(0)
        return _fence
    if decoder.parts[1] == "commit_group":
        decoder.expect_operands(0)
        return _commit
    if decoder.parts[1] != "wait_group":
        raise decoder.refuse()
    decoder.expect_operands(1)
    most = int(decoder.number(decoder.operands[0], "u32"))
    return lambda s, m: _wait(s, m, most)


def _fence(state: State, mask: Mask) -> None:
    warps = whole_warps(state, mask)
    for flags in state.groups.unfenced.values():
        flags[warps] = False


def _commit(state: State, mask: Mask) -> None:
    state.groups.committed[whole_warps(state, mask)] += 1


def _wait(state: State, mask: Mask, most: int) -> None:
    """End the products of all groups except the newest `most`."""
    here = np.zeros(state.shape[0], bool)
    here[whole_warps(state, mask)] = True
    groups = state.groups
    ended: list[Issued] = []
    left: list[Issued] = []
    for each in groups.issued:
        part = slice(each.warp, each.warp + GROUP)
        done = here[part].all() and each.group < groups.committed[each.warp] - most
        (ended if done else left).append(each)
        if done:
            for slot in each.slots:
                groups.locked[slot][part] = False
    groups.issued = left
    for each in left:
        for slot in each.slots:
            groups.locked[slot][each.warp : each.warp + GROUP] = True
    if ended and state.shared.checks:
        none = np.empty(0, np.int64)
        state.shared.end_product(
            np.concatenate([each.granules for each in ended]),
            np.concatenate([none, *(each.granules for each in left)]),
        )


def fence(decoder: Decoder) -> Step:
    """fence: of the asynchronous proxy; fences of memory order between blocks have no effect."""
    parts = decoder.parts[1:]
    if parts[:2] == ["proxy", "async"] and parts[2:] in ([], ["shared::cta"]):

        def step(state: State, mask: Mask) -> None:
            if not state.shared.checks:
                return
            here = np.logical_or.reduce(state.active(mask), axis=1)
            code = state.code()[:, 0]
            for block in range(state.num_blocks):
                part = slice(block * state.warps, (block + 1) * state.warps)
                if here[part].any():
                    state.shared.fence(block, code[part][here[part]])

        return step
    decoder.expect_parts("acq_rel", "sc", "cta", "gpu", "sys")
    return lambda s, m: None


def guarded(
    step: Step, reads: tuple[int, ...], writes: tuple[int, ...], inputs: tuple[int, ...]
) -> Step:
    """Check another instruction on registers of products. `reads`, `writes`: accumulators that it
    reads and writes. `inputs`: inputs of products that it writes."""

    def checked(state: State, mask: Mask) -> None:
        here = np.logical_or.reduce(state.active(mask), axis=1)
        for slot in (*reads, *writes, *inputs):
            locked = state.groups.locked.get(slot)
            if locked is not None and (locked & here).any():
                raise FaultError(
                    "expected a wgmma.wait_group between a product and the use of its registers, "
                    "got none",
                    np.logical_and((locked & here)[:, None], state.active(mask)),
                )
        step(state, mask)
        for slot in (*writes, *inputs):
            _flags(state.groups.unfenced, slot, state)[here] = True

    return checked


FAMILY = {"wgmma": wgmma, "fence": fence, "membar": fence}
