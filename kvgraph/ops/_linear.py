"""linear: a linear layer over weights packed for the CPU, in bfloat16, int8 or int4.

Decisions, by `benchmarks/linear.py`, which compares the kernels of ONNX Runtime and torch:
- One op of ours for all three, since none of theirs is near the limits at every height: ONNX
  Runtime has no bfloat16 product on CPUs and torch's reads under half of what memory gives at one
  row; ONNX Runtime's int4 is fast at one row and a third of the int8 rate at many; its int8 has
  one activation scale for all rows of a step, so that a request's tokens depend on its batch.
- int8 is W8A8: symmetric, one weight scale for an output column and one activation scale for a
  row, found as it comes (no calibration). The sums are exact in int32, so that a row's result
  depends neither on the other rows nor on threads.
- int4 stores a multiplier 1 to 16 with each group of 32 inputs, under one float scale for a column
  (two-level scales, as QServe, arXiv 2405.04532, has them): nibble times multiplier is an exact
  int8, so one kernel serves rows by the hundred, and 4.125 bits a weight are read at one row.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from kvgraph.contract.dims import Array, ceildiv
from kvgraph.ops import spec

COLUMNS, DEPTH, GROUP = 16, 64, 32
"""Output columns of a panel; what K is padded to; inputs under one int4 multiplier."""

LINE_BYTES = 64

PER_LINE = {16: 2, 8: 4, 4: 8}
"""bits -> consecutive inputs of each column in a line."""


def unpack(weight: Array, multipliers: Array | None, bits: int) -> Array:
    """Stored weights `[panels * COLUMNS, K]` of packed lines: bfloat16, or exact int8."""
    panels, lines, _ = weight.shape
    if bits == 16:
        pairs = weight.reshape(panels, lines, COLUMNS, 2)
        return pairs.transpose(0, 2, 1, 3).reshape(panels * COLUMNS, lines * 2)
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


def linear(
    x_MK: Array,
    weight: Array,
    scales: Array | None = None,
    multipliers: Array | None = None,
    bias: Array | None = None,
    residual_MN: Array | None = None,
    *,
    out_features: int,
    out_features_1: int = 0,
    out_features_2: int = 0,
    bits: int,
    silu_mul: int = 0,
) -> Any:
    """Reference: x times each section of the weight, plus bias, SwiGLU or the residual.

    Sections (q, k and v of one layer, say) start at panels of their own. Under `silu_mul` panels
    alternate gate and up, and the output is `silu(gate) * up`.
    """
    width = x_MK.shape[1]
    w_NK = unpack(weight, multipliers, bits)[:, :width]
    if bits == 16:
        rounded_MK = x_MK.astype(ml_dtypes.bfloat16).astype(np.float64)
        y_MN = rounded_MK @ w_NK.astype(np.float64).T
    else:
        assert scales is not None
        stored_MK, own_M1 = quantize_rows(x_MK)
        sums_MN = stored_MK.astype(np.int64) @ w_NK.astype(np.int64).T
        y_MN = sums_MN.astype(np.float32) * (scales[:, 0].reshape(1, -1) * own_M1)
    if bias is not None:
        y_MN = y_MN + bias.reshape(1, -1)
    if silu_mul:
        gate_up = y_MN.reshape(len(y_MN), -1, 2, COLUMNS)
        gate, up = gate_up[:, :, 0].astype(np.float64), gate_up[:, :, 1]
        with np.errstate(over="ignore"):
            y_MN = (gate / (1 + np.exp(-gate)) * up).reshape(len(y_MN), -1)
    outs, column = [], 0
    for features in (out_features, out_features_1, out_features_2):
        if features:
            out = y_MN[:, column : column + features].astype(np.float32)
            outs.append(out if residual_MN is None else out + residual_MN)
            column += ceildiv(features, COLUMNS) * COLUMNS
    return tuple(outs) if len(outs) > 1 else outs[0]


def _out(index: int) -> spec.Operand:
    suffix = f"_{index}" if index else ""
    return spec.Operand(
        f"out{suffix}", ("rows", f"out_features{suffix}"), spec.FLOAT32, optional=index > 0
    )


def _weight_fault(weight: str, bits: int) -> bool | str:
    expected = "bfloat16" if bits == 16 else "int8"
    return weight != expected and f"{expected} for {bits} bits"


def _line_fault(line: int, bits: int) -> bool | str:
    expected = LINE_BYTES // 2 if bits == 16 else LINE_BYTES
    return line != expected and str(expected)


def _lines_fault(num_lines: int, in_features: int, bits: int) -> bool | str:
    expected = _depth(in_features) // PER_LINE[bits]
    return num_lines != expected and f"{expected} for {in_features} inputs of x"


def _missing_scales(scales: str | None, bits: int) -> bool | str:
    return scales is None and bits != 16 and f"some for {bits} bits"


def _unwanted_scales(scales: str | None, bits: int) -> bool | str:
    return scales is not None and bits == 16 and f"none for {bits} bits"


def _missing_multipliers(multipliers: str | None, bits: int) -> bool | str:
    return multipliers is None and bits == 4 and f"some for {bits} bits"


def _unwanted_multipliers(multipliers: str | None, bits: int) -> bool | str:
    return multipliers is not None and bits != 4 and f"none for {bits} bits"


def _groups_fault(num_groups: int, in_features: int) -> bool | str:
    expected = _depth(in_features) // GROUP
    return num_groups != expected and str(expected)


def _depth(in_features: int) -> int:
    return ceildiv(in_features, DEPTH) * DEPTH


def _panels_fault(
    num_panels: int, silu_mul: int, out_features: int, out_features_1: int, out_features_2: int
) -> bool | str:
    widths = (out_features, out_features_1, out_features_2)
    expected = sum(ceildiv(width, COLUMNS) for width in widths) * (2 if silu_mul else 1)
    return num_panels != expected and f"{expected} for out_features"


def _residual_fault(residual: str | None, out_features_1: int, out_features_2: int) -> bool | str:
    outputs = 1 + (out_features_1 > 0) + (out_features_2 > 0)
    return residual is not None and outputs > 1 and f"none with {outputs} outputs"


LINEAR = spec.OpSpec(
    name="linear",
    doc="Up to three linear layers of one input, over weights packed in panels of 16 columns.",
    inputs=(
        spec.Operand("x", ("rows", "in_features"), spec.FLOAT32),
        spec.Operand("weight", ("num_panels", "num_lines", "line"), spec.WEIGHT),
        spec.Operand("scales", ("num_panels", 2, COLUMNS), spec.FLOAT32, optional=True),
        spec.Operand("multipliers", ("num_panels", "num_groups", 8), ("int8",), optional=True),
        spec.Operand("bias", ("num_panels", COLUMNS), spec.FLOAT32, optional=True),
        spec.Operand("residual", ("rows", "out_features"), spec.FLOAT32, optional=True),
    ),
    outputs=(_out(0), _out(1), _out(2)),
    attributes=(
        spec.Attribute("out_features", "int"),
        spec.Attribute("out_features_1", "int", 0),
        spec.Attribute("out_features_2", "int", 0),
        spec.Attribute("bits", "int"),
        spec.Attribute("silu_mul", "int", 0),
    ),
    reference=linear,
    rules=(
        spec.Rule("x: dim in_features", lambda in_features: in_features < 1 and "at least 1"),
        spec.Rule("bits", lambda bits: bits not in PER_LINE and "16, 8 or 4"),
        spec.Rule("weight", _weight_fault),
        spec.Rule("weight: dim line", _line_fault),
        spec.Rule("weight: dim num_lines", _lines_fault),
        spec.Rule("scales", _missing_scales),
        spec.Rule("scales", _unwanted_scales, got="some"),
        spec.Rule("multipliers", _missing_multipliers),
        spec.Rule("multipliers", _unwanted_multipliers, got="some"),
        spec.Rule("multipliers: dim num_groups", _groups_fault),
        spec.Rule("out_features", lambda out_features: out_features < 0 and "at least 0"),
        spec.Rule("out_features_1", lambda out_features_1: out_features_1 < 0 and "at least 0"),
        spec.Rule("out_features_2", lambda out_features_2: out_features_2 < 0 and "at least 0"),
        spec.Rule("weight: dim num_panels", _panels_fault),
        spec.Rule("residual", _residual_fault, got="some"),
    ),
)
