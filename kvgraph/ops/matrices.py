"""Weights of products on a GPU, in the activations' dtype or in fewer bits: operands, rules and
reference, which `fused_experts` and `quantized_linear` share.

A weight has one row per output column, with the column's inputs next to each other, so that a warp
reads whole sectors. Its numbers are exact in every dtype of activations. Each column has one scale
for all its inputs, or one for each `group` of inputs. Products are summed in float32 and scaled
afterwards, so that a weight is not rounded again.

Legend: M rows, N output columns, K inputs, S spans, H bytes of a span.
"""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import numpy as np

from kvgraph.contract.dims import Array, ceildiv
from kvgraph.contract.dtypes import DTYPES, PACKED_FLOAT8
from kvgraph.ops import spec
from kvgraph.ops._store_kv import quantize
from kvgraph.ops.packed import (
    E2M1,
    E4M3,
    EIGHTHS,
    INT8,
    INTEGERS,
    IQ4_NL,
    LEVELS,
    NVFP4,
    OFFSET_UNIT,
    Form,
    powers,
)
from kvgraph.ops.packed_rules import form_of, known_codes

UNKNOWN = (NVFP4, IQ4_NL)
"""Codes that no kernel supports."""

GROUP = 128
"""Most inputs of a column under one scale; the default group of nibbles."""

GROUPS = (0, 32, 64, GROUP)
"""Inputs under one scale; 0: GROUP for nibbles, all inputs for bytes."""

BITS = (0, 8, 4)
"""Bits of a stored number; 0: weights have the activations' dtype."""


def of_kernels(form: Form, in_features: int = 0) -> Form:
    """`form` with a group that kernels support; the scales of larger groups are repeated. Bytes
    with one scale per row of `in_features` inputs keep it."""
    is_row = form.bits == 8 and 0 < in_features <= form.group
    group = 0 if is_row or not form.group else gcd(form.group, GROUP)
    codes = INTEGERS if is_row and form.codes == INT8 else form.codes
    return Form(form.bits, group, codes, form.has_offsets)


def takes(form: Form) -> bool:
    """Whether kernels can read weights of this form; none supports scales of groups of 16, or
    GGUF's own levels."""
    return form.codes not in UNKNOWN


def group_of(bits: int, group: int = 0) -> int:
    """Inputs under one scale; 0 means all inputs of a column."""
    return group or (GROUP if bits == 4 else 0)


def span_of(group: int = 0) -> int:
    """Inputs whose nibbles are stored together: one group, or two so that a row's bytes fill a
    sector. Byte h of a span holds inputs h (its low half) and h + span / 2."""
    return min(2 * (group or GROUP), GROUP)


def depth_of(in_features: int, bits: int, group: int = 0) -> int:
    """Stored elements of a row; nibbles are padded to whole spans."""
    span = span_of(group)
    return ceildiv(in_features, span) * span // 2 if bits == 4 else in_features


def groups_of(in_features: int, bits: int, group: int = 0) -> int:
    """Number of scales of a column."""
    each = group_of(bits, group)
    return ceildiv(in_features, each) if each else 1


def stored_dtype(bits: int, codes: int, activations: str) -> str:
    """Dtype of a stored element of a weight."""
    if not bits:
        return activations
    return PACKED_FLOAT8 if codes == E4M3 else "int8"


def rounded(x_MK: Array, codes: int) -> Array:
    """Reference: rows in float32, rounded to a scale times 8-bit numbers of `codes`. The scale is
    the row's largest magnitude divided by the largest number."""
    kind = stored_dtype(8, codes, "")
    with np.errstate(invalid="ignore"):  # a row that is not finite gets a scale that is not finite
        stored_MK, scales_M1 = quantize(x_MK, kind, 1)
        numbers: Array = stored_MK.astype(DTYPES[kind].numpy).astype(np.float32)
        return numbers * scales_M1


