"""Weights packed for the CPU in float32, bfloat16, int8 or int4: layout and reference.

`linear` and `experts` share this layout; their operands are in packed_rules.py. Weights are stored
in panels of 16 output columns. A panel's lines of 64 bytes follow each other along the inputs; each
line has the same few inputs of all columns.

Four bits have two forms. kvgraph's own form has two levels of scales: nibble times multiplier is an
exact int8. The form in groups keeps a checkpoint's numbers without another rounding: codes of
integers in four or eight bits, of FP4 in four, of FP8 in eight, and a scale for each column and
`group` inputs. A scale of NVFP4 is a byte, and its column has a factor. With groups, x is rounded
to bfloat16, not to int8.

Legend: M rows, K inputs, N output columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from kvgraph.contract.dims import Array, ceildiv
from kvgraph.contract.dtypes import PACKED, PACKED_FLOAT8

COLUMNS, DEPTH, GROUP = 16, 64, 32
"""Output columns of a panel; multiple to which K is padded; inputs under one int4 multiplier."""

MOST_INPUTS = 1 << 40
"""Largest number of inputs in an attribute, so that sizes computed from it fit 64 bits."""

MOST_SUMMED = 1 << 17
"""Most inputs of integers with one scale per column: products of int8 by x in int8 then fit int32
when summed, and a column's sum of int8 is exact in float32."""

LINE_BYTES = 64

PER_LINE = {32: 1, 16: 2, 8: 4, 4: 8}
"""Number of consecutive inputs of each column in a line, by bits."""

NVFP4_GROUP, MXFP4_GROUP = 16, 32
"""Inputs under one scale of NVFP4, and of MXFP4."""

INTEGERS, E2M1, E4M3, INT8, NVFP4, EIGHTHS, IQ4_NL = range(7)
"""Codes of groups: integers -8 to 7; FP4 (E2M1, OCP Microscaling Formats 1.0); FP8 (E4M3 without
infinities, OCP 8-bit Floating Point); integers -128 to 127; FP4 with scales in FP8 and a factor per
column (NVIDIA's NVFP4); integers -8 to 7 with offsets in eighths, which stand for the minimum of a
group that is not a multiple of its scale (GGUF's Q4_K and Q4_1); the 16 levels of GGUF's IQ4_NL
(kvalues_iq4nl in ggml-common.h)."""

CODE_BITS = {INTEGERS: 4, E2M1: 4, E4M3: 8, INT8: 8, NVFP4: 4, EIGHTHS: 4, IQ4_NL: 4}

WITHOUT_BYTES = (INTEGERS, IQ4_NL)
"""Codes of 4 bits whose groups need no bytes; only those of INTEGERS may have some."""

WITH_OFFSETS = (INTEGERS, EIGHTHS)
"""Codes whose groups may have offsets."""

OFFSET_UNIT = {EIGHTHS: 1 / 8}
"""Unit of the offsets of groups, if it is not 1."""

FP4 = (E2M1, NVFP4)
"""Codes of FP4 numbers; their scales are bytes of groups."""


def _floats(exponent_bits: int, mantissa_bits: int) -> Array:
    """All numbers with a sign, exponent and mantissa of these bits, in the order of their bits."""
    bias = (1 << (exponent_bits - 1)) - 1
    exponents, mantissas = np.divmod(
        np.arange(1 << (exponent_bits + mantissa_bits)), 1 << mantissa_bits
    )
    fractions = mantissas / (1 << mantissa_bits) + (exponents > 0)
    sizes = np.ldexp(fractions, np.maximum(exponents, 1) - bias).astype(np.float32)
    return np.concatenate([sizes, -sizes])


LEVELS = {
    INTEGERS: np.array([*range(8), *range(-8, 0)], np.float32),
    E2M1: _floats(2, 1),
    E4M3: _floats(4, 3),
    INT8: np.array([*range(128), *range(-128, 0)], np.float32),
    NVFP4: _floats(2, 1),
    EIGHTHS: np.array([*range(8), *range(-8, 0)], np.float32),
    IQ4_NL: np.array(
        [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32
    ),
}
"""Number of each code, by kind of codes. The largest code of E4M3 is a NaN and is never stored."""

IN_LINE = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}
"""Place in a column's word of each consecutive input in a line of groups, by bits; the two inputs
of a pair are 16 bits apart."""


