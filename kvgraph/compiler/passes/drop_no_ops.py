"""Remove casts to the dtype that a value already has, inactive dropout, and checks of facts that
the trace has fixed.

Applies to a program that runs operator by operator: each of these is a call without work, and a
cast to the same dtype is an alias, which makes it harder to see which values share memory.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import CHECK

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten.to.device, aten.type_as.default)


def drop_no_ops(graph: Graph) -> PassReport:
    """Rewrite `graph` in place; nodes that nothing reads are removed too."""
    report = PassReport("drop_no_ops")
    before = len(graph.nodes)
    for node in list(graph.nodes):
        if node.target is CHECK:
            graph.erase_node(node)
        elif (node.target in CASTS and _is_same(node)) or _is_idle_dropout(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    report.applied = before - len(graph.nodes)
    return report


def _is_idle_dropout(node: Node) -> bool:
    return node.target is aten.dropout.default and not node.args[2]


def _is_same(cast: Node) -> bool:
    """Whether `cast` returns its operand itself; all of a program is on one device.

    False for a cast that is a result of the program, because results keep their names.
    """
    if any(user.op == "output" for user in cast.users):
        return False
    given = cast.args[0]
    assert isinstance(given, Node)
    copies = len(cast.args) > 3 or any(cast.kwargs.values())
    return not copies and given.meta["val"].dtype == cast.meta["val"].dtype
