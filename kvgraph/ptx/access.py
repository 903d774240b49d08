"""Loads, stores and asynchronous copies (PTX ISA 9.7.9: ld, st, cp.async)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvgraph.ptx.counters import Traffic
from kvgraph.ptx.memory import AccessError, Parts
from kvgraph.ptx.operands import TYPES, Decoder, Kind, Reader
from kvgraph.ptx.shared import RaceError
from kvgraph.ptx.state import FaultError, Lanes, Mask, State, Step

WITHOUT_EFFECT = (
    "volatile", "relaxed", "acquire", "release", "weak", "cta", "gpu", "sys", "nc",
    "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::evict_first", "L2::evict_last",
    "L1::evict_normal", "L2::cache_hint", "L2::64B", "L2::128B", "L2::256B",
    "ca", "cg", "cs", "lu", "cv", "wb", "wt",
)  # fmt: skip
"""Modifiers for caches and for the order of memory between blocks, which are not modelled."""

VECTORS = {"v2": 2, "v4": 4}
SPACES = ("global", "shared", "shared::cta", "param")


def load(decoder: Decoder) -> Step:
    space, count, width = _shape(decoder)
    to = decoder.vector(decoder.operands[0])
    if len(to) != count:
        raise decoder.refuse(f"{count} registers")
    if space == "param":
        return _parameter(decoder)
    puts = [decoder.write(name) for name in to]
    kinds = [_widened(decoder, name) for name in to]
    address = decoder.address(decoder.operands[1], "u64" if space == "global" else "u32")
    nbytes = width * count
    fetch = read_global if space == "global" else read_shared

    def step(state: State, mask: Mask) -> None:
        got = fetch(state, mask, address(state), nbytes)
        values = np.ascontiguousarray(got).view(f"u{width}")
        for place, (put, kind) in enumerate(zip(puts, kinds, strict=True)):
            value = values[..., place]
            put(state, value if kind is None else value.view(kind[0]).astype(kind[1]), mask)

    return step


def _shape(decoder: Decoder) -> tuple[str, int, int]:
    """Space, number of elements, and bytes of an element; KernelError for other modifiers."""
    spaces = [part for part in decoder.parts[1:] if part in SPACES]
    if len(spaces) != 1 or decoder.type not in TYPES or decoder.type == "pred":
        raise decoder.refuse()
    decoder.expect_parts(decoder.type, *SPACES, *VECTORS, *WITHOUT_EFFECT)
    count = next((VECTORS[part] for part in decoder.parts if part in VECTORS), 1)
    operands = 3 if "L2::cache_hint" in decoder.parts else 2
    decoder.expect_operands(operands)
    return spaces[0].partition("::")[0], count, TYPES[decoder.type].itemsize


def _widened(decoder: Decoder, register: str) -> tuple[Kind, Kind] | None:
    """Dtypes of a loaded value and of its extension; None if the register is not wider."""
    kind, stored = TYPES[decoder.type], decoder.kind(register)
    if kind.itemsize == stored.itemsize:
        return None
    sign = "i" if kind.kind == "i" else "u"
    return np.dtype(f"{sign}{kind.itemsize}"), np.dtype(f"{sign}{stored.itemsize}")


def _parameter(decoder: Decoder) -> Step:
    decoder.expect_operands(2)
    name = decoder.operands[1].strip("[] ")
    if name not in {parameter.name for parameter in decoder.kernel.parameters}:
        raise decoder.refuse("a parameter of the kernel")
    kind = decoder.kind(decoder.operands[0])
    put = decoder.write(decoder.operands[0])
    bits = (1 << 8 * kind.itemsize) - 1

    def step(state: State, mask: Mask) -> None:
        put(state, np.array(state.arguments[name] & bits, kind), mask)

    return step


def store(decoder: Decoder) -> Step:
    space, count, width = _shape(decoder)
    given = decoder.vector(decoder.operands[1])
    if len(given) != count or space == "param":
        raise decoder.refuse(f"{count} registers")
    values = [decoder.read(part, f"b{8 * width}") for part in given]
    address = decoder.address(decoder.operands[0], "u64" if space == "global" else "u32")
    put = write_global if space == "global" else write_shared
    nbytes = width * count

    def step(state: State, mask: Mask) -> None:
        data = np.empty((*state.shape, count), f"u{width}")
        for place, read in enumerate(values):
            data[..., place] = read(state)
        put(state, mask, address(state), data.view(np.uint8).reshape(*state.shape, nbytes))

    return step


# ---- global memory


def read_global(state: State, mask: Mask, address: Lanes, nbytes: int) -> npt.NDArray[np.uint8]:
    """Read bytes `[warps, 32, nbytes]`; zeros for threads that do not read."""
    address = np.broadcast_to(address, state.shape)
    chosen = address.reshape(-1) if mask is None else address[mask]
    _require_aligned(chosen, nbytes, mask, state)
    flat = np.zeros((chosen.size, nbytes), np.uint8)
    for buffer, part in _parts(state, chosen, nbytes, mask):
        at = chosen if part is None else chosen[part]
        offset = (at - np.uint64(buffer.address)).astype(np.int64)
        view = buffer.view(nbytes)
        if view is None:
            found = buffer.raw[offset[:, None] + np.arange(nbytes)]
        else:
            found = view[offset // nbytes].view(np.uint8).reshape(-1, nbytes)
        if part is None:
            flat = found
        else:
            flat[part] = found
        if state.counters.profile:
            _count(state, state.counters.global_reads[buffer.name], address, nbytes, mask, part)
    return _spread(state, mask, flat, nbytes)


def write_global(state: State, mask: Mask, address: Lanes, data: npt.NDArray[np.uint8]) -> None:
    nbytes = data.shape[-1]
    address = np.broadcast_to(address, state.shape)
    chosen = address.reshape(-1) if mask is None else address[mask]
    flat = data.reshape(-1, nbytes) if mask is None else data[mask]
    _require_aligned(chosen, nbytes, mask, state)
    for buffer, part in _parts(state, chosen, nbytes, mask):
        at, values = (chosen, flat) if part is None else (chosen[part], flat[part])
        offset = (at - np.uint64(buffer.address)).astype(np.int64)
        buffer.raw[offset[:, None] + np.arange(nbytes)] = values
        if state.counters.profile:
            _count(state, state.counters.global_writes[buffer.name], address, nbytes, mask, part)


def _parts(state: State, chosen: Lanes, nbytes: int, mask: Mask) -> Parts:
    if not chosen.size:
        return []
    try:
        return state.memory.parts(chosen, nbytes)
    except AccessError as error:
        raise FaultError(str(error), _lanes(state, mask, error.lanes)) from None


def _count(
    state: State,
    traffic: Traffic,
    address: Lanes,
    nbytes: int,
    mask: Mask,
    part: npt.NDArray[np.bool_] | None,
) -> None:
    active = mask if part is None else _lanes(state, mask, part)
    state.counters.global_access(traffic, address, nbytes, active)


def _require_aligned(chosen: Lanes, nbytes: int, mask: Mask, state: State) -> None:
    bad = (chosen & chosen.dtype.type(nbytes - 1)) != 0
    if bad.any():
        raise FaultError(
            f"expected an address that is a multiple of {nbytes}, got {int(chosen[bad][0]):#x}",
            _lanes(state, mask, bad),
        )


def _lanes(state: State, mask: Mask, chosen: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Turn a selection among the active threads into one among all threads."""
    lanes = np.zeros(state.shape, bool)
    if mask is None:
        lanes.reshape(-1)[:] = chosen
    else:
        lanes[mask] = chosen
    return lanes


