"""Copies over a value, as ONNX needs them: torch's exporter makes a cast of one, no broadcast."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.passes.operands import add_call, any_node, cast, typed, value

aten = torch.ops.aten
COPIES = (aten.copy.default, aten.fill.Tensor)
"""Of the second operand over the first; `without_writes` makes them of writes in place."""


def expand_copies(graph: Graph) -> None:
    """What is copied over another value becomes a cast and an expansion, in place in `graph`."""
    for node in list(graph.nodes):
        if node.target not in COPIES:
            continue
        place, source = (any_node(x, "a tensor") for x in node.args[:2])
        with graph.inserting_before(node):
            made = cast(source, value(node).dtype)
            if typed(made) != typed(node):
                made = add_call(graph, aten.expand.default, made, _extents(place))
        if made is not source:
            made.meta = {**node.meta, "val": made.meta["val"]}
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _extents(node: Node) -> list[Argument]:
    """At the graph's point of insertion."""
    return [
        extent if isinstance(extent, int) else add_call(node.graph, aten.sym_size.int, node, dim)
        for dim, extent in enumerate(value(node).shape)
    ]
