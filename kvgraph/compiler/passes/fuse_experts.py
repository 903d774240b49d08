"""Replace a mixture of experts by kvgraph.fused_experts, which reads each expert once (CUDA).

`experts.py` decides which mixtures match. Rows of gate and up are interleaved in one weight, and a
weight with its inputs first is transposed, when weights are written.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.gpu_weights import Part, columns_in_turn, kept, rounded, shapes
from kvgraph.compiler.joined_forms import PLAIN_BITS
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.experts import rewrite_mixtures
from kvgraph.compiler.passes.mixtures import Layer, MatchedExperts
from kvgraph.compiler.passes.operands import KINDS, cast, expect
from kvgraph.compiler.passes.parameters import add_matrix, stored_of
from kvgraph.compiler.threads import in_order
from kvgraph.compiler.values import Coded
from kvgraph.compiler.weights import Weights
from kvgraph.kernels.experts_plan import MOST_EXPERTS
from kvgraph.ops import torch_fusions
from kvgraph.ops.matrices import of_kernels, takes
from kvgraph.ops.packed import Form

FUSED = torch_fusions.fused_experts.default


def fuse_experts(program: ExportedProgram, bits: int | None, weights: Weights) -> PassReport:
    """Rewrite `program` in place; its weights are made later. `bits`: None keeps their dtype."""

    def replacement(mixture: MatchedExperts) -> Node:
        return _fused(program, mixture, PLAIN_BITS if bits is None else bits, weights)

    return rewrite_mixtures(program, "fuse_experts", KINDS, replacement)


def _fused(program: ExportedProgram, mixture: MatchedExperts, bits: int, weights: Weights) -> Node:
    count = len(mixture.up.weight)
    expect(count <= MOST_EXPERTS, f"expected at most {MOST_EXPERTS} experts, got {count}")
    halves = [mixture.gate.gate, mixture.gate.up]
    up, up_form = _add(program, mixture.up, bits, weights, halves)
    down, down_form = _add(program, mixture.down, bits, weights, [slice(None)])
    operands = (
        mixture.x,
        cast(mixture.ids, torch.int32),
        cast(mixture.weights, torch.float32),
        up[0],
        down[0],
        *up[1:],
        *down[1:],
    )
    forms = up_form.attributes("up_") | down_form.attributes("down_")
    attributes: dict[str, float] = {name: given for name, given in forms.items() if given}
    whole: Node = program.graph.call_function(FUSED, operands, attributes | mixture.gate.attributes)
    return whole


def _add(
    program: ExportedProgram,
    layer: Layer,
    bits: int,
    weights: Weights,
    parts: list[slice],
) -> tuple[list[Node | None], Form]:
    """Add parameters for a layer with the columns of `parts` interleaved; return their nodes and
    their form."""
    found, is_kept = layer.form(weights, bits, takes=takes)
    form = Form(0) if found.bits == PLAIN_BITS else of_kernels(found)

    def make() -> Iterator[Part]:
        dtype = torch.float32 if form.bits else None
        given = layer.each_stored(weights, form.group) if is_kept else layer.each(weights, dtype)
        return in_order(partial(expert, weight, bias) for weight, bias in given)

    def expert(weight: torch.Tensor | Coded, bias: torch.Tensor | None) -> Part:
        made = columns_in_turn([_part(weight, part, form) for part in parts])
        if bias is not None:
            made["bias"] = torch.stack([bias[part] for part in parts], 1).flatten()
        return made

    each = shapes(layer.columns, layer.inputs, form, layer.weight.dtype, layer.bias is not None)
    stacked = {name: ((len(layer.weight), *shape), dtype) for name, (shape, dtype) in each.items()}
    key = *layer.parts(parts), form
    return add_matrix(program, weights, layer.name, key, stacked, make), form


def _part(weight: torch.Tensor | Coded, columns: slice, form: Form) -> Part:
    """Some columns of an expert's weight, in the GPU kernels' form."""
    if isinstance(weight, torch.Tensor):
        return rounded(weight[columns], form.bits)
    return kept(stored_of(weight.map(lambda part: part[columns])), form)
