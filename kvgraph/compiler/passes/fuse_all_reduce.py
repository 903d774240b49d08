"""The sum of a residual with what all ranks have summed -> an operand of all_reduce.

Applies where nothing else reads the sum over the ranks: the residual is added while that is read,
once, and not written twice.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import erase_unused, typed
from kvgraph.ops import torch_ops

aten = torch.ops.aten
REDUCE = torch_ops.all_reduce.default


def fuse_all_reduce(graph: Graph) -> PassReport:
    """Rewrite `graph` in place. A sum that is read elsewhere too, as of an embedding, stays."""
    report = PassReport("fuse_all_reduce")
    for node in list(graph.nodes):
        if node.target is REDUCE and len(node.args) == 1:
            total = _sum_with_residual(node)
            if total is not None:
                _fuse(graph, node, total)
                report.applied += 1
    graph.lint()
    return report


def _sum_with_residual(node: Node) -> Node | None:
    """The one reader of `node`, where that adds another value of its type."""
    users = list(node.users)
    if len(users) != 1 or users[0].target is not aten.add.Tensor or users[0].kwargs:
        return None
    others = [x for x in users[0].args if x is not node]
    fits = len(others) == 1 and isinstance(others[0], Node) and typed(others[0]) == typed(node)
    return users[0] if fits else None


def _fuse(graph: Graph, node: Node, total: Node) -> None:
    (residual,) = (x for x in total.args if x is not node)
    with graph.inserting_before(total):
        fused = graph.call_function(REDUCE, (node.args[0], residual), dict(node.kwargs))
    fused.meta["val"] = total.meta["val"]
    total.replace_all_uses_with(fused)
    erase_unused(total)
