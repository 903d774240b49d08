"""Replace update_and_attend by its functional form, with pool outputs that nothing uses.

It is for compilers that give every output its own memory (torch-tensorrt). The op is functional in
name only: its plugin writes the graph's pool in place. Layers stay in order, because each layer's
query depends on the layer before.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from kvgraph.compiler.passes.fuse_update_and_attend import FUSED, arguments
from kvgraph.compiler.passes.thread_pool import FUNCTIONAL
from kvgraph.ops import UPDATE_AND_ATTEND


def write_in_place(graph: Graph) -> None:
    """Rewrite `graph` in place."""
    for node in list(graph.nodes):
        if node.target is FUSED:
            _make_functional(node)


def _make_functional(node: Node) -> None:
    inputs, attributes = UPDATE_AND_ATTEND.call(arguments(UPDATE_AND_ATTEND, node))
    with node.graph.inserting_before(node):
        whole = node.graph.call_function(FUNCTIONAL, inputs, attributes)
        out = node.graph.call_function(operator.getitem, (whole, 0))
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    node.graph.erase_node(node)