def _spread(
    state: State, mask: Mask, flat: npt.NDArray[np.uint8], nbytes: int
) -> npt.NDArray[np.uint8]:
    if mask is None:
        return flat.reshape(*state.shape, nbytes)
    out = np.zeros((*state.shape, nbytes), np.uint8)
    out[mask] = flat
    return out


# ---- shared memory


def places_of(
    state: State, mask: Mask, address: Lanes, nbytes: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Check addresses; return flat places in the batch's shared memory, and codes of the warps."""
    address = np.broadcast_to(address, state.shape)
    if state.counters.profile:
        state.counters.shared_access(address, nbytes, mask)
    chosen = address.reshape(-1) if mask is None else address[mask]
    _require_aligned(chosen, min(nbytes, 16), mask, state)
    try:
        state.shared.require_inside(chosen, nbytes)
    except RaceError as error:
        raise FaultError(str(error), _lanes(state, mask, error.lanes)) from None
    shift = np.broadcast_to(state.block * state.shared.stride, state.shape)
    code = np.broadcast_to(state.code(), state.shape)
    if mask is None:
        return chosen + shift.reshape(-1), code.reshape(-1)
    return chosen + shift[mask], code[mask]


def read_shared(state: State, mask: Mask, address: Lanes, nbytes: int) -> npt.NDArray[np.uint8]:
    places, code = places_of(state, mask, address, nbytes)
    if state.shared.checks:
        try:
            state.shared.read(places, nbytes, code)
        except RaceError as error:
            raise FaultError(str(error), _lanes(state, mask, error.lanes)) from None
    found = state.shared.views[nbytes][places // nbytes].view(np.uint8).reshape(-1, nbytes)
    return _spread(state, mask, found, nbytes)


def write_shared(state: State, mask: Mask, address: Lanes, data: npt.NDArray[np.uint8]) -> None:
    nbytes = data.shape[-1]
    places, code = places_of(state, mask, address, nbytes)
    flat = data.reshape(-1, nbytes) if mask is None else data[mask]
    try:
        state.shared.write(places, nbytes, code, flat)
    except RaceError as error:
        raise FaultError(str(error), _lanes(state, mask, error.lanes)) from None


# ---- asynchronous copies


def copy(decoder: Decoder) -> Step:
    """cp.async: the bytes arrive as late as possible, at the wait for their group."""
    parts = decoder.parts
    if parts[1] != "async" or "bulk" in parts:
        raise decoder.refuse()
    if parts[2] in ("commit_group", "wait_group", "wait_all"):
        return _group(decoder, parts[2])
    decoder.expect_parts("async", "ca", "cg", "shared", "shared::cta", "global", *WITHOUT_EFFECT)
    decoder.expect_operands(3, 4)
    size = int(decoder.number(decoder.operands[2], "u32"))
    if size not in (4, 8, 16) or ("cg" in parts and size != 16):
        raise decoder.refuse("4, 8 or 16 bytes (16 with .cg)")
    to = decoder.address(decoder.operands[0], "u32")
    source = decoder.address(decoder.operands[1], "u64")
    given = decoder.read(decoder.operands[3], "u32") if len(decoder.operands) > 3 else None

    def step(state: State, mask: Mask) -> None:
        data, active = _copied(state, mask, source(state), size, given)
        places, code = places_of(state, mask, to(state), size)
        try:
            state.shared.begin_copy(places, size, code)
        except RaceError as error:
            raise FaultError(str(error), _lanes(state, mask, error.lanes)) from None
        threads = np.flatnonzero(active)
        group = state.copies.committed.reshape(-1)[threads]
        state.copies.issued.append((threads, group, places, data.reshape(-1, size)[threads]))

    return step


def _copied(
    state: State, mask: Mask, source: Lanes, size: int, given: Reader | None
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]:
    """The source's bytes, followed by zeros up to `size`, and the active threads."""
    active = state.active(mask)
    if given is None:
        return read_global(state, mask, source, size), active
    wanted = np.broadcast_to(given(state), state.shape)
    long = active & (wanted > size)
    if long.any():
        raise FaultError(f"expected at most {size} bytes to copy, got more", long)
    data = np.zeros((*state.shape, size), np.uint8)
    for count in np.unique(wanted[active]).tolist():
        if not count:
            continue
        if count & (count - 1):
            odd = active & (wanted == count)
            raise FaultError(f"expected a power of two of bytes to copy, got {count}", odd)
        here = active & (wanted == count)
        part = read_global(state, None if here.all() else here, source, count)
        data[here, :count] = part[here]
    return data, active


def _group(decoder: Decoder, name: str) -> Step:
    if name == "commit_group":
        decoder.expect_operands(0)

        def commit(state: State, mask: Mask) -> None:
            state.copies.committed += state.active(mask)

        return commit
    decoder.expect_operands(0 if name == "wait_all" else 1)
    most = 0 if name == "wait_all" else int(decoder.number(decoder.operands[0], "u32"))

    def wait(state: State, mask: Mask) -> None:
        active = state.active(mask).reshape(-1)
        committed = state.copies.committed.reshape(-1)
        if name == "wait_all":
            state.copies.committed += state.active(mask)
        code = np.broadcast_to(state.code(), state.shape).reshape(-1)
        left = []
        for threads, group, places, data in state.copies.issued:
            done = active[threads] & (group < committed[threads] - most)
            if done.any():
                try:
                    state.shared.land_copy(
                        places[done], data.shape[1], code[threads[done]], data[done]
                    )
                except RaceError as error:
                    lanes = np.zeros(active.size, bool)
                    lanes[threads[done][error.lanes]] = True
                    raise FaultError(str(error), lanes.reshape(state.shape)) from None
            if not done.all():
                left.append((threads[~done], group[~done], places[~done], data[~done]))
        state.copies.issued = left

    return wait


FAMILY = {"ld": load, "st": store, "cp": copy}
