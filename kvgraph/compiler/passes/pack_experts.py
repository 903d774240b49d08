"""Replace a mixture of experts by kvgraph.experts over packed weights (CPU targets).

`experts.py` decides which mixtures match. The op computes in float32, so rows in bfloat16 are cast
to it, and its result is cast back. Mixtures in float16 stay as they are: packed weights in 16 bits
are bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.packed_weights import Packed, Section, pack_in_turn, shapes
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.experts import rewrite_mixtures
from kvgraph.compiler.passes.mixtures import Layer, MatchedExperts
from kvgraph.compiler.passes.operands import add_call, cast, value
from kvgraph.compiler.passes.parameters import add_packed, array_of, stored_of
from kvgraph.compiler.values import Coded
from kvgraph.compiler.weights import Weights
from kvgraph.ops import torch_ops
from kvgraph.ops.packed import Form

PACKED = torch_ops.experts.default
BITS = {torch.float32: 32, torch.bfloat16: 16}
"""Bits in which a mixture's weights keep their numbers, by the dtype of its rows and weights."""


def pack_experts(program: ExportedProgram, bits: int | None, weights: Weights) -> PassReport:
    """Rewrite `program` in place; its packed weights are made later. `bits`: None keeps numbers."""

    def replacement(mixture: MatchedExperts) -> Node:
        own = BITS[value(mixture.x).dtype]
        return _packed(program, mixture, own if bits is None else bits, weights)

    return rewrite_mixtures(program, "pack_experts", BITS, replacement, residuals=torch.float32)


def _packed(program: ExportedProgram, mixture: MatchedExperts, bits: int, weights: Weights) -> Node:
    up, down, inner = mixture.up, mixture.down, mixture.down.inputs
    halves = [mixture.gate.gate, mixture.gate.up]
    first, up_form = _add(program, up, [inner, inner], bits, weights, halves)
    second, down_form = _add(program, down, [down.columns], bits, weights, [slice(None)])
    operands = (
        cast(mixture.x, torch.float32),
        cast(mixture.ids, torch.int32),
        cast(mixture.weights, torch.float32),
        first[0],
        second[0],
        *first[1:],
        *second[1:],
        mixture.residual,
    )
    forms = up_form.attributes("up_") | down_form.attributes("down_")
    attributes: dict[str, float] = {"inner_features": inner, **forms, **mixture.gate.attributes}
    whole = add_call(program.graph, PACKED, *operands, **attributes)
    return cast(whole, value(mixture.total).dtype)


def _add(
    program: ExportedProgram,
    layer: Layer,
    features: list[int],
    bits: int,
    weights: Weights,
    halves: list[slice],
) -> tuple[list[Node | None], Form]:
    """Add parameters for a layer of experts; return their nodes and their form.

    `halves`: the columns of each packed section of an expert; `features`: their numbers.
    """

    form, is_kept = layer.form(weights, bits, takes=lambda form: form.sums(layer.inputs))

    def make() -> Iterator[Packed]:
        given = layer.each_stored(weights, form.group) if is_kept else layer.each(weights)
        each = ([_section(weight, bias, half) for half in halves] for weight, bias in given)
        return pack_in_turn(each, layer.inputs, form, has_bias=layer.bias is not None)

    forms = {
        name: ((len(layer.weight), *shape), dtype)
        for name, (shape, dtype) in shapes(
            features, layer.inputs, form, layer.bias is not None
        ).items()
    }
    key = *layer.parts(halves), form
    return add_packed(program, weights, layer.name, key, forms, make), form


def _section(weight: torch.Tensor | Coded, bias: torch.Tensor | None, half: slice) -> Section:
    """The section with some columns of an expert's weight."""
    own = None if bias is None else array_of(bias[half])
    if isinstance(weight, torch.Tensor):
        return Section.of(array_of(weight[half]), own)
    return Section.kept(stored_of(weight.map(lambda part: part[half])), own)
