"""Mixture of experts -> kvgraph.fused_experts, whose products read each expert once (CUDA).

Which mixtures, and why others stay as they are: `experts.py`. The weight of gate and up gets their
rows in turn, and one with its inputs first is transposed, as it is written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.gpu_weights import Part, forms, rows_in_turn, stored
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.experts import Layer, Mixture, cast, rewrite_mixtures
from kvgraph.compiler.passes.operands import KINDS, expect
from kvgraph.compiler.passes.parameters import add_matrix
from kvgraph.compiler.weights import Weights
from kvgraph.kernels.experts_plan import MOST_EXPERTS
from kvgraph.ops import torch_fusions

FUSED = torch_fusions.fused_experts.default


def fuse_experts(program: ExportedProgram, bits: int | None, weights: Weights) -> PassReport:
    """Rewrite `program` in place; its weights are made later. `bits` None: they keep their
    dtype."""

    def replacement(mixture: Mixture) -> Node:
        return _fused(program, mixture, bits or 0, weights)

    return rewrite_mixtures(program, "fuse_experts", KINDS, replacement)


def _fused(program: ExportedProgram, mixture: Mixture, bits: int, weights: Weights) -> Node:
    count = len(mixture.up.weight)
    expect(count <= MOST_EXPERTS, f"expected at most {MOST_EXPERTS} experts, got {count}")
    up = _add(program, mixture.up, bits, weights, [mixture.gate.gate, mixture.gate.up])
    down = _add(program, mixture.down, bits, weights, [slice(None)])
    operands = (
        mixture.x,
        cast(mixture.ids, torch.int32),
        cast(mixture.weights, torch.float32),
        up[0],
        down[0],
        *up[1:],
        *down[1:],
    )
    attributes: dict[str, float] = {"bits": bits} if bits else {}
    whole: Node = program.graph.call_function(FUSED, operands, attributes | mixture.gate.attributes)
    return whole


def _add(
    program: ExportedProgram, layer: Layer, bits: int, weights: Weights, parts: list[slice]
) -> list[Node | None]:
    """New parameters of a layer whose columns are these parts in turn."""

    def make() -> Iterator[Part]:
        for weight, bias in layer.each(weights, torch.float32 if bits else None):
            yield stored(rows_in_turn([weight[part] for part in parts]), bits)
            if bias is not None:
                yield {"bias": rows_in_turn([bias[part] for part in parts])}

    each = forms(layer.columns, layer.inputs, bits, layer.weight.dtype, layer.bias is not None)
    stacked = {name: ((len(layer.weight), *shape), dtype) for name, (shape, dtype) in each.items()}
    return add_matrix(program, weights, layer.name, stacked, make)
