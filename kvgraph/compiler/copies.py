"""Replace copies over a value by a cast and an expansion, for ONNX.

torch's exporter makes only a cast of a copy, and leaves out the broadcast.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.passes.operands import add_call, any_node, cast, typed, value

aten = torch.ops.aten
COPIES = (aten.copy.default, aten.fill.Tensor)
"""Operators that copy the second operand over the first. `without_writes` makes them of in-place
writes."""


def expand_copies(graph: Graph) -> None:
    """Replace each copy in `graph` by a cast and an expansion of the copied value."""
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
    """Extents of the node's value; nodes for symbolic ones are added at the graph's insertion
    point."""
    return [
        extent if isinstance(extent, int) else add_call(node.graph, aten.sym_size.int, node, dim)
        for dim, extent in enumerate(value(node).shape)
    ]
