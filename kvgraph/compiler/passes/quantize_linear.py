"""aten.linear -> kvgraph.quantized_linear over weights in int8 or nibbles (CUDA).

Linear layers of one input become one node (`linears.py`); a sum with the residual stays for the
norm behind it. It comes before passes that write in place: these then see one node that reads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram

from kvgraph.compiler.gpu_weights import forms, stored_in_parts
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.linears import (
    MAX_SECTIONS,
    OUTPUTS,
    Group,
    replace_outputs,
    rewrite_linears,
)
from kvgraph.compiler.passes.operands import KINDS, any_node, value
from kvgraph.compiler.passes.parameters import add_matrix
from kvgraph.compiler.weights import Weights
from kvgraph.ops import torch_fusions

QUANTIZED = torch_fusions.quantized_linear.default


def quantize_linear(program: ExportedProgram, bits: int, weights: Weights) -> PassReport:
    """Rewrite `program` in place; its weights are made later."""

    def rewrite(group: Group) -> None:
        _rewrite(program, group, bits, weights)

    return rewrite_linears(program, "quantize_linear", KINDS, rewrite)


def _rewrite(program: ExportedProgram, group: Group, bits: int, weights: Weights) -> None:
    graph, first = program.graph, group.layers[0]
    is_gated, inputs = group.gated is not None, first.weight.shape[1]
    x = any_node(first.node.args[0], "rows")
    dtype = value(x).dtype

    def make() -> Iterator[dict[str, torch.Tensor]]:
        sections = [layer.section(weights) for layer in group.layers]
        return stored_in_parts(sections, bits, dtype, in_turn=is_gated)

    columns = sum(layer.features for layer in group.layers)
    form = forms(columns, inputs, bits, dtype, group.has_bias)
    operands = add_matrix(program, weights, group.stem, form, make)
    widths = group.widths
    attributes = dict(zip(OUTPUTS, widths, strict=False)) | {"bits": bits}
    if is_gated:
        attributes["silu_mul"] = 1
    with graph.inserting_before(group.gated or first.node):
        whole = graph.call_function(QUANTIZED, (x, *operands), attributes)
        with value(x).fake_mode:  # type: ignore[attr-defined]
            widths += [0] * (MAX_SECTIONS - len(widths))
            whole.meta["val"] = tuple(_result(value(x), width) for width in widths)
        replace_outputs(group, whole, lambda out, old: out)


def _result(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width)) if width else x.new_empty((0, 0))
