"""quantized_linear: a linear layer on a GPU over weights in fewer bits.

Decisions: activations keep their dtype, unless the checkpoint was made for quantized activations
(`x_bits`): then each row has its own scale, so that a result depends on no other row. Up to three
layers of one input are one product, and so are gate and up, whose rows alternate.
"""

from __future__ import annotations

from kvgraph.contract.dims import Array
from kvgraph.ops import matrices, packed, packed_rules, spec


def quantized_linear(
    x: Array,
    weight: Array,
    scales: Array | None = None,
    group_bytes: Array | None = None,
    bias: Array | None = None,
    *,
    out_features: int,
    out_features_1: int = 0,
    out_features_2: int = 0,
    bits: int,
    group: int = 0,
    codes: int = packed.INTEGERS,
    silu_mul: int = 0,
    x_bits: int = 0,
) -> tuple[Array, ...]:
    """Reference: x times each section of the weight, plus bias, rounded to x's dtype.

    With `silu_mul` the rows of the weight alternate gate and up, and the output is
    `silu(gate) * up`, rounded once. With `x_bits` each row of x is first rounded to numbers of the
    weight's kind, with one scale.
    """
    rows = x.reshape(-1, x.shape[-1])
    if x_bits:
        rows = matrices.rounded(rows, codes)
    y_MN = matrices.product(rows, weight, scales, group_bytes, bias, bits, group, codes)
    if silu_mul:
        y_MN = packed.joined(y_MN[:, ::2], y_MN[:, 1::2])
    outs, column = [], 0
    for features in (out_features, out_features_1, out_features_2):
        out = y_MN[:, column : column + features].astype(x.dtype)
        outs.append(out.reshape(*x.shape[:-1], features) if features else out[:0])
        column += features
    return tuple(outs)


def _out(index: int) -> spec.Operand:
    suffix = f"_{index}" if index else ""
    return spec.Operand(
        f"out{suffix}", ("...", f"out_features{suffix}"), spec.ACTIVATION, optional=index > 0
    )


def _columns_fault(
    num_columns: int, silu_mul: int, out_features: int, out_features_1: int, out_features_2: int
) -> bool | str:
    expected = (out_features + out_features_1 + out_features_2) * (2 if silu_mul else 1)
    return num_columns != expected and f"{expected} for out_features"


def _sections_fault(silu_mul: int, out_features_1: int, out_features_2: int) -> bool | str:
    return bool(silu_mul and out_features_1 + out_features_2) and "0 with several outputs"


def _x_bits_fault(x_bits: int, bits: int, group: int, codes: int) -> bool | str:
    if x_bits not in (0, 8):
        return "0 or 8"
    is_scaled_once = group == 0 or (codes == packed.E4M3 and group == matrices.GROUP)
    return x_bits > 0 and not (bits == 8 and is_scaled_once) and f"0 for bits {bits}, group {group}"


_WEIGHT = matrices.operands("weight", "num_columns", "depth", "num_groups")

QUANTIZED_LINEAR = spec.OpSpec(
    name="quantized_linear",
    doc="Up to three linear layers of one input, over weights in fewer bits.",
    inputs=(spec.Operand("x", ("...", "in_features"), spec.ACTIVATION), *_WEIGHT),
    outputs=(_out(0), _out(1), _out(2)),
    attributes=(
        spec.Attribute("out_features", "int"),
        spec.Attribute("out_features_1", "int", 0),
        spec.Attribute("out_features_2", "int", 0),
        *packed_rules.attributes(),
        spec.Attribute("silu_mul", "int", 0),
        spec.Attribute("x_bits", "int", 0),
    ),
    reference=quantized_linear,
    rules=(
        spec.Rule("x: dim in_features", lambda in_features: in_features < 1 and "at least 1"),
        spec.Rule("bits", lambda bits: bits not in (8, 4) and "8 or 4"),
        *matrices.form_rules(),
        *matrices.rules(_WEIGHT, "in_features", "inputs of x"),
        spec.Rule("out_features", lambda out_features: out_features < 1 and "at least 1"),
        spec.Rule("out_features_1", lambda out_features_1: out_features_1 < 0 and "at least 0"),
        spec.Rule("out_features_2", lambda out_features_2: out_features_2 < 0 and "at least 0"),
        spec.Rule("weight: dim num_columns", _columns_fault),
        spec.Rule("silu_mul", _sections_fault),
        spec.Rule("x_bits", _x_bits_fault),
    ),
)
