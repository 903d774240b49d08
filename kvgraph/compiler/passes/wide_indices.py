"""Cast indices in int32 and smaller types to int64: ONNX's GatherND and ScatterND take no other.

Applies to tensors that index tensors (`x[i]`, `x[i] = y`), before a program is exported to ONNX.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import cast

aten = torch.ops.aten
INDEXED = (
    aten.index.Tensor,
    aten._unsafe_index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._unsafe_index_put.default,
)
NARROW = (torch.int32, torch.int16, torch.int8)


def wide_indices(graph: Graph) -> PassReport:
    """Rewrite `graph` in place."""
    report = PassReport("wide_indices")
    for node in list(graph.nodes):
        if node.target in INDEXED:
            source, indices, *others = node.args
            wide = [_wide(node, index) for index in indices]
            if wide != list(indices):
                node.args = (source, wide, *others)
                report.applied += 1
    return report


def _wide(user: Node, index: Node | None) -> Node | None:
    if index is None or index.meta["val"].dtype not in NARROW:
        return index
    with user.graph.inserting_before(user):
        return cast(index, torch.int64)
