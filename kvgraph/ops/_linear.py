"""linear: a linear layer over weights packed for the CPU, in float32, bfloat16, int8 or int4.

Decisions, by `benchmarks/linear.py`, which compares the kernels of ONNX Runtime and torch:
- One kvgraph op for all precisions, since no op of theirs is near the hardware's limits for every
  number of rows. ONNX Runtime has no bfloat16 product on CPUs, and torch's reads at under half of
  the memory bandwidth at one row. ONNX Runtime's int4 is fast at one row and has a third of the
  int8 rate at many. Its int8 has one activation scale for all rows of a step, so that a request's
  tokens depend on its batch.
- int8 is W8A8: symmetric, with one weight scale per output column and one activation scale per row,
  computed at run time (no calibration). The sums are exact in int32, so that a row's result depends
  neither on the other rows nor on threads. int8 and int4 without groups have at most 131,072
  inputs (`packed.MOST_SUMMED`): sums of more may not fit int32.
- int4 stores a multiplier 1 to 16 with each group of 32 inputs, and one float scale per column
  (two-level scales, as in QServe, arXiv 2405.04532). Nibble times multiplier is an exact int8, so
  one kernel serves hundreds of rows, and reads 4.125 bits per weight at one row.
- Groups of 4 bits are stored by checkpoints (AWQ, GPTQ, compressed-tensors, MXFP4). A nibble is an
  index into 16 numbers that bfloat16 holds exactly, so that only x is rounded, to bfloat16. A
  group's sum is scaled when it is complete; the order is the same for any number of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops import packed, packed_rules, spec
from kvgraph.ops.packed import COLUMNS, panel_count

OUT_FEATURES = ("out_features", "out_features_1", "out_features_2")
"""Attributes with the width of each output, of `quantized_linear` too."""


def linear(
    x_MK: Array,
    weight: Array,
    scales: Array | None = None,
    group_bytes: Array | None = None,
    bias: Array | None = None,
    residual_MN: Array | None = None,
    *,
    out_features: int,
    out_features_1: int = 0,
    out_features_2: int = 0,
    bits: int,
    group: int = 0,
    codes: int = packed.INTEGERS,
    silu_mul: int = 0,
) -> Any:
    """Reference: x times each section of the weight, plus bias, SwiGLU or the residual.

    Each section (q, k and v of one layer, for example) starts at a new panel. With `silu_mul`
    panels alternate gate and up, and the output is `silu(gate) * up`.
    """
    y_MN = packed.product(x_MK, weight, scales, group_bytes, bias, bits, group, codes)
    if silu_mul:
        y_MN = packed.gated(y_MN)
    outs, column = [], 0
    for features in (out_features, out_features_1, out_features_2):
        if features:
            out = y_MN[:, column : column + features].astype(np.float32)
            outs.append(out if residual_MN is None else out + residual_MN)
            column += panel_count(features) * COLUMNS
    return tuple(outs) if len(outs) > 1 else outs[0]


def _out(index: int) -> spec.Operand:
    suffix = f"_{index}" if index else ""
    return spec.Operand(
        f"out{suffix}", ("rows", f"out_features{suffix}"), spec.FLOAT32, optional=index > 0
    )


def _panels_fault(
    num_panels: int, silu_mul: int, out_features: int, out_features_1: int, out_features_2: int
) -> bool | str:
    widths = (out_features, out_features_1, out_features_2)
    expected = sum(map(panel_count, widths)) * (2 if silu_mul else 1)
    return num_panels != expected and f"{expected} for out_features"


def _residual_fault(residual: str | None, out_features_1: int, out_features_2: int) -> bool | str:
    outputs = 1 + (out_features_1 > 0) + (out_features_2 > 0)
    return residual is not None and outputs > 1 and f"none with {outputs} outputs"


_WEIGHT = packed_rules.operands("weight")

LINEAR = spec.OpSpec(
    name="linear",
    doc="Up to three linear layers of one input, over weights packed in panels of 16 columns.",
    inputs=(
        spec.Operand("x", ("rows", "in_features"), spec.FLOAT32),
        *_WEIGHT,
        spec.Operand("residual", ("rows", "out_features"), spec.FLOAT32, optional=True),
    ),
    outputs=(_out(0), _out(1), _out(2)),
    attributes=(
        spec.Attribute("out_features", "int"),
        spec.Attribute("out_features_1", "int", 0),
        spec.Attribute("out_features_2", "int", 0),
        *packed_rules.attributes(),
        spec.Attribute("silu_mul", "int", 0),
    ),
    reference=linear,
    rules=(
        spec.Rule("x: dim in_features", lambda in_features: in_features < 1 and "at least 1"),
        *packed_rules.form_rules(),
        *packed_rules.rules(_WEIGHT, "in_features", "inputs of x"),
        packed_rules.summed("x: dim in_features"),
        spec.Rule("out_features", lambda out_features: out_features < 0 and "at least 0"),
        spec.Rule("out_features_1", lambda out_features_1: out_features_1 < 0 and "at least 0"),
        spec.Rule("out_features_2", lambda out_features_2: out_features_2 < 0 and "at least 0"),
        spec.Rule("weight: dim num_panels", _panels_fault),
        spec.Rule("residual", _residual_fault, got="some"),
    ),
)
