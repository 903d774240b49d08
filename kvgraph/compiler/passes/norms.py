"""Find RMSNorm in a graph: `x * rsqrt(mean(x^2) + epsilon)` over the last dim, times a weight.

It is written in ATen operators, in float32, or as one aten.rms_norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from kvgraph.compiler.passes.operands import (
    CASTS,
    UnmatchedError,
    any_node,
    expect,
    node_of,
    only_user,
    other_factor,
    rounded,
    typed,
    value,
)

aten = torch.ops.aten
COMPOSED, RATE = aten.rms_norm.default, aten.rsqrt.default
ADD, MUL = aten.add.Tensor, aten.mul.Tensor
HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Norm:
    """One RMSNorm of a graph; `out` is its result."""

    x: Node
    weight: Node
    epsilon: float
    offset: float
    round_first: bool
    out: Node


def find_norm(node: Node) -> Norm:
    """The Norm whose rate, or whose composed form, is `node`. UnmatchedError for another node."""
    norm = _composed(node) if node.target is COMPOSED else _written_out(node)
    _require_types(norm)
    return norm


def _written_out(rate: Node) -> Norm:
    wide, epsilon = _squares(rate)
    x = _before_cast(wide)
    dtype = value(x).dtype
    scaled = node_of(only_user(rate, "the rate"), [MUL], "x times the rate")
    expect(other_factor(scaled, rate) is wide, "expected x times its own rate")
    normal = rounded(scaled, dtype)
    weighted = node_of(only_user(normal, "the normalised rows"), [MUL], "a weight next")
    weight, offset = _weight(other_factor(weighted, normal))
    return Norm(x, weight, epsilon, offset, normal is not scaled, rounded(weighted, dtype))


def _squares(rate: Node) -> tuple[Node, float]:
    """x in float32 and epsilon, if `rate` is `rsqrt(mean(x^2) + epsilon)`; else UnmatchedError."""
    shifted = node_of(rate.args[0], [ADD], "the rate of a mean plus epsilon")
    epsilon = shifted.args[1]
    if not isinstance(epsilon, float):
        raise UnmatchedError(f"expected a constant epsilon, got {epsilon}")
    mean = node_of(shifted.args[0], [aten.mean.dim], "the rate of a mean")
    expect(list(mean.args[1:]) == [[-1], True], f"expected the last dim's mean, got {mean.args}")
    square = node_of(mean.args[0], [aten.pow.Tensor_Scalar], "a mean of squares")
    expect(square.args[1] in (2, 2.0), f"expected a mean of squares, got power {square.args[1]}")
    wide = any_node(square.args[0], "a tensor")
    expect(value(wide).dtype == torch.float32, f"expected squares in float32, got {typed(wide)}")
    return wide, epsilon


def _before_cast(wide: Node) -> Node:
    """x in 16 bits, if `wide` is x cast to float32; else `wide`."""
    given = wide.args[0] if wide.target in CASTS else wide
    return given if isinstance(given, Node) and value(given).dtype in HALVES else wide


def _weight(factor: Node) -> tuple[Node, float]:
    """The norm's weight, and the constant that is added to it in float32 (0 if none)."""
    offset = 0.0
    if factor.target is ADD:
        constant = factor.args[1]
        if not isinstance(constant, int | float) or value(factor).dtype != torch.float32:
            raise UnmatchedError(f"expected a weight plus a constant in float32, got {factor.args}")
        factor, offset = any_node(factor.args[0], "a weight"), float(constant)
    if factor.target in CASTS:
        factor = any_node(factor.args[0], "a weight")
    expect(factor.op == "placeholder", f"expected a weight of the model, got {factor.target}")
    return factor, offset


def _composed(norm: Node) -> Norm:
    """The Norm of an aten.rms_norm, which computes in float32 and rounds once.

    Its epsilon may be left out.
    """
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), norm.args, strict=False))
    given |= norm.kwargs
    epsilon, dims = given.get("eps"), given["normalized_shape"]
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps
    assert isinstance(epsilon, float)
    assert isinstance(dims, list | tuple)
    expect(len(dims) == 1, f"expected one normalised dim, got {dims}")
    weight = any_node(given.get("weight"), "a weight")
    return Norm(any_node(given["input"], "a tensor"), weight, epsilon, 0.0, False, norm)


def _require_types(norm: Norm) -> None:
    x, weight, out = value(norm.x), value(norm.weight), value(norm.out)
    expect(
        weight.dtype == x.dtype == out.dtype,
        f"expected one dtype of x, weight and result, got {x.dtype}, {weight.dtype}, {out.dtype}",
    )
    width = x.shape[-1]
    expect(
        tuple(weight.shape) == (width,), f"expected a weight [{width}], got {typed(norm.weight)}"
    )