@dataclass(frozen=True, order=True)
class Form:
    """Form of stored weights: attributes of an op, and whether integers in groups have offsets.

    `group`: inputs under one scale; 0 with 4 bits means two levels of scales.
    """

    bits: int
    group: int = 0
    codes: int = INTEGERS
    has_offsets: bool = False

    @property
    def has_scales(self) -> bool:
        """Whether it has float32 scales of columns or groups; E2M1's scales are bytes."""
        return 0 < self.bits < 16 and self.codes != E2M1

    @property
    def has_group_bytes(self) -> bool:
        """Whether groups have bytes: offsets, or scales of FP4. Two levels are not counted."""
        return self.has_offsets or self.codes in FP4

    def num_scales(self, in_features: int) -> int:
        """Number of float32 scales of a column of `in_features` inputs."""
        return num_scales(in_features, self.group, self.codes)

    def sums(self, in_features: int) -> bool:
        """Whether kernels of CPUs can sum the products of a column of `in_features` inputs."""
        return self.bits >= 16 or self.group > 0 or in_features <= MOST_SUMMED

    def attributes(self, stem: str = "") -> dict[str, int]:
        """Attributes of an op for a weight in this form, named by `stem`, without defaults."""
        groups = {f"{stem}group": self.group, f"{stem}codes": self.codes}
        given = {name: value for name, value in groups.items() if value}
        return {f"{stem}bits": self.bits, **given}


ACTIVATIONS = SILU, GELU, GELU_TANH = range(3)
"""Activations of a gate: x * sigmoid(alpha x), x * Phi(x), and the tanh approximation of the
latter."""


def unpack(weight: Array, group_bytes: Array | None, bits: int) -> Array:
    """Unpack lines into stored weights `[panels * COLUMNS, K]`: floats, or exact int8."""
    panels, lines, _ = weight.shape
    if bits >= 16:
        per = PER_LINE[bits]
        by_line = weight.reshape(panels, lines, COLUMNS, per)
        return by_line.transpose(0, 2, 1, 3).reshape(panels * COLUMNS, lines * per)
    four = weight.reshape(panels, lines, COLUMNS, 4).transpose(0, 2, 1, 3)
    if bits == 8:
        return four.reshape(panels * COLUMNS, lines * 4)
    assert group_bytes is not None
    nibbles = np.stack([four << 4 >> 4, four >> 4], 3).reshape(panels, COLUMNS, -1, GROUP)
    bytes_ = group_bytes.view(np.uint8)
    factors = np.stack([bytes_ & 15, bytes_ >> 4], -1).reshape(panels, -1, COLUMNS) + 1
    values: Array = nibbles.astype(np.int16) * factors.transpose(0, 2, 1)[..., None]
    return values.astype(np.int8).reshape(panels * COLUMNS, -1)


def quantize_rows(x_MK: Array) -> tuple[Array, Array]:
    """int8 rows and their scales `max|x| / 127`; the scale is NaN for a row that is not finite.
    Rows of numbers so small that the scale has no finite inverse are stored as zeros."""
    x_MK = x_MK.astype(np.float32)
    finite_M1 = np.isfinite(x_MK).all(-1, keepdims=True)
    clean_MK = np.where(finite_M1, x_MK, np.float32(0))
    largest_M1 = np.abs(clean_MK).max(-1, keepdims=True, initial=0)
    with np.errstate(divide="ignore", over="ignore"):
        inverse_M1 = np.float32(127) / largest_M1
    inverse_M1 = np.where(np.isfinite(inverse_M1), inverse_M1, np.float32(0))
    stored_MK = np.rint(clean_MK * inverse_M1).astype(np.int8)
    return stored_MK, np.where(finite_M1, largest_M1 / np.float32(127), np.float32(np.nan))


def powers(exponents: Array) -> Array:
    """Scales of E2M1: powers of two, from exponents with a bias of 127."""
    return (exponents.view(np.uint8).astype(np.uint32) << 23).view(np.float32)


