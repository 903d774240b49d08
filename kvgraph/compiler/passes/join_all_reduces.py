"""Replace several all_reduce calls by one, if their results are added afterwards.

Two results of one layer, for example of its experts and of its shared expert, are added on each
rank first. A sum over blocks of rows, for example over experts (Llama 4), is computed first too:
it leaves fewer rows. An all_reduce stays if anything else reads its result.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import VIEWS, add_call, any_node, erase_unused, typed, value
from kvgraph.ops import torch_ops

aten = torch.ops.aten
REDUCE = torch_ops.all_reduce.default
SHAPED = (*VIEWS, aten.unsqueeze.default)


def join_all_reduces(graph: Graph) -> PassReport:
    """Rewrite `graph` in place; run it before `fuse_all_reduce`."""
    report = PassReport("join_all_reduces")
    for first in (_blocks_first, _terms_first):
        for total in list(graph.nodes):
            with graph.inserting_before(total):
                joined = first(graph, total)
            if joined is not None:
                total.replace_all_uses_with(joined)
                erase_unused(total)
                report.applied += 1
    graph.lint()
    return report


def _blocks_first(graph: Graph, total: Node) -> Node | None:
    """The replacement of a sum over blocks `[B, T, W]` of reduced rows: `[T, W]` blocks are summed
    before all_reduce. None if `total` is no such sum."""
    if total.target is not aten.sum.dim_IntList or total.args[1:] != ([0],) or total.kwargs:
        return None
    blocks = any_node(total.args[0], "a tensor")
    reduce = _reduced(blocks)
    if reduce is None or value(blocks).dim() != 3:
        return None
    if value(blocks).shape[-1] != value(reduce).shape[-1]:
        return None
    parts = _shaped_as(blocks, reduce, reduce.args[0])
    summed = add_call(graph, aten.sum.dim_IntList, parts, [0])
    return add_call(graph, REDUCE, summed, **reduce.kwargs)


def _terms_first(graph: Graph, total: Node) -> Node | None:
    """The replacement of `first + second` with both reduced, or of `(x + first) + second` if
    nothing else reads the inner sum. None if `total` is no such sum."""
    for second, other in _terms(total):
        joined = _joined(graph, other, second)
        if joined is not None:
            return joined
        for first, rest in _terms(other) if set(other.users) == {total} else ():
            joined = _joined(graph, first, second)
            if joined is not None:
                return add_call(graph, aten.add.Tensor, rest, joined)
    return None


def _terms(total: Node) -> list[tuple[Node, Node]]:
    """Both orders of the terms of a sum of two tensors that have the sum's type; else empty."""
    terms = [x for x in total.args if isinstance(x, Node)]
    if total.target is not aten.add.Tensor or total.kwargs or len(terms) != 2:
        return []
    if any(typed(x) != typed(total) for x in terms):
        return []
    return [(terms[0], terms[1]), (terms[1], terms[0])]


def _joined(graph: Graph, first: Node, second: Node) -> Node | None:
    """One all_reduce for `first + second`; None unless both are results of all_reduce."""
    one, two = _reduced(first), _reduced(second)
    if one is None or two is None or one is two:
        return None
    if typed(one) != typed(two) or one.kwargs != two.kwargs:
        return None
    summed = add_call(graph, aten.add.Tensor, one.args[0], two.args[0])
    return _shaped_as(first, one, add_call(graph, REDUCE, summed, **one.kwargs))


def _reduced(node: Node) -> Node | None:
    """The all_reduce of which `node` is the result or a view; None if there is none, or if anything
    else reads it."""
    while len(node.users) == 1:
        if node.target is REDUCE:
            return node if len(node.args) == 1 else None
        if node.target not in SHAPED:
            return None
        node = any_node(node.args[0], "a tensor")
    return None


def _shaped_as(shaped: Node, start: Node, other: Argument) -> Node:
    """`other`, with the views applied that lead from `start` to `shaped`.

    `other` has the shape of `start`.
    """
    if shaped is start:
        return any_node(other, "a tensor")
    before = _shaped_as(any_node(shaped.args[0], "a tensor"), start, other)
    assert callable(shaped.target)
    return add_call(shaped.graph, shaped.target, before, *shaped.args[1:])
