"""Warn of large memory in a step: a program's largest tensor, and experts' weights that are copied
for each token.

transformers computes a mixture of experts with such copies. They are left if the target's pass did
not match: a step of 2,048 tokens then has these weights 2,048 times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraph.contract.dims import BATCH_SIZE, NUM_LOGITS, TOTAL_SEQ_LEN
from kvgraph.kv.memory import DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

    from kvgraph.compiler.passes import PassReport
    from kvgraph.contract.signature import GraphSignature

STEP = {
    TOTAL_SEQ_LEN: DEFAULT_BATCH_TOKENS,
    BATCH_SIZE: DEFAULT_BATCH_SIZE,
    NUM_LOGITS: DEFAULT_BATCH_SIZE,
}
"""The step for which sizes are computed: the largest one of an engine with default settings."""

PASSES = ("pack_experts", "fuse_experts")
"""Passes that replace a mixture of experts by one op."""

LARGE = 4 << 30
"""Bytes from which a single tensor is reported to the user."""


def notes_of(
    program: ExportedProgram, signature: GraphSignature, passes: Iterable[PassReport] = ()
) -> list[str]:
    """Notes on `program` after `passes`: on experts' weights that are copied for each token, and on
    a LARGE tensor."""
    found = list(sizes(program, signature))
    notes = []
    if gathered := [each for each in found if _is_gathered(each.node)]:
        stored = {each.node.all_input_nodes[0] for each in gathered}
        own = next((report.name for report in passes if report.name in PASSES), None)
        why = f"as pass {own} says" if own else "since the backend has no kernel for them"
        copied = sum(each.nbytes for each in gathered) // STEP[TOTAL_SEQ_LEN]
        kept = sum(map(_nbytes, stored))
        notes.append(
            f"experts: {kept / 2**20:,.1f} MiB of their weights are kept as the "
            f"model has them, and {copied / 2**20:,.1f} MiB are copied for each token, {why}"
        )
    largest = max(found, key=lambda each: each.nbytes, default=None)
    if largest is not None and largest.nbytes >= LARGE:
        notes.append(
            f"memory: a step of {STEP[TOTAL_SEQ_LEN]} new tokens makes a tensor of "
            f"{largest.nbytes / 2**30:.1f} GiB ({largest.node.target}); an engine with a smaller "
            "max_batch_tokens takes less"
        )
    return notes


@dataclass(frozen=True)
class Size:
    """Bytes of the result of `node` in a step of size STEP."""

    nbytes: int
    node: Node


def _is_gathered(node: Node) -> bool:
    """Whether `node` copies matrices of a stacked weight of the model."""
    import torch

    source = node.args[0] if node.args else None
    return (
        node.target is torch.ops.aten.index.Tensor
        and getattr(source, "op", "") == "placeholder"
        and source.meta["val"].dim() == 3  # type: ignore[union-attr]
    )


def _nbytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def sizes(program: ExportedProgram, signature: GraphSignature) -> Iterator[Size]:
    """Sizes of the values whose shapes follow from STEP."""
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
            yield Size(int(count) * value.element_size(), node)
