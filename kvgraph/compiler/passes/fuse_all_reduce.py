"""Make a residual that is added to the result of all_reduce an operand of all_reduce.

Applies where nothing else reads the sum over the ranks. all_reduce then adds the residual as it
reads the parts, and writes the result only once.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import erase_unused, with_residual
from kvgraph.ops import torch_ops

REDUCE = torch_ops.all_reduce.default


def fuse_all_reduce(graph: Graph) -> PassReport:
    """Rewrite `graph` in place. An all_reduce whose result is read elsewhere too stays, as that of
    an embedding."""
    report = PassReport("fuse_all_reduce")
    for node in list(graph.nodes):
        if node.target is REDUCE and len(node.args) == 1:
            residual, total = with_residual(node)
            if residual is not None:
                _fuse(graph, node, residual, total)
                report.applied += 1
    graph.lint()
    return report


def _fuse(graph: Graph, node: Node, residual: Node, total: Node) -> None:
    with graph.inserting_before(total):
        fused = graph.call_function(REDUCE, (node.args[0], residual), dict(node.kwargs))
    fused.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(fused)
    erase_unused(total)
