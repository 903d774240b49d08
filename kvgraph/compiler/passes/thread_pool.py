"""Replace update_and_attend by its functional form, which passes the pool from layer to layer.

Applies to a program whose pools are outputs too (`export(..., return_buffers=True)`): each node
takes the pool that the previous node returned, and the last node's pool is the graph's output. ONNX
and TensorRT have no in-place writes; the runtime binds one address to the input and the output.
"""

from __future__ import annotations

import operator

from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED, arguments
from kvgraph.ops import UPDATE_AND_ATTEND, torch_ops

FUNCTIONAL = torch_ops.update_and_attend_functional.default


def thread_pool(graph: Graph) -> PassReport:
    """Rewrite `graph` in place."""
    report = PassReport("thread_pool")
    current: dict[Node, Node] = {}  # the graph's pool input -> its newest state
    for node in list(graph.nodes):
        if node.target is FUSED:
            _thread(graph, node, current)
            report.applied += 1
        elif node.op == "output":
            results = node.args[0]
            assert isinstance(results, list | tuple)
            node.args = (tuple(current.get(r, r) for r in results),)
    return report


def _thread(graph: Graph, node: Node, current: dict[Node, Node]) -> None:
    given = arguments(UPDATE_AND_ATTEND, node)
    pools = [given[output.alias] for output in UPDATE_AND_ATTEND.outputs if output.alias]
    inputs, attributes = UPDATE_AND_ATTEND.call(given)
    with graph.inserting_before(node):
        whole = graph.call_function(
            FUNCTIONAL, tuple(current.get(x, x) for x in inputs), attributes
        )
        out = graph.call_function(operator.getitem, (whole, 0))
        for i, pool in enumerate(pools, start=1):
            if pool is not None:
                current[pool] = graph.call_function(operator.getitem, (whole, i))
                current[pool].meta = dict(pool.meta)
    out.meta = dict(node.meta)
    node.replace_all_uses_with(out)
    graph.erase_node(node)
