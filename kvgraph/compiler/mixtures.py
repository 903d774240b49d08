"""Which mixtures of experts a program holds as kvgraph.experts, and of how many bytes."""

from __future__ import annotations

from dataclasses import replace

from kvgraph.compiler.passes.operands import value
from kvgraph.compiler.passes.pack_experts import PACKED
from kvgraph.compiler.traced import Traced
from kvgraph.contract.mixtures import Mixture
from kvgraph.ops import EXPERTS

NAMES = tuple(operand.name for operand in EXPERTS.inputs)


def mixtures_of(traced: Traced) -> list[Mixture]:
    """Those of the program as its passes left it, layers of one kind together."""
    found: dict[tuple[int, int], Mixture] = {}
    for node in traced.graph.nodes:
        if node.target is not PACKED:
            continue
        given = {n: value(x) for n, x in zip(NAMES, node.args, strict=False) if x is not None}
        x, indices, _ = (given.pop(name) for name in ("x", "indices", "weights"))
        experts, active = len(given["up"]), indices.shape[1]
        width, inner = x.shape[1], node.kwargs["inner_features"]
        biases = 2 * inner * ("up_bias" in given) + width * ("down_bias" in given)
        parameters = experts * (3 * width * inner + biases)
        nbytes = sum(each.numel() * each.element_size() for each in given.values())
        before = found.get((experts, active)) or Mixture(
            layers=0, experts=experts, active=active, parameters=0, bytes=0
        )
        found[experts, active] = replace(
            before,
            layers=before.layers + 1,
            parameters=before.parameters + parameters,
            bytes=before.bytes + nbytes,
        )
    return list(found.values())
