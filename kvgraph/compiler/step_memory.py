"""What a step asks for: the largest tensor of a program at a number of new tokens.

A mixture of experts is the case that hurts: transformers gathers each token's experts, whose
weights a step of 2,048 tokens then has 2,048 times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from kvgraph.contract.dims import BATCH_SIZE, NUM_LOGITS, TOTAL_SEQ_LEN

if TYPE_CHECKING:
    from torch.export import ExportedProgram

    from kvgraph.contract.signature import GraphSignature

STEP = {TOTAL_SEQ_LEN: 2048, BATCH_SIZE: 64, NUM_LOGITS: 64}
"""Of an engine without settings."""

LARGE = 4 << 30
"""Bytes of one tensor that a user should know of."""


def notes_of(program: ExportedProgram, signature: GraphSignature) -> list[str]:
    """A sentence where one tensor of such a step is LARGE."""
    nbytes, operator = max(sizes(program, signature), default=(0, ""))
    if nbytes < LARGE:
        return []
    tokens = STEP[TOTAL_SEQ_LEN]
    return [
        f"memory: a step of {tokens} new tokens makes a tensor of {nbytes / 2**30:.1f} GiB "
        f"({operator}; a mixture of experts gathers weights for each token); an engine with a "
        "smaller max_batch_tokens takes less"
    ]


def sizes(program: ExportedProgram, signature: GraphSignature) -> Iterator[tuple[int, str]]:
    """Bytes of each value whose extents follow from STEP, and the operator that makes it."""
    import torch

    own = set(program.graph_signature.user_inputs)
    inputs = [node for node in program.graph.nodes if node.name in own]
    known = {}
    for node, symbol in zip(inputs, signature.inputs, strict=True):
        for extent, dim in zip(node.meta["val"].shape, symbol.shape, strict=True):
            if isinstance(extent, torch.SymInt) and dim in STEP:
                known[extent.node.expr] = STEP[str(dim)]
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        count = math.prod(
            extent.node.expr.subs(known) if isinstance(extent, torch.SymInt) else extent
            for extent in value.shape
        )
        if not getattr(count, "free_symbols", ()):
            yield int(count) * value.element_size(), str(node.target)
