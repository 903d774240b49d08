"""Match the gate of a gated layer, as models write it.

A gate is `activation(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset)`. The activation is
SiLU, SiLU with `alpha` in its sigmoid, or GELU. Gate and up are halves of one layer's columns,
which follow each other or are interleaved.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from kvgraph.compiler.passes.operands import UnmatchedError, any_node, expect, node_of, value
from kvgraph.ops.packed import GELU, GELU_TANH, SILU

aten = torch.ops.aten
MUL = aten.mul.Tensor
ADDED = (aten.add.Tensor, aten.add_.Tensor)


@dataclass
class Gate:
    """The gate of a layer `both`: the columns of gate and of up, and the op's attributes."""

    both: Node
    gate: slice
    up: slice
    attributes: dict[str, float]


def gate_of(inner: Node) -> Gate:
    """The gate that computes `inner`. UnmatchedError if it is no such gate."""
    product = node_of(inner, (MUL,), "a gate's product")
    for gate, up in (product.args, product.args[::-1]):
        activated = _activated(gate)
        if activated is not None:
            source, attributes = activated
            return _with_up(source, any_node(up, "up"), attributes)
    raise UnmatchedError("expected a SiLU or GELU gate")


def _activated(node: object) -> tuple[Node, dict[str, float]] | None:
    """The operand of an activation, and its attributes; None if `node` is no known activation."""
    if not isinstance(node, Node) or not node.args:
        return None
    source = node.args[0]
    if node.target is aten.silu.default:
        return any_node(source, "a gate"), {"activation": SILU}
    if node.target is aten.gelu.default:
        form = GELU_TANH if node.kwargs.get("approximate") == "tanh" else GELU
        return any_node(source, "a gate"), {"activation": form}
    if node.target is not MUL:
        return None
    for x, sigmoid in (node.args, node.args[::-1]):
        if isinstance(sigmoid, Node) and sigmoid.target is aten.sigmoid.default:
            scaled = sigmoid.args[0]
            if scaled is x:
                return any_node(x, "a gate"), {"activation": SILU}
            if isinstance(scaled, Node) and scaled.target is MUL and scaled.args[0] is x:
                alpha = scaled.args[1]
                if isinstance(alpha, float | int):
                    return any_node(x, "a gate"), {"activation": SILU, "alpha": float(alpha)}
    return None


def _with_up(gate: Node, up: Node, attributes: dict[str, float]) -> Gate:
    if up.target in ADDED and isinstance(up.args[1], float | int):
        attributes["up_offset"] = float(up.args[1])
        up = any_node(up.args[0], "up")
    gate, least, most = _clamped(gate)
    expect(least is None, "expected no lower limit of the gate")
    up, low, high = _clamped(up)
    expect(high == most and low == (None if high is None else -high), "expected one limit of both")
    if most is not None:
        expect(most > 0, f"expected a limit above 0, got {most}")
        attributes["limit"] = most
    both, first = _half(gate)
    other, second = _half(up)
    expect(both is other, "expected gate and up of one layer")
    expect({*map(_begins, (first, second))} == {0, 1}, "expected gate and up to be all of it")
    expect(first.step == second.step, "expected gate and up to be cut one way")
    return Gate(both, first, second, attributes)


def _clamped(node: Node) -> tuple[Node, float | None, float | None]:
    if node.target is not aten.clamp.default:
        return node, None, None
    source, least, most = (*node.args, None, None)[:3]
    least, most = node.kwargs.get("min", least), node.kwargs.get("max", most)
    return any_node(source, "what is clamped"), _limit(least), _limit(most)


def _limit(bound: object) -> float | None:
    expect(bound is None or isinstance(bound, float | int), f"expected a number, got {bound}")
    return float(bound) if isinstance(bound, float | int) else None


def _half(node: Node) -> tuple[Node, slice]:
    """The layer of which `node` is half the columns, and the slice of these columns."""
    if node.target is operator.getitem:
        cut = node_of(node.args[0], (aten.chunk.default,), "two halves")
        both = any_node(cut.args[0], "a layer")
        width = int(value(both).shape[-1])
        in_two = cut.args[1:] in ((2, -1), (2, 1)) and width % 2 == 0
        expect(in_two, "expected two halves of the columns")
        index = node.args[1]
        assert isinstance(index, int)
        return both, slice(index * (width // 2), (index + 1) * (width // 2))
    cut = node_of(node, (aten.slice.Tensor,), "half of a layer")
    source, dim, begin, _, step = (*cut.args, 1)[:5]
    both = any_node(source, "a layer")
    is_half = int(value(cut).shape[-1]) * 2 == int(value(both).shape[-1])
    is_spread = isinstance(dim, int) and dim in (1, -1) and isinstance(step, int) and step == 2
    expect(is_spread and is_half, "expected every second column")
    expect(begin in (0, 1), f"expected every second column, got from {begin} on")
    return both, slice(int(begin == 1), None, 2)


def _begins(half: slice) -> int:
    return int(half.start > 0)
