"""Weights packed for the CPU in float32, bfloat16, int8 or int4: operands, rules and reference.

What `linear` and `experts` share. Weights lie in panels of 16 output columns; a panel's lines of 64
bytes follow each other along the inputs, each with the same few inputs of all its columns.

Legend: M rows, K inputs, N output columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from kvgraph.contract.dims import Array, ceildiv
from kvgraph.contract.dtypes import PACKED
from kvgraph.ops import spec

COLUMNS, DEPTH, GROUP = 16, 64, 32
"""Output columns of a panel; what K is padded to; inputs under one int4 multiplier."""

LINE_BYTES = 64

PER_LINE = {32: 1, 16: 2, 8: 4, 4: 8}
"""bits -> consecutive inputs of each column in a line."""

ACTIVATIONS = SILU, GELU, GELU_TANH = range(3)
"""Of a gate: x * sigmoid(alpha x), x * Phi(x), and the latter by its tanh form."""


def unpack(weight: Array, multipliers: Array | None, bits: int) -> Array:
    """Stored weights `[panels * COLUMNS, K]` of packed lines: floats, or exact int8."""
    panels, lines, _ = weight.shape
    if bits >= 16:
        per = PER_LINE[bits]
        by_line = weight.reshape(panels, lines, COLUMNS, per)
        return by_line.transpose(0, 2, 1, 3).reshape(panels * COLUMNS, lines * per)
    four = weight.reshape(panels, lines, COLUMNS, 4).transpose(0, 2, 1, 3)
    if bits == 8:
        return four.reshape(panels * COLUMNS, lines * 4)
    assert multipliers is not None
    nibbles = np.stack([four << 4 >> 4, four >> 4], 3).reshape(panels, COLUMNS, -1, GROUP)
    bytes_ = multipliers.view(np.uint8)
    factors = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(panels, -1, COLUMNS) + 1
    values: Array = nibbles.astype(np.int16) * factors.transpose(0, 2, 1)[..., None]
    return values.astype(np.int8).reshape(panels * COLUMNS, -1)


def quantize_rows(x_MK: Array) -> tuple[Array, Array]:
    """int8 rows and their scales `max|x| / 127`; NaN for a row that has a NaN or an infinity."""
    x_MK = x_MK.astype(np.float32)
    finite_M1 = np.isfinite(x_MK).all(-1, keepdims=True)
    clean_MK = np.where(finite_M1, x_MK, np.float32(0))
    largest_M1 = np.abs(clean_MK).max(-1, keepdims=True, initial=0)
    with np.errstate(divide="ignore", over="ignore"):
        inverse_M1 = np.where(largest_M1 > 0, np.float32(127) / largest_M1, np.float32(0))
    stored_MK = np.rint(clean_MK * inverse_M1).astype(np.int8)
    return stored_MK, np.where(finite_M1, largest_M1 / np.float32(127), np.float32(np.nan))


def product(
    x_MK: Array,
    weight: Array,
    scales: Array | None,
    multipliers: Array | None,
    bias: Array | None,
    bits: int,
) -> Array:
    """Reference: `[M, panels * COLUMNS]`, x times the weight of all panels, plus bias."""
    w_NK = unpack(weight, multipliers, bits)[:, : x_MK.shape[1]]
    if bits >= 16:
        rounded_MK = x_MK.astype(w_NK.dtype).astype(np.float64)
        y_MN = rounded_MK @ w_NK.astype(np.float64).T
    else:
        assert scales is not None
        stored_MK, own_M1 = quantize_rows(x_MK)
        sums_MN = stored_MK.astype(np.int64) @ w_NK.astype(np.int64).T
        y_MN = sums_MN.astype(np.float32) * (scales[:, 0].reshape(1, -1) * own_M1)
    return y_MN if bias is None else y_MN + bias.reshape(1, -1)


def gated(
    y_MN: Array,
    activation: int = SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Array:
    """Reference: `[M, N / 2]` of panels that alternate gate and up:
    `activation(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)`; limit 0: none.
    """
    halves = y_MN.reshape(len(y_MN), -1, 2, COLUMNS)
    both = joined(halves[:, :, 0], halves[:, :, 1], activation, alpha, limit, up_offset)
    flat: Array = both.reshape(len(y_MN), -1)
    return flat


def joined(
    gate: Array,
    up: Array,
    activation: int = SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Array:
    """Reference, in float64: what `gated` makes of a gate and what it lets through."""
    most = limit or math.inf
    gate = np.minimum(gate.astype(np.float64), most)
    up = np.clip(up.astype(np.float64), -most, most)
    with np.errstate(over="ignore"):
        if activation == SILU:
            gate = gate / (1 + np.exp(-alpha * gate))
        elif activation == GELU:
            gate = gate * np.vectorize(_normal, otypes=[np.float64])(gate)
        else:
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
            gate = gate / (1 + np.exp(-2 * inner))
    product: Array = gate * (up + up_offset)
    return product


def _normal(x: float) -> float:
    return (1 + math.erf(x / math.sqrt(2))) / 2


def operands(
    name: str, panels: str, lines: str, groups: str, leading: tuple[str, ...] = (), prefix: str = ""
) -> tuple[spec.Operand, ...]:
    """A weight and what belongs to it: scales with column sums, multipliers, bias."""
    return (
        spec.Operand(name, (*leading, panels, lines, "line"), spec.WEIGHT),
        spec.Operand(
            f"{prefix}scales", (*leading, panels, 2, COLUMNS), spec.FLOAT32, optional=True
        ),
        spec.Operand(
            f"{prefix}multipliers", (*leading, panels, groups, 8), ("int8",), optional=True
        ),
        spec.Operand(f"{prefix}bias", (*leading, panels, COLUMNS), spec.FLOAT32, optional=True),
    )


BITS = spec.Rule("bits", lambda bits: bits not in PER_LINE and "32, 16, 8 or 4")


def rules(weight: tuple[spec.Operand, ...], in_features: str, of: str) -> tuple[spec.Rule, ...]:
    """Of the operands that `operands` made: what bits and `in_features`, "`of`'s", ask of them."""
    name, scales, multipliers, _ = (operand.name for operand in weight)
    lines, line, groups = weight[0].dims[-2], weight[0].dims[-1], weight[2].dims[-2]
    return (
        spec.Rule(name, _weight_fault, names=(name, "bits")),
        spec.Rule(f"{name}: dim {line}", _line_fault, names=(str(line), "bits")),
        spec.Rule(
            f"{name}: dim {lines}", _lines_fault(of), names=(str(lines), in_features, "bits")
        ),
        spec.Rule(scales, _missing_scales, names=(scales, "bits")),
        spec.Rule(scales, _unwanted_scales, names=(scales, "bits"), got="some"),
        spec.Rule(multipliers, _missing_multipliers, names=(multipliers, "bits")),
        spec.Rule(multipliers, _unwanted_multipliers, names=(multipliers, "bits"), got="some"),
        spec.Rule(f"{multipliers}: dim {groups}", _groups_fault, names=(str(groups), in_features)),
    )


def _weight_fault(weight: str, bits: int) -> bool | str:
    return weight != PACKED[bits] and f"{PACKED[bits]} for {bits} bits"


def _line_fault(line: int, bits: int) -> bool | str:
    expected = COLUMNS * PER_LINE[bits] if bits >= 16 else LINE_BYTES
    return line != expected and str(expected)


def _lines_fault(of: str) -> Callable[..., bool | str]:
    def fault(num_lines: int, in_features: int, bits: int) -> bool | str:
        expected = padded_depth(in_features) // PER_LINE[bits]
        return num_lines != expected and f"{expected} for {in_features} {of}"

    return fault


def _missing_scales(scales: str | None, bits: int) -> bool | str:
    return scales is None and bits < 16 and f"some for {bits} bits"


def _unwanted_scales(scales: str | None, bits: int) -> bool | str:
    return scales is not None and bits >= 16 and f"none for {bits} bits"


def _missing_multipliers(multipliers: str | None, bits: int) -> bool | str:
    return multipliers is None and bits == 4 and f"some for {bits} bits"


def _unwanted_multipliers(multipliers: str | None, bits: int) -> bool | str:
    return multipliers is not None and bits != 4 and f"none for {bits} bits"


def _groups_fault(num_groups: int, in_features: int) -> bool | str:
    expected = padded_depth(in_features) // GROUP
    return num_groups != expected and str(expected)


def padded_depth(in_features: int) -> int:
    """`in_features` and the zeros behind them in a panel."""
    return ceildiv(in_features, DEPTH) * DEPTH


def panel_count(features: int) -> int:
    """Panels of `features` output columns."""
    return ceildiv(features, COLUMNS)
