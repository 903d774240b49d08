"""The opening of every backend: an exported program whose cache ops are fused."""

from __future__ import annotations

from torch.export import ExportedProgram

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.export import export
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.fuse_update_and_attend import fuse_update_and_attend, require_fused
from kvgraph.contract.signature import GraphSignature


def export_fused(
    model: Model, signature: GraphSignature, plan: CachePlan, *, return_buffers: bool
) -> tuple[ExportedProgram, list[PassReport]]:
    """Export, one update_and_attend for each layer, rotary embeddings into it where they fit.

    UnsupportedError as `export` and `require_fused` raise it.
    """
    program = export(model, signature, return_buffers=return_buffers)
    fused = fuse_update_and_attend(program.graph)
    require_fused(program, fused, signature, plan)
    return program, [fused, fuse_rope(program, signature, model.max_seq_len)]
