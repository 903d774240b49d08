"""Weights of linear layers -> the packed form that our ops read (ops/packed.py).

Decision: rounded to nearest, without calibration: a compile needs no data, and the loss is measured
(kvgraph/quality). An int4 multiplier is the one of the least squared error.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops.packed import COLUMNS, GROUP, PER_LINE, padded_depth, panel_count

NIBBLE_MAX, MULTIPLIER_MAX = 7, 16
TRIED = 4
"""Multipliers below the one that holds a group's largest weight: clipping it may cost less."""

PANELS_AT_ONCE = 64


@dataclass(frozen=True)
class Packed:
    """Operands of `kvgraph.linear` but for x and the residual; None where it has none."""

    bits: int
    weight: Array
    scales: Array | None = None
    multipliers: Array | None = None
    bias: Array | None = None


def pack(
    weights: Sequence[Array],
    bits: int,
    bias: Sequence[Array | None] = (),
    *,
    interleave: bool = False,
) -> Packed:
    """Sections `[N, K]` of equal K, one after the other or, of two, panel by panel in turn.

    Columns are padded to panels and K to `DEPTH`, with zeros.
    """
    width = weights[0].shape[1]
    depth = padded_depth(width)
    order = _order([panel_count(len(w)) for w in weights], interleave)
    given = list(bias) or [None] * len(weights)
    parts = []
    for start in range(0, len(order), PANELS_AT_ONCE):
        chosen = order[start : start + PANELS_AT_ONCE]
        rows = np.zeros((len(chosen), COLUMNS, depth), np.float32)
        for i, (section, panel) in enumerate(chosen):
            found = weights[section][panel * COLUMNS : (panel + 1) * COLUMNS]
            rows[i, : len(found), :width] = found
        parts.append(_pack_panels(rows, bits))
    weight, scales, multipliers = (
        None if parts[0][i] is None else np.concatenate([p[i] for p in parts]) for i in range(3)
    )
    assert weight is not None
    biases = None
    if any(b is not None for b in given):
        biases = np.zeros((len(order), COLUMNS), np.float32)
        for i, (section, panel) in enumerate(order):
            values = given[section]
            if values is not None:
                part = values[panel * COLUMNS : (panel + 1) * COLUMNS]
                biases[i, : len(part)] = part
    return Packed(bits, weight, scales, multipliers, biases)


def pack_each(
    experts: Iterable[tuple[Sequence[Array], Sequence[Array | None]]], bits: int
) -> Packed:
    """Weights of each expert and their biases -> operands of `kvgraph.experts` with them in a row.

    Two weights are gate and up, panel by panel in turn.
    """
    each = [pack(weights, bits, bias, interleave=len(weights) > 1) for weights, bias in experts]
    fields = ("weight", "scales", "multipliers", "bias")
    stacked = {
        name: np.stack([getattr(packed, name) for packed in each])
        for name in fields
        if getattr(each[0], name) is not None
    }
    return Packed(bits, **stacked)


def _order(panels: list[int], interleave: bool) -> list[tuple[int, int]]:
    """(section, panel) in the order of the file."""
    if interleave:
        return [(section, p) for p in range(panels[0]) for section in range(len(panels))]
    return [(section, p) for section, count in enumerate(panels) for p in range(count)]


def _pack_panels(rows: Array, bits: int) -> tuple[Array, Array | None, Array | None]:
    """`rows [panels, COLUMNS, K]` -> lines, scales with column sums, multipliers."""
    if bits == 32:
        return _lines(rows, 32), None, None
    if bits == 16:
        return _lines(rows.astype(ml_dtypes.bfloat16), 16), None, None
    if bits == 8:
        scale = np.abs(rows).max(-1) / np.float32(127)
        stored = np.rint(rows / _divisor(scale)[..., None]).astype(np.int8)
        return _lines(stored, 8), _scales(scale, stored), None
    scale, nibbles, factors = _two_level(rows)
    exact = (nibbles * factors[..., None]).astype(np.int8).reshape(rows.shape)
    low, high = np.split(nibbles.reshape(*rows.shape[:2], -1, 2, 4), 2, axis=-2)
    both = ((high.astype(np.int16) << 4) | (low & 15)).astype(np.uint8).view(np.int8)
    lines = _lines(both.reshape(*rows.shape[:2], -1), 8)
    less_one = (factors - 1).astype(np.uint8).transpose(0, 2, 1)
    pairs = (less_one[..., 0::2] | less_one[..., 1::2] << 4).view(np.int8)
    return lines, _scales(scale, exact), np.ascontiguousarray(pairs)


def _lines(stored: Array, bits: int) -> Array:
    """`[panels, COLUMNS, K]` -> `[panels, lines, 64 bytes]`."""
    panels, columns, depth = stored.shape
    per = PER_LINE[bits]
    by_line = stored.reshape(panels, columns, depth // per, per).transpose(0, 2, 1, 3)
    return np.ascontiguousarray(by_line).reshape(panels, depth // per, columns * per)


def _scales(scale: Array, stored: Array) -> Array:
    return np.stack([scale, stored.sum(-1, dtype=np.int64).astype(np.float32)], 1)


def _divisor(scale: Array) -> Array:
    return np.where(scale == 0, np.float32(1), scale)


def _two_level(rows: Array) -> tuple[Array, Array, Array]:
    """Column scales, nibbles `[panels, COLUMNS, groups, GROUP]` and multipliers of the groups."""
    groups = rows.reshape(*rows.shape[:2], -1, GROUP)
    largest = np.abs(groups).max(-1)
    scale = largest.max(-1) / np.float32(NIBBLE_MAX * MULTIPLIER_MAX)
    divisor = _divisor(scale)[..., None]
    whole = np.clip(np.ceil(largest / (NIBBLE_MAX * divisor)), 1, MULTIPLIER_MAX)
    best = np.full(whole.shape, np.inf, np.float32)
    chosen, kept = np.zeros(groups.shape, np.int8), np.ones(whole.shape, np.int16)
    for less in range(TRIED + 1):
        factor = np.maximum(whole - less, 1)
        step = (factor * divisor)[..., None]
        nibbles = np.clip(np.rint(groups / step), -NIBBLE_MAX - 1, NIBBLE_MAX)
        error = np.square(nibbles * step - groups).sum(-1)
        better = error < best
        best = np.where(better, error, best)
        chosen = np.where(better[..., None], nibbles.astype(np.int8), chosen)
        kept = np.where(better, factor.astype(np.int16), kept)
    return scale, chosen, kept
