"""GGUF: blocks whose numbers have a scale and a minimum: Q4_1 and Q4_K.

A number is `scale * q - minimum`, with q from 0 to 15. It is kept as `scale * (q - 8 + offset / 8)`
(ops/packed.py, EIGHTHS): the minimum is rounded to an eighth of the scale. This is an eighth of the
error that the rounding to q made. Groups whose offset does not fit a byte get another scale.

Layouts (ggml-common.h): a block of Q4_1 is a float16 scale, a float16 minimum that is added, and 16
bytes for 32 numbers, as in Q4_0. A block of Q4_K has 256 numbers in 8 groups: a float16 unit of
scales, one of minima, 12 bytes with 6 bits of each group's scale and minimum, and 128 bytes. Their
32 low halves of 32 bytes are a group, and their high halves the next one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from kvgraph.compiler.values import Coded
from kvgraph.contract.dims import Array
from kvgraph.errors import ModelError

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
        raise ModelError(
            f"{where}[{first + at[0]}]: block {at[-1]}: expected a finite scale, got "
            f"{kind}{scales[at]:g}"
        )


def _of_q4_1(where: str, data: Array, first: int) -> Coded:
    blocks = data.reshape(*data.shape[:-1], -1, 20)
    units = _units(where, blocks, first)
    codes = np.concatenate([blocks[..., 4:] & 15, blocks[..., 4:] >> 4], -1)
    return _kept(codes, units[..., 0], -units[..., 1])


def _of_q4_k(where: str, data: Array, first: int) -> Coded:
    blocks = data.reshape(*data.shape[:-1], -1, 144)
    units = _units(where, blocks, first)
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


def _units(where: str, blocks: Array, first: int) -> Array:
    """The two numbers in float16 at the start of each block, in float32."""
    units: Array = np.ascontiguousarray(blocks[..., :4]).view("<f2").astype(np.float32)
    for place in (0, 1):
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


MINIMA: dict[str, Read] = {"Q4_1": _of_q4_1, "Q4_K": _of_q4_k}
"""Type of blocks with minima -> what reads them as they are stored."""
