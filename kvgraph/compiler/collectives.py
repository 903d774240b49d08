"""List the collectives that one rank's program calls, with their bytes."""

from __future__ import annotations

from collections import Counter

from kvgraph.compiler.passes.operands import value
from kvgraph.compiler.passes.parameters import inputs_of
from kvgraph.compiler.traced import Traced
from kvgraph.contract.collectives import Collective
from kvgraph.ops import torch_ops

OPS = {torch_ops.all_reduce.default: "all_reduce", torch_ops.all_gather.default: "all_gather"}


def collectives_of(traced: Traced) -> list[Collective]:
    """Collectives of the program as it was traced, equal ones counted together, in the order of
    their first calls."""
    tokens = next(iter(inputs_of(traced.program, traced.signature)))
    found: Counter[tuple[str, str, int]] = Counter()
    for node in traced.graph.nodes:
        if node.target in OPS:
            x = value(node.args[0])
            rows = "tokens" if str(x.shape[0]) == str(value(tokens).shape[0]) else "logits"
            found[OPS[node.target], rows, x.shape[1] * x.element_size()] += 1
    return [
        Collective(op=op, count=count, rows=rows, bytes=nbytes)
        for (op, rows, nbytes), count in found.items()
    ]
