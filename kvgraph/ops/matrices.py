"""Weights of products on a GPU, in the activations' dtype, int8 or nibbles: operands, rules and
reference.

What `fused_experts` and `quantized_linear` share. A weight has one row for an output column, whose
inputs lie next to each other, so that a warp reads whole sectors. Its numbers are small whole
numbers times a scale: one for a column in int8, one for each GROUP inputs of a column in nibbles.
Products are summed in float32 and scaled after, so that nothing of a weight is rounded again.

Legend: M rows, N output columns, K inputs, H bytes of half a group.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvgraph.contract.dims import Array, ceildiv
from kvgraph.ops import spec

GROUP = 128
"""Inputs of a column under one scale of nibbles. Byte h of a group holds inputs h (its low half)
and h + GROUP / 2."""

HALF = GROUP // 2

BITS = (0, 8, 4)
"""Of a stored number; 0: weights are of the activations' dtype."""


def depth_of(in_features: int, bits: int) -> int:
    """Elements that a row is stored in: groups of nibbles are whole."""
    return ceildiv(in_features, GROUP) * HALF if bits == 4 else in_features


def groups_of(in_features: int, bits: int) -> int:
    """Scales of a column."""
    return ceildiv(in_features, GROUP) if bits == 4 else 1


def whole_numbers(weight: Array, in_features: int, bits: int) -> Array:
    """Reference: stored `[N, depth]` -> `[N, K]`, without scales."""
    if bits != 4:
        return weight
    bytes_NGH = weight.reshape(len(weight), -1, HALF)
    both_NGK = np.concatenate([bytes_NGH << 4 >> 4, bytes_NGH >> 4], -1)
    return both_NGK.reshape(len(weight), -1)[:, :in_features]


def product(
    x_MK: Array, weight: Array, scales: Array | None, bias: Array | None, bits: int
) -> Array:
    """Reference: `[M, N]` in float32, x times a weight and its scales `[groups, N]`, plus bias."""
    in_features = x_MK.shape[1]
    w_NK = whole_numbers(weight, in_features, bits).astype(np.float32)
    if scales is not None:
        each = GROUP if bits == 4 else in_features
        w_NK = w_NK * np.repeat(scales.T, each, axis=1)[:, :in_features]
    y_MN: Array = x_MK.astype(np.float32) @ w_NK.T
    return y_MN if bias is None else y_MN + bias.astype(np.float32)


def operands(
    name: str,
    columns: str,
    depth: str,
    groups: str,
    leading: tuple[str, ...] = (),
    prefix: str = "",
) -> tuple[spec.Operand, ...]:
    """A weight, its scales and its bias."""
    return (
        spec.Operand(name, (*leading, columns, depth), spec.MATRIX),
        spec.Operand(f"{prefix}scales", (*leading, groups, columns), spec.FLOAT32, optional=True),
        spec.Operand(f"{prefix}bias", (*leading, columns), spec.ACTIVATION, optional=True),
    )


KNOWN_BITS = spec.Rule("bits", lambda bits: bits not in BITS and "0, 8 or 4")


def rules(
    weight: tuple[spec.Operand, ...], inputs: str, of: str, share: int = 1
) -> tuple[spec.Rule, ...]:
    """Of the operands that `operands` made: what bits and the weight's inputs ask of them, which
    are one `share`-th of dim `inputs`, "`of`"."""
    name, scales, _ = (operand.name for operand in weight)
    depth, groups = str(weight[0].dims[-1]), str(weight[1].dims[-2])
    return (
        spec.Rule(name, _weight_fault, names=(name, "x", "bits")),
        spec.Rule(
            f"{name}: dim {depth}",
            _extent_fault(depth_of, of, share),
            names=(depth, inputs, "bits"),
        ),
        spec.Rule(scales, _missing_scales, names=(scales, "bits")),
        spec.Rule(scales, _unwanted_scales, names=(scales, "bits"), got="some"),
        spec.Rule(
            f"{scales}: dim {groups}",
            _extent_fault(groups_of, of, share),
            names=(groups, inputs, "bits"),
        ),
    )


def _weight_fault(weight: str, x: str, bits: int) -> bool | str:
    expected = "int8" if bits else x
    return weight != expected and f"{expected} for bits {bits} and x of {x}"


def _extent_fault(
    extent: Callable[[int, int], int], of: str, share: int
) -> Callable[..., bool | str]:
    def fault(found: int, inputs: int, bits: int) -> bool | str:
        expected = extent(inputs // share, bits)
        return found != expected and f"{expected} for {inputs // share} {of}"

    return fault


def _missing_scales(scales: str | None, bits: int) -> bool | str:
    return scales is None and bits > 0 and f"some for bits {bits}"


def _unwanted_scales(scales: str | None, bits: int) -> bool | str:
    return scales is not None and bits == 0 and "none for bits 0"
