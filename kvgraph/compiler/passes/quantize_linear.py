"""Replace aten.linear by kvgraph.quantized_linear over quantised weights (CUDA).

Linear layers with one input become one node (`linears.py`). The addition of a residual stays, for
the norm after it. Layers that are kept as stored become separate nodes if their forms differ, and
weights that fit a float type best stay as they are. Inputs are rounded if the checkpoint was made
for that and all architectures can multiply such numbers. This pass runs before passes that write in
place, so these see one node that reads the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.export import ExportedProgram

from kvgraph.compiler.gpu_weights import in_parts, shapes
from kvgraph.compiler.joined_forms import PLAIN_BITS
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.linears import (
    MAX_SECTIONS,
    Group,
    Layer,
    apart_by_form,
    replace_outputs,
    rewrite_linears,
)
from kvgraph.compiler.passes.operands import KINDS, any_node, expect, value
from kvgraph.compiler.passes.parameters import add_matrix
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dtypes import AS_STORED
from kvgraph.kernels.matrix_tiles import multiply_bytes
from kvgraph.ops import torch_fusions
from kvgraph.ops.matrices import of_kernels, takes

QUANTIZED = torch_fusions.quantized_linear.default


def quantize_linear(
    program: ExportedProgram, bits: int, weights: Weights, archs: Sequence[str] = ()
) -> PassReport:
    """Rewrite `program` in place; its weights are made later.

    `archs`: GPU architectures for which the artifact has kernels.
    """

    def rewrite(group: Group) -> None:
        for part in apart_by_form(group, weights) if bits == AS_STORED else [group]:
            _rewrite(program, part, bits, weights, archs)

    def require(layer: Layer) -> None:
        if bits == AS_STORED:
            source = layer.source(weights)
            is_small = source.form is not None or source.bits < PLAIN_BITS
            if not is_small:
                weights.note_plain([source])
            expect(is_small, "its numbers fit the activations' dtype best")

    return rewrite_linears(program, "quantize_linear", KINDS, rewrite, require=require)


def _rewrite(
    program: ExportedProgram, group: Group, bits: int, weights: Weights, archs: Sequence[str]
) -> None:
    graph, first = program.graph, group.layers[0]
    is_gated, inputs = group.gated is not None, first.weight.shape[1]
    x = any_node(first.node.args[0], "rows")
    dtype = value(x).dtype
    sources = [layer.source(weights) for layer in group.layers]
    found, is_kept = weights.form_of(sources, bits, takes=takes)
    form = of_kernels(found, inputs)
    x_bits = min(source.x_bits for source in sources) if is_kept else 0

    def make() -> Iterator[dict[str, torch.Tensor]]:
        sections = group.sections(weights, form, is_kept=is_kept)
        return in_parts(sections, form, dtype, in_turn=is_gated)

    columns = sum(layer.features for layer in group.layers)
    operands = add_matrix(
        program,
        weights,
        group.stem,
        (*group.parts, form),
        shapes(columns, inputs, form, dtype, group.has_bias),
        make,
    )
    attributes = group.attributes(form)
    if x_bits and dtype.itemsize == 2 and multiply_bytes(form, archs):
        attributes["x_bits"] = x_bits
        weights.inputs_rounded |= {source.where for source in sources}
    with graph.inserting_before(group.gated or first.node):
        whole = graph.call_function(QUANTIZED, (x, *operands), attributes)
        with value(x).fake_mode:  # type: ignore[attr-defined]
            widths = group.widths + [0] * (MAX_SECTIONS - len(group.widths))
            whole.meta["val"] = tuple(_result(value(x), width) for width in widths)
        replace_outputs(group, whole, lambda out, old: out)


def _result(x: torch.Tensor, width: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], width)) if width else x.new_empty((0, 0))
