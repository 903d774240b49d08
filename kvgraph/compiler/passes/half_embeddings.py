"""Store the float32 table of an aten.embedding in 16 bits, and cast its rows to float32.

Applies to parameters with a row for each token that nothing else reads. So it runs after
`pack_linear`, which gives a tied projection its own weights. Tables by position stay, because an
angle must be exact. half_tables.py does the same to an ONNX graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.label_kinds import MADE, SIZES
from kvgraph.compiler.passes.operands import UnmatchedError, any_node, expect, value
from kvgraph.compiler.passes.parameters import (
    add_parameter,
    drop_unused,
    held,
    inputs_of,
    name_outputs,
)
from kvgraph.compiler.passes.token_functions import packet
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dims import TensorType
from kvgraph.contract.signature import GraphSignature

aten = torch.ops.aten
EMBEDDING = aten.embedding.default


def half_embeddings(
    program: ExportedProgram, signature: GraphSignature, weights: Weights
) -> PassReport:
    """Rewrite `program` in place."""
    report = PassReport("half_embeddings")
    inputs = inputs_of(program, signature)
    by_table: dict[Node, list[Node]] = {}
    for node in program.graph.nodes:
        if node.target is EMBEDDING:
            by_table.setdefault(any_node(node.args[0], "a table"), []).append(node)
    for table, lookups in by_table.items():
        try:
            for lookup in lookups:
                _require_tokens(any_node(lookup.args[1], "an index"), inputs)
            _halve(program, weights, table, lookups)
        except UnmatchedError as why:
            report.unmatched.append(f"{table.name}: {why}")
            continue
        report.applied += 1
    drop_unused(program)
    name_outputs(program)
    program.graph.lint()
    program.graph_module.recompile()
    return report


def _require_tokens(index: Node, inputs: Mapping[Node, TensorType]) -> None:
    """Raise UnmatchedError unless `index` is computed from values of the input `tokens` only."""
    reached, waiting = {index}, [index]
    while waiting:
        node = waiting.pop()
        if packet(node) not in (*MADE, *SIZES):
            waiting += [x for x in node.all_input_nodes if x not in reached]
            reached |= set(node.all_input_nodes)
    found = sorted({inputs[node].name for node in reached if node in inputs})
    expect(
        found == ["tokens"], f"expected rows of tokens, got rows of {', '.join(found) or 'none'}"
    )


def _halve(program: ExportedProgram, weights: Weights, table: Node, lookups: list[Node]) -> None:
    found = held(program, table)
    expect(found is not None, "expected a weight of the model, got a computed one")
    assert found is not None
    name, weight = found
    is_parameter = name in program.graph_signature.parameters
    expect(is_parameter, f"expected a parameter, got {name!r}, which is none")
    expect(weight.dtype == torch.float32, f"expected float32, got {weight.dtype}")
    others = [user.name for user in table.users if user not in lookups]
    expect(not others, f"expected no use but as a table, got {', '.join(others)}")
    dtype, source = weights.half_of(name, weight), weights.values(name, weight)
    half = f"{name}_{str(dtype).removeprefix('torch.')}"
    stored = add_parameter(program, half, weight.shape, dtype)
    weights.later([half], lambda: ((half, each.to(dtype)) for each in source.pieces()))
    for lookup in lookups:
        users, whole = list(lookup.users), value(lookup)
        lookup.replace_input_with(table, stored)
        lookup.meta["val"] = whole.to(dtype)
        with program.graph.inserting_after(lookup):
            cast = program.graph.call_function(aten.to.dtype, (lookup, torch.float32))
        cast.meta["val"] = whole
        for user in users:
            user.replace_input_with(lookup, cast)
