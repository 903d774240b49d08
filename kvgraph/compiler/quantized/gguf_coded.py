"""GGUF: blocks that kernels support as they are stored.

A number with a minimum (Q4_1, Q4_K) is `scale * q - minimum`, with q from 0 to 15. It is kept as
`scale * (q - 8 + offset / 8)` (ops/packed.py, EIGHTHS): the minimum is rounded to an eighth of the
scale, with an eighth of the error that the rounding to q made. Groups whose offset does not fit a
byte get another scale. Numbers of other types are kept exactly.

Layouts (ggml-common.h), of 32 numbers of one row. Where a byte has two numbers, the first 16 are in
the low bits, the last 16 in the high bits:

    Q8_0      a float16 scale, 32 int8
    Q4_0      a float16 scale, 16 bytes; 8 is 0
    Q4_1      a float16 scale, a float16 that is added, 16 bytes
    MXFP4     an exponent, 16 bytes
    IQ4_NL    a float16 scale, 16 bytes with places of levels

A block of 256 numbers has 8 groups of 32. Q4_K: a float16 unit of scales, one of minima, 12 bytes
with 6 bits of each group's scale and minimum, and 128 bytes; the low halves of 32 bytes are a
group, and their high halves the next one. IQ4_XS: a float16 unit of scales; the upper 2 bits of
each scale in a uint16, the lower 4 bits in 4 bytes; and 16 bytes of each group, as in IQ4_NL.
Scales are stored with 32 added.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvgraph.compiler.frontends.found_instead import damaged
from kvgraph.compiler.values import Coded
from kvgraph.contract.dims import Array

NO_EXPONENT = 255
"""The exponent of MXFP4 that is a NaN."""

MIDDLE, MOST = 8, 15
"""What is taken from q, and the largest q."""

GROUP, GROUPS = 32, 8
"""Numbers of a group, and groups of a block of Q4_K."""

EIGHTH = 8

Read = Callable[[str, Array, int], Coded]
"""`read(where, data, first)`: rows from bytes `[..., bytes of a row]`. ModelError for a number that
is not finite. `first`: the place of the first row in the weight `where`, for errors."""


def require_finite(where: str, scales: Array, is_bad: Array, first: int, kind: str = "") -> None:
    """Raise ModelError for the first of `scales [..., blocks]` that `is_bad`."""
    if is_bad.any():
        at = tuple(int(each) for each in np.argwhere(is_bad)[0])
        place = f"{where}[{first + at[0]}]: block {at[-1]}"
        raise damaged(place, "a finite scale", f"{kind}{scales[at]:g}")


def _of_q8_0(where: str, data: Array, first: int) -> Coded:
    blocks = _blocks(data, 34)
    numbers = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    return _plain(numbers, _units(where, blocks, 1, first)[..., 0])


def _of_q4_0(where: str, data: Array, first: int) -> Coded:
    blocks = _blocks(data, 18)
    return _plain(_halves(blocks[..., 2:]) ^ 8, _units(where, blocks, 1, first)[..., 0])


def _of_mxfp4(where: str, data: Array, first: int) -> Coded:
    blocks = _blocks(data, 17)
    exponents = np.ascontiguousarray(blocks[..., 0])
    require_finite(where, exponents, exponents == NO_EXPONENT, first, "exponent ")
    return _plain(_halves(blocks[..., 1:]), exponents)


def _of_iq4_nl(where: str, data: Array, first: int) -> Coded:
    blocks = _blocks(data, 18)
    return _plain(_halves(blocks[..., 2:]), _units(where, blocks, 1, first)[..., 0])


def _of_iq4_xs(where: str, data: Array, first: int) -> Coded:
    blocks = _blocks(data, 136)
    units = _units(where, blocks, 1, first)
    upper = np.ascontiguousarray(blocks[..., 2:4]).view("<u2") >> 2 * np.arange(GROUPS) & 3
    low = blocks[..., 4:8]
    lower = np.stack([low & 15, low >> 4], -1).reshape(upper.shape)
    scales = units * (lower.astype(np.int16) + (upper << 4) - 32).astype(np.float32)
    codes = _halves(blocks[..., 8:].reshape(*blocks.shape[:-1], GROUPS, GROUP // 2))
    return _plain(codes, scales.reshape(*blocks.shape[:-2], -1))


def _blocks(data: Array, size: int) -> Array:
    return data.reshape(*data.shape[:-1], -1, size)


def _halves(each: Array) -> Array:
    """The two numbers of each byte: all low halves, then all high ones."""
    return np.concatenate([each & 15, each >> 4], -1)


def _plain(numbers: Array, scales: Array) -> Coded:
    """Rows of blocks of numbers, which are their codes, and a scale for each group."""
    rows = numbers.reshape(*scales.shape[:-1], -1)
    return Coded(torch.from_numpy(rows), torch.from_numpy(scales))


def _of_q4_1(where: str, data: Array, first: int) -> Coded:
    blocks = _blocks(data, 20)
    units = _units(where, blocks, 2, first)
    return _kept(_halves(blocks[..., 4:]), units[..., 0], -units[..., 1])


def _of_q4_k(where: str, data: Array, first: int) -> Coded:
    blocks = _blocks(data, 144)
    units = _units(where, blocks, 2, first)
    low, middle, high = np.split(blocks[..., 4:16], 3, -1)
    scales = np.concatenate([low & 63, high & 15 | low >> 6 << 4], -1)
    minima = np.concatenate([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    pairs = blocks[..., 16:].reshape(*blocks.shape[:-1], GROUPS // 2, GROUP)
    codes = np.stack([pairs & 15, pairs >> 4], -2)
    rows = blocks.shape[:-2]
    return _kept(
        codes.reshape(*rows, -1, GROUP),
        (units[..., :1] * scales).reshape(*rows, -1),
        (units[..., 1:] * minima).reshape(*rows, -1),
    )


def _units(where: str, blocks: Array, count: int, first: int) -> Array:
    """The `count` numbers in float16 at the start of each block, in float32."""
    units: Array = np.ascontiguousarray(blocks[..., : 2 * count]).view("<f2").astype(np.float32)
    for place in range(count):
        own = units[..., place]
        require_finite(where, own, ~np.isfinite(own), first)
    return units


def _kept(codes: Array, scales: Array, minima: Array) -> Coded:
    """Groups `[..., groups, GROUP]` of codes from 0 to 15, with a scale and a minimum each."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        offsets = np.rint(EIGHTH * (MIDDLE - minima / scales))
    offsets = np.where((scales == 0) & (minima == 0), 0, offsets)
    is_other = ~(np.abs(offsets) <= 127)  # a NaN too
    numbers = codes.astype(np.int8) - MIDDLE
    if is_other.any():
        exact = codes[is_other] * scales[is_other, None] - minima[is_other, None]
        scales = scales.copy()
        numbers[is_other], scales[is_other], offsets[is_other] = _rounded(exact)
    rows = numbers.reshape(*numbers.shape[:-2], -1).view(np.uint8) & 15
    return Coded(
        torch.from_numpy(rows),
        torch.from_numpy(scales.astype(np.float32)),
        torch.from_numpy(offsets.astype(np.int8)),
    )


def _rounded(exact: Array) -> tuple[Array, Array, Array]:
    """Numbers, scales and offsets of groups, rounded between 0 and their ends."""
    low, high = np.minimum(exact.min(-1), 0), np.maximum(exact.max(-1), 0)
    scales = (high - low) / np.float32(MOST)
    steps = np.where(scales == 0, np.float32(1), scales)
    offsets = np.rint(EIGHTH * (MIDDLE + low / steps))
    numbers = np.rint(exact / steps[:, None] - offsets[:, None] / EIGHTH)
    return np.clip(numbers, -MIDDLE, MOST - MIDDLE), scales, offsets


CODED: dict[str, Read] = {
    "Q4_0": _of_q4_0,
    "Q8_0": _of_q8_0,
    "MXFP4": _of_mxfp4,
    "Q4_1": _of_q4_1,
    "Q4_K": _of_q4_k,
    "IQ4_NL": _of_iq4_nl,
    "IQ4_XS": _of_iq4_xs,
}
"""Type of blocks -> what reads them as they are stored."""