def decode(
    weight: Array, scales: Array | None, group_bytes: Array | None, group: int, codes: int
) -> Array:
    """Decode packed groups into weights `[panels * COLUMNS, K]` in float64."""
    panels, lines, _ = weight.shape
    bits = CODE_BITS[codes]
    words = weight.view(np.uint8).reshape(panels, lines, COLUMNS, -1).view("<u4")
    found = words >> (bits * np.array(IN_LINE[bits], np.uint32)) & ((1 << bits) - 1)
    numbers = LEVELS[codes][found.transpose(0, 2, 1, 3).reshape(panels, COLUMNS, -1)]

    def of_inputs(each: Array) -> Array:
        spread: Array = each.transpose(0, 2, 1).repeat(group, -1)[..., : numbers.shape[-1]]
        return spread.astype(np.float64)

    if codes == E2M1:
        assert group_bytes is not None
        decoded = numbers * of_inputs(powers(group_bytes))
    elif codes == NVFP4:
        assert scales is not None
        assert group_bytes is not None
        own = numbers * of_inputs(LEVELS[E4M3][group_bytes.view(np.uint8)])
        decoded = own * scales.transpose(0, 2, 1).astype(np.float64)
    else:
        assert scales is not None
        unit = OFFSET_UNIT.get(codes, 1)
        offsets = 0.0 if group_bytes is None else of_inputs(group_bytes) * unit
        decoded = (numbers + offsets) * of_inputs(scales)
    flat: Array = decoded.reshape(panels * COLUMNS, -1)
    return flat


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
    """Reference: x times the weight of all panels, plus bias: `[M, panels * COLUMNS]`."""
    if group:
        import ml_dtypes

        w_NK = decode(weight, scales, group_bytes, group, codes)[:, : x_MK.shape[1]]
        y_MN = x_MK.astype(ml_dtypes.bfloat16).astype(np.float64) @ w_NK.T
        return y_MN if bias is None else y_MN + bias.reshape(1, -1)
    w_NK = unpack(weight, group_bytes, bits)[:, : x_MK.shape[1]]
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
    """Reference: join panels that alternate gate and up, `[M, N]`, to `[M, N / 2]`:
    `activation(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)`; limit 0 means none.
    """
    rows, panels = len(y_MN), y_MN.shape[1] // COLUMNS
    halves = y_MN.reshape(rows, panels // 2, 2, COLUMNS)
    both = joined(halves[:, :, 0], halves[:, :, 1], activation, alpha, limit, up_offset)
    flat: Array = both.reshape(rows, panels // 2 * COLUMNS)
    return flat


def joined(
    gate: Array,
    up: Array,
    activation: int = SILU,
    alpha: float = 1.0,
    limit: float = 0.0,
    up_offset: float = 0.0,
) -> Array:
    """Reference: join a gate and its `up` by the formula of `gated`, in float64."""
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


def least_group(codes: int) -> int:
    """Number of which a group's inputs must be a multiple."""
    return NVFP4_GROUP if codes == NVFP4 else GROUP


def stored_dtype(bits: int, codes: int = INTEGERS) -> str:
    """Dtype of packed weights; one int8 holds two elements of 4 bits."""
    return PACKED_FLOAT8 if codes == E4M3 else PACKED[bits]


def num_groups(in_features: int, group: int = 0) -> int:
    """Number of groups of a column; `group` 0 means the groups of two levels."""
    return ceildiv(padded_depth(in_features), group or GROUP)


def num_scales(in_features: int, group: int = 0, codes: int = INTEGERS) -> int:
    """Number of float32 scales of a column: a scale and a sum, scales of groups, or one factor."""
    if not group:
        return 2
    return 1 if codes == NVFP4 else num_groups(in_features, group)


def padded_depth(in_features: int) -> int:
    """`in_features` rounded up to a multiple of DEPTH; a panel has zeros there."""
    return ceildiv(in_features, DEPTH) * DEPTH


def panel_count(features: int) -> int:
    """Number of panels for `features` output columns."""
    return ceildiv(features, COLUMNS)


Rest: TypeAlias = tuple[Array | None, Array | None, Array | None]
"""Scales, bytes of groups, and biases, each of all experts or None."""


def of_expert(expert: int, rest: Rest) -> Rest:
    scales, group_bytes, bias = (None if array is None else array[expert] for array in rest)
    return scales, group_bytes, bias
