"""The opening of every backend: an exported program whose cache ops are fused."""

from __future__ import annotations

import torch
from torch._subclasses import FakeTensor
from torch.export import ExportedProgram

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.export import export
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.fuse_update_and_attend import fuse_update_and_attend, require_fused
from kvgraph.compiler.passes.require_stored import (
    require_planned,
    require_stored,
    require_whole_pools,
)
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import ModelError


def export_fused(
    model: Model, signature: GraphSignature, plan: CachePlan, *, return_buffers: bool
) -> tuple[ExportedProgram, list[PassReport]]:
    """Export, one update_and_attend for each layer, rotary embeddings into it where they fit.

    UnsupportedError as `export` and the passes' checks raise it; ModelError for a weight in memory
    that is not finite (one that is streamed is checked on its way).
    """
    for name, weight in model.module.state_dict().items():
        if weight.is_floating_point() and not isinstance(weight, FakeTensor):
            require_finite(name, weight)
    program = export(model, signature, return_buffers=return_buffers)
    require_whole_pools(program, signature)
    fused = fuse_update_and_attend(program.graph)
    require_fused(program, fused, signature, plan)
    require_stored(program.graph)
    require_planned(program, signature, plan)
    return program, [fused, fuse_rope(program, signature, model.max_seq_len)]


def require_finite(name: str, weight: torch.Tensor) -> None:
    """ModelError for a weight with a NaN or an infinity, which names the first."""
    finite = torch.isfinite(weight)
    if not finite.all():
        at = (~finite).nonzero()[0].tolist()
        raise ModelError(f"{name}: expected finite weights, got {weight[tuple(at)]} at {at}")
