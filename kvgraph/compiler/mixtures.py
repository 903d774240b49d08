"""List the mixtures of experts that a program runs as one op each, with their bytes."""

from __future__ import annotations

import torch
from torch.fx import Node

from kvgraph.compiler.passes.fuse_experts import FUSED
from kvgraph.compiler.passes.operands import value
from kvgraph.compiler.passes.pack_experts import PACKED
from kvgraph.compiler.traced import Traced
from kvgraph.contract.mixtures import Mixture, joined
from kvgraph.ops import EXPERTS, FUSED_EXPERTS

INPUTS: dict[object, tuple[str, ...]] = {
    op: tuple(operand.name for operand in spec.inputs)
    for op, spec in ((PACKED, EXPERTS), (FUSED, FUSED_EXPERTS))
}


def mixtures_of(traced: Traced) -> list[Mixture]:
    """Mixtures of experts of the program after its passes; layers of one kind are one record."""
    return joined(_mixture(node) for node in traced.graph.nodes if node.target in INPUTS)


EMBEDDING = torch.ops.aten.embedding.default


def _mixture(node: Node) -> Mixture:
    names = zip(INPUTS[node.target], node.args, strict=False)
    given = {name: value(x) for name, x in names if isinstance(x, Node)}
    x, indices, _ = (given.pop(name) for name in ("x", "indices", "weights"))
    given.pop("residual", None)
    experts, width = len(given["up"]), x.shape[1]
    inner = node.kwargs.get("inner_features", given["up"].shape[1] // 2)
    assert isinstance(inner, int)
    biases = 2 * inner * ("up_bias" in given) + width * ("down_bias" in given)
    return Mixture(
        layers=1,
        experts=_of_all_ranks(node) or experts,
        active=indices.shape[1],
        parameters=experts * (3 * width * inner + biases),
        bytes=sum(each.numel() * each.element_size() for each in given.values()),
    )


def _of_all_ranks(node: Node) -> int:
    """Number of experts of all ranks, if a layer is cut by expert; 0 if it is not.

    It is the number of rows of the table with each expert's place on this rank.
    """
    ids = node.all_input_nodes[1]
    while ids.target is not EMBEDDING:
        if len(ids.all_input_nodes) != 1:
            return 0
        ids = ids.all_input_nodes[0]
    return len(value(ids.all_input_nodes[0]))