def numbers_of(
    weight: Array, in_features: int, bits: int, group: int = 0, codes: int = INTEGERS
) -> Array:
    """Reference: numbers `[N, K]` of a stored weight `[N, depth]`, in float32, without offsets and
    scales."""
    if bits != 4:
        return weight.astype(np.float32)
    bytes_NSH = weight.view(np.uint8).reshape(len(weight), -1, span_of(group) // 2)
    codes_NSK = np.concatenate([bytes_NSH & 15, bytes_NSH >> 4], -1)
    numbers: Array = LEVELS[codes][codes_NSK.reshape(len(weight), -1)[:, :in_features]]
    return numbers


def decode(
    weight: Array,
    scales: Array | None,
    group_bytes: Array | None,
    in_features: int,
    bits: int,
    group: int = 0,
    codes: int = INTEGERS,
) -> Array:
    """Reference: the weight `[N, K]` in float32."""
    w_NK = numbers_of(weight, in_features, bits, group, codes)

    def of_inputs(each: Array) -> Array:
        return np.repeat(each.T, group_of(bits, group) or in_features, axis=1)[:, :in_features]

    if codes == E2M1:
        assert group_bytes is not None
        scales = powers(group_bytes)
    elif group_bytes is not None:
        w_NK = w_NK + of_inputs(group_bytes) * np.float32(OFFSET_UNIT.get(codes, 1))
    return w_NK if scales is None else w_NK * of_inputs(scales)


def product(
    x_MK: Array,
    weight: Array,
    scales: Array | None,
    group_bytes: Array | None,
    bias: Array | None,
    bits: int,
    group: int = 0,
    codes: int = INTEGERS,
) -> Array:
    """Reference: `[M, N]` in float32, x times a weight, plus bias."""
    w_NK = decode(weight, scales, group_bytes, x_MK.shape[1], bits, group, codes)
    y_MN: Array = x_MK.astype(np.float32) @ w_NK.T
    return y_MN if bias is None else y_MN + bias.astype(np.float32)


def operands(
    name: str,
    columns: str,
    depth: str,
    groups: str,
    leading: tuple[str, ...] = (),
    stem: str = "",
    variable: str | None = None,
) -> tuple[spec.Operand, ...]:
    """Operands of a weight: the weight, its scales, bytes of groups and bias, named by `stem`.

    group_bytes: for integers the offset that is added to each number, for EIGHTHS in eighths; for
    E2M1 the exponent of a scale (bias 127), instead of scales. `variable`: type variable of the
    weight, if it is not that of all weights.
    """
    of_groups = (*leading, groups, columns)
    return (
        spec.Operand(name, (*leading, columns, depth), spec.MATRIX, variable=variable),
        spec.Operand(f"{stem}scales", of_groups, spec.FLOAT32, optional=True),
        spec.Operand(f"{stem}group_bytes", of_groups, ("int8",), optional=True),
        spec.Operand(f"{stem}bias", (*leading, columns), spec.ACTIVATION, optional=True),
    )


def known_bits(stem: str) -> spec.Rule:
    """Rule that the bits of the weight with this stem are supported."""
    bits, *_ = form_of(stem)
    return spec.Rule(bits, lambda bits: bits not in BITS and "0, 8 or 4", names=(bits,))


def form_rules(stem: str = "") -> tuple[spec.Rule, ...]:
    """Rules of the form in which the weight with this stem is stored, besides bits."""
    bits, group, _ = form_of(stem)
    return (
        spec.Rule(group, lambda group: group not in GROUPS and "0, 32, 64 or 128", names=(group,)),
        spec.Rule(
            group, lambda group, bits: group and not bits and "0 for bits 0", names=(group, bits)
        ),
        known_codes(*UNKNOWN, of_rows=(E4M3,), stem=stem),
    )


def rules(
    weight: tuple[spec.Operand, ...], inputs: str, of: str, share: int = 1, stem: str = ""
) -> tuple[spec.Rule, ...]:
    """Rules of the operands that `operands` made. The weight's inputs are dim `inputs` divided by
    `share`; `of` describes them in errors."""
    bits, group, codes = form_of(stem)
    name, scales, group_bytes, _ = (operand.name for operand in weight)
    depth, groups = str(weight[0].dims[-1]), str(weight[1].dims[-2])
    return (
        spec.Rule(name, _weight_fault, names=(name, "x", bits, codes)),
        spec.Rule(
            f"{name}: dim {depth}",
            _extent_fault(depth_of, of, share),
            names=(depth, inputs, bits, group),
        ),
        spec.Rule(scales, _missing_scales, names=(scales, bits, codes)),
        spec.Rule(scales, _unwanted_scales, names=(scales, bits, codes), got="some"),
        spec.Rule(group_bytes, _missing_bytes, names=(group_bytes, codes)),
        spec.Rule(group_bytes, _unwanted_bytes, names=(group_bytes, bits), got="some"),
        spec.Rule(
            f"{scales}: dim {groups}",
            _extent_fault(groups_of, of, share),
            names=(groups, inputs, bits, group),
        ),
    )


def _weight_fault(weight: str, x: str, bits: int, codes: int) -> bool | str:
    expected = stored_dtype(bits, codes, x)
    return weight != expected and f"{expected} for bits {bits} and x of {x}"


def _extent_fault(
    extent: Callable[[int, int, int], int], of: str, share: int
) -> Callable[..., bool | str]:
    def fault(found: int, inputs: int, bits: int, group: int) -> bool | str:
        expected = extent(inputs // share, bits, group)
        return found != expected and f"{expected} for {inputs // share} {of}"

    return fault


def _missing_scales(scales: str | None, bits: int, codes: int) -> bool | str:
    return scales is None and bits > 0 and codes != E2M1 and f"some for bits {bits}"


def _unwanted_scales(scales: str | None, bits: int, codes: int) -> bool | str:
    if scales is not None and bits == 0:
        return "none for bits 0"
    return scales is not None and codes == E2M1 and f"none for codes {codes}"


def _missing_bytes(group_bytes: str | None, codes: int) -> bool | str:
    return group_bytes is None and codes in (E2M1, EIGHTHS) and f"some for codes {codes}"


def _unwanted_bytes(group_bytes: str | None, bits: int) -> bool | str:
    return group_bytes is not None and bits != 4 and f"none for bits {bits}"
