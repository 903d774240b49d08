"""Warn of the costs of a step: a program's largest tensor, and experts that no kernel computes.

transformers copies the experts' weights for each token, or computes all experts for it (Llama 4).
Both stay if the target's pass did not match: in a step of 2,048 tokens the copies have these
weights 2,048 times.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvgraph.compiler.passes import PassReport, report_of
from kvgraph.contract.dims import BATCH_SIZE, NUM_LOGITS, TOTAL_SEQ_LEN
from kvgraph.kv.memory import DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS

if TYPE_CHECKING:
    from torch.export import ExportedProgram
    from torch.fx import Node

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
    """Notes on `program` after `passes`: on experts' weights that are copied for each token, on
    experts that are all computed, and on a LARGE tensor."""
    found = list(sizes(program, signature))
    notes = []
    own = report_of(passes, *PASSES).name
    why = f"as pass {own} says" if own else "since the backend has no kernel for them"
    if gathered := [each for each in found if _is_gathered(each.node)]:
        copied = sum(each.nbytes for each in gathered) // STEP[TOTAL_SEQ_LEN]
        kept = _kept(each.node.all_input_nodes[0] for each in gathered)
        notes.append(f"{kept}, and {copied / 2**20:,.1f} MiB are copied for each token, {why}")
    if computed := _all_computed(program):
        notes.append(f"{_kept(computed)}, and all are computed for each token, {why}")
    largest = max(found, key=lambda each: each.nbytes, default=None)
    if largest is not None and largest.nbytes >= LARGE:
        notes.append(_memory_note(largest))
    return notes


@dataclass(frozen=True)
class Size:
    """Bytes of the result of `node` in a step of size STEP; `dims`: symbolic dims of its shape."""

    nbytes: int
    node: Node
    dims: frozenset[str] = frozenset()


def _memory_note(largest: Size) -> str:
    made = f"makes a tensor of {largest.nbytes / 2**30:.1f} GiB ({largest.node.target})"
    if not largest.dims:
        return f"memory: each step {made}, with any number of tokens"
    bound = "max_batch_size" if largest.dims == {BATCH_SIZE} else "max_batch_tokens"
    return (
        f"memory: a step of {STEP[TOTAL_SEQ_LEN]} new tokens {made}; an engine with a smaller "
        f"{bound} takes less"
    )


def _is_gathered(node: Node) -> bool:
    """Whether `node` copies matrices of a stacked weight of the model."""
    import torch

    source = node.args[0] if node.args else None
    return (
        node.target is torch.ops.aten.index.Tensor
        and getattr(source, "op", "") == "placeholder"
        and source.meta["val"].dim() == 3  # type: ignore[union-attr]
    )


def _all_computed(program: ExportedProgram) -> list[Node]:
    """Stacked weights whose products with all rows are computed, if any are summed over experts."""
    import torch

    from kvgraph.compiler.passes.all_experts import runs_all
    from kvgraph.compiler.passes.mixtures import is_stacked

    nodes = program.graph.nodes
    sums = [node for node in nodes if node.target is torch.ops.aten.sum.dim_IntList]
    if not any(runs_all(program, node) for node in sums):
        return []
    products = [node for node in nodes if node.target is torch.ops.aten.bmm.default]
    return [node.args[1] for node in products if is_stacked(program, node.args[1])]


def _kept(weights: Iterable[Node]) -> str:
    nbytes = sum(map(_nbytes, set(weights)))
    return f"experts: {nbytes / 2**20:,.1f} MiB of their weights are kept as the model has them"


def _nbytes(node: Node) -> int:
    value = node.meta["val"]
    return int(value.numel() * value.element_size())


def sizes(program: ExportedProgram, signature: GraphSignature) -> Iterator[Size]:
    """Sizes of the values whose shapes follow from STEP."""
    import torch

    from kvgraph.compiler.passes.parameters import inputs_of

    known, names = {}, {}
    for node, symbol in inputs_of(program, signature).items():
        for extent, dim in zip(node.meta["val"].shape, symbol.shape, strict=True):
            if isinstance(extent, torch.SymInt) and dim in STEP:
                known[extent.node.expr] = STEP[str(dim)]
                names[extent.node.expr] = str(dim)
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, torch.Tensor):
            continue
        if getattr(node.target, "is_view", False):  # has no memory of its own
            continue
        found = [x.node.expr if isinstance(x, torch.SymInt) else x for x in value.shape]
        symbols = {symbol for x in found for symbol in getattr(x, "free_symbols", ())}
        if symbols <= known.keys():
            count = math.prod(x if isinstance(x, int) else x.subs(known) for x in found)
            dims = frozenset(names[symbol] for symbol in symbols)
            yield Size(int(count) * value.element_size(), node, dims)
