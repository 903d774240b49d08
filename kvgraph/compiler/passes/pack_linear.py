"""Replace aten.linear by kvgraph.linear over packed weights: bfloat16, int8, int4 or as stored.

Linear layers with one input become one node (`linears.py`). The node also adds a residual, if the
sum is the only use of a layer's result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.packed_weights import Packed, pack_in_parts, shapes
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.linears import (
    MAX_SECTIONS,
    Group,
    apart_by_form,
    replace_outputs,
    rewrite_linears,
)
from kvgraph.compiler.passes.operands import add_call, value
from kvgraph.compiler.passes.parameters import add_packed
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dtypes import AS_STORED
from kvgraph.ops import torch_ops

aten = torch.ops.aten
PACKED = torch_ops.linear.default


def pack_linear(program: ExportedProgram, bits: int, weights: Weights) -> PassReport:
    """Rewrite `program` in place; its packed weights are made later."""

    def rewrite(group: Group) -> None:
        is_cut = bits == AS_STORED and group.gated is None
        for part in apart_by_form(group, weights) if is_cut else [group]:
            _rewrite(program, part, bits, weights)

    return rewrite_linears(program, "pack_linear", (torch.float32,), rewrite, residuals=True)


def _rewrite(program: ExportedProgram, group: Group, bits: int, weights: Weights) -> None:
    graph, first = program.graph, group.layers[0]
    inputs = first.weight.shape[1]
    sources = [layer.source(weights) for layer in group.layers]
    form, is_kept = weights.form_of(sources, bits, takes=lambda form: form.sums(inputs))

    def make() -> Iterator[Packed]:
        sections = group.sections(weights, form, is_kept=is_kept)
        return pack_in_parts(sections, inputs, form, interleave=group.gated is not None)

    forms = shapes([layer.features for layer in group.layers], inputs, form, group.has_bias)
    operands = add_packed(program, weights, group.stem, (*group.parts, form), forms, make)
    with graph.inserting_before(group.gated or group.total or first.node):
        x = _rows(first.node.args[0])
        residual = _rows(group.residual) if group.residual is not None else None
        whole = graph.call_function(PACKED, (x, *operands, residual), group.attributes(form))
        with value(x).fake_mode:  # type: ignore[attr-defined]
            rows = value(x).shape[0]
            widths = group.widths + [0] * (MAX_SECTIONS - len(group.widths))
            whole.meta["val"] = tuple(
                value(x).new_empty((rows if width else 0, width)) for width in widths
            )
        replace_outputs(group, whole, _like)


def _rows(node: object) -> Node:
    """`node` as `[rows, width]`; from `[1, rows, width]` it is a view without the first dim."""
    assert isinstance(node, Node)
    if len(value(node).shape) == 2:
        return node
    if node.target is aten.unsqueeze.default and node.args[1] == 0:
        assert isinstance(node.args[0], Node)
        return node.args[0]
    return add_call(node.graph, aten.squeeze.dim, node, 0)


def _like(rows: Node, old: Node) -> Node:
    if len(value(old).shape) == 2:
        return rows
    return add_call(rows.graph, aten.unsqueeze.default, rows, 0)
