"""Replace `silu(gate) * up` by kvgraph.silu_mul.

Applies to the gate of a gated MLP if gate and up have one shape and dtype. They may be separate
tensors, or halves of one. Gates with another activation are reported by its name, with their count.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import (
    UnmatchedError,
    any_node,
    erase_unused,
    expect,
    node_of,
    only_user,
    other_factor,
    own_rows,
    require_rows,
    typed,
    value,
)
from kvgraph.ops import torch_fusions

aten = torch.ops.aten
FUSED = torch_fusions.silu_mul.default
MUL = aten.mul.Tensor
OTHERS = (aten.gelu.default, aten.relu.default)


def fuse_silu_mul(graph: Graph) -> PassReport:
    """Rewrite `graph` in place."""
    report = PassReport("fuse_silu_mul")
    others: Counter[str] = Counter()
    for node in list(graph.nodes):
        if node.target is aten.silu.default:
            try:
                _fuse(graph, node)
            except UnmatchedError as why:
                report.unmatched.append(f"{node.name}: {why}")
                continue
            report.applied += 1
        elif node.target in OTHERS and any(user.target is MUL for user in node.users):
            others[node.target.name()] += 1
    for name, count in others.items():
        report.unmatched.append(f"{count} gates: expected aten::silu, got {name}")
    return report


def _fuse(graph: Graph, silu: Node) -> None:
    product = node_of(only_user(silu, "silu(gate)"), [MUL], "a product next")
    gate, up = any_node(silu.args[0], "a gate"), other_factor(product, silu)
    types = typed(gate), typed(up)
    expect({*types} == {typed(product)}, f"expected one type, got {' and '.join(types)}")
    require_rows(gate, up)
    with graph.inserting_before(product):
        fused = graph.call_function(FUSED, (gate, up))
    fused.meta["val"] = own_rows(value(product))
    product.replace_all_uses_with(fused)
    erase_unused(product)
