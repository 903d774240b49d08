"""Replace values that are computed from a model's constants alone by buffers of the program.

Applies to results of at most MOST_ELEMENTS numbers, for example a number that a model computes from
its settings in each step (Gemma 3n's cutoffs), by an operator that exporters may not support.
Results of moves and casts alone are not folded. Weights are no constants here.
"""

from __future__ import annotations

import operator

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import erase_unused
from kvgraph.compiler.passes.parameters import add_buffer, held
from kvgraph.compiler.passes.token_functions import CASTS, LAYOUT, packet

MOST_ELEMENTS = 1024

aten = torch.ops.aten
MOVES = (*CASTS, *LAYOUT, aten.detach_)
"""Operators that compute no new numbers, so there is nothing to fold."""


def fold_constants(program: ExportedProgram) -> PassReport:
    """Rewrite `program` in place."""
    report = PassReport("fold_constants")
    known = _given(program)
    computed = set[Node]()
    for node in program.graph.nodes:
        operands = node.all_input_nodes
        if node.op != "call_function" or not operands or not known.keys() >= set(operands):
            continue
        found = _value(node, known)
        if found is not None:
            known[node] = found
            if packet(node) not in MOVES or not computed.isdisjoint(operands):
                computed.add(node)
    for node in [each for each in program.graph.nodes if each in computed]:
        value, read = known[node], [user for user in node.users if user not in computed]
        if read and isinstance(value, torch.Tensor):
            folded = add_buffer(program, f"kvgraph.folded_{report.applied}", value)
            node.replace_all_uses_with(folded, delete_user_cb=read.__contains__)
            report.applied += 1
    for node in reversed(program.graph.nodes):
        if node in computed and not node.users:
            erase_unused(node)
    return report


def _given(program: ExportedProgram) -> dict[Node, object]:
    """Values of small constant tensors of the program, by node."""
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    given: dict[Node, object] = {}
    for node in program.graph.nodes:
        if node.op == "placeholder" and kinds[node.name] is InputKind.CONSTANT_TENSOR:
            constant = held(program, node)
            if constant is not None and constant[1].numel() <= MOST_ELEMENTS:
                given[node] = constant[1]
    return given


def _value(node: Node, known: dict[Node, object]) -> object:
    """The value of `node`; None if it is no tensor, a large one, or may differ between steps."""
    target = node.target
    assert callable(target)
    if target is not operator.getitem:
        is_pure = isinstance(target, OpOverload) and not target._schema.is_mutable
        if not is_pure and target is not aten.detach_.default:  # detach_ writes no number
            return None
        if isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags:
            return None
    if not all(map(_is_small, tree_leaves(node.meta.get("val")))):
        return None
    args, kwargs = tree_map_only(Node, known.__getitem__, (node.args, node.kwargs))
    with torch.no_grad():
        return target(*args, **kwargs)


def _is_small(made: object) -> bool:
    if not isinstance(made, torch.Tensor):
        return False
    return all(isinstance(extent, int) for extent in made.shape) and made.numel() <= MOST_ELEMENTS
