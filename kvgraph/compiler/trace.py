"""What every backend starts from: a model's program, proved and with its cache ops fused."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram

from kvgraph.compiler.cache import CachePlan, as_paged
from kvgraph.compiler.export import export
from kvgraph.compiler.identity import program_digest
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.fuse_update_and_attend import fuse_update_and_attend, require_fused
from kvgraph.compiler.passes.require_stored import (
    require_planned,
    require_stored,
    require_whole_inputs,
)
from kvgraph.compiler.passes.require_tokens_apart import require_tokens_apart
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import ModelError


@dataclass
class Traced:
    """A model as one program over `signature`; passes and backends change the program in place."""

    model: Model
    signature: GraphSignature
    plan: CachePlan
    program: ExportedProgram
    passes: list[PassReport]
    digest: bytes
    """Of the program as it was exported; 32 bytes."""


def trace(model: Model, signature: GraphSignature, plan: CachePlan, *, functional: bool) -> Traced:
    """Export, prove that tokens meet in the cache ops alone, and fuse these.

    Afterwards each layer has one update_and_attend, with the rotary embedding in it where it fits.
    `functional`: the buffers are outputs too, behind the logits.
    UnsupportedError as the export and the passes raise it; ModelError for a weight in memory that
    is not finite (one that is streamed is checked on its way).
    """
    for name, weight in model.module.state_dict().items():
        if weight.is_floating_point() and not isinstance(weight, FakeTensor):
            require_finite(name, weight)
    program = export(model, signature, return_buffers=functional)
    digest = program_digest(program, signature)
    require_whole_inputs(program, signature)
    passes = [_require_tokens_apart(model, program, signature, plan)]
    fused = fuse_update_and_attend(program.graph)
    require_fused(program, fused, signature, plan)
    require_stored(program.graph)
    require_planned(program, signature, plan)
    passes += [fused, fuse_rope(program, signature, model.max_seq_len)]
    return Traced(model, signature, plan, program, passes, digest)


def require_finite(name: str, weight: torch.Tensor) -> None:
    """ModelError for a weight with a NaN or an infinity, which names the first."""
    finite = torch.isfinite(weight)
    if not finite.all():
        at = (~finite).nonzero()[0].tolist()
        raise ModelError(f"{name}: expected finite weights, got {weight[tuple(at)]} at {at}")


def _require_tokens_apart(
    model: Model, program: ExportedProgram, signature: GraphSignature, plan: CachePlan
) -> PassReport:
    """A padded cache is plain operators, among which no proof can tell attention from mixing: the
    model is looked at over pages instead, or the report says that it was not."""
    if plan.strategy is not KVCacheStrategy.PADDED:
        return require_tokens_apart(program, signature)
    if not model.layers:
        why = "the module's own attention over a padded cache is not told from mixing tokens"
        return PassReport("require_tokens_apart", unmatched=[why])
    paged = as_paged(plan)
    record = paged.params.get_symbolic_inputs()[0]
    seen = GraphSignature.of(record, model.vocab_size)
    model.place(paged)
    try:
        return require_tokens_apart(export(model, seen, return_buffers=False), seen)
    finally:
        model.place(plan)
