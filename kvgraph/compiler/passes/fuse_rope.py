"""Replace the rotary embedding of q and k before update_and_attend by cos_sin, a table by position.

Applies where q and k (or only q, if nothing is stored) are rotated in the same way by cosines and
sines of each token's own position. The pass computes the table once, for every position that the
model allows, with the program's own operators. Layers with the same rotary embedding share a table.
An embedding stays if it depends on the length of a step, or its table would be larger than
TABLE_BYTES.

Numerics: kernels rotate in float32 by a table in float32 and round once; a program in half
precision rounds cosines, sines, both products and their sum.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from kvgraph.compiler.passes import TABLE_BYTES, PassReport
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED, arguments
from kvgraph.compiler.passes.operands import (
    CHECK,
    UnmatchedError,
    add_call,
    erase_unused,
    expect,
    typed,
    value,
)
from kvgraph.compiler.passes.parameters import add_buffer
from kvgraph.compiler.passes.rotations import Columns, Rotation, find_rotation
from kvgraph.compiler.passes.token_functions import TokenFunctions
from kvgraph.contract.signature import GraphSignature
from kvgraph.ops import UPDATE_AND_ATTEND
from kvgraph.ops._update_and_attend import ROPE_HALVES

aten = torch.ops.aten


def fuse_rope(program: ExportedProgram, signature: GraphSignature, positions: int) -> PassReport:
    """Rewrite `program` in place, after `fuse_update_and_attend`.

    Each table `[positions, rotary_dim]` is a new buffer `kvgraph.cos_sin_{i}` of the program.
    """
    report = PassReport("fuse_rope")
    functions = TokenFunctions(program, signature)
    tables: dict[tuple[int, Columns, Columns], torch.Tensor] = {}
    found: list[tuple[Node, list[Rotation]]] = []
    for node in program.graph.nodes:
        if node.target is FUSED:
            try:
                rotations = _rotations(node, functions)
                turn = rotations[0].turn
                if turn not in tables:
                    tables[turn] = _table(*turn, functions, positions)
            except UnmatchedError as why:
                report.unmatched.append(f"{node.name}: {why}")
                continue
            found.append((node, rotations))
    buffers = {
        turn: add_buffer(program, f"kvgraph.cos_sin_{i}", table)
        for i, (turn, table) in enumerate(tables.items())
    }
    for node, rotations in found:
        _fuse(node, rotations, buffers[rotations[0].turn])
        report.applied += 1
    if found:
        program.graph.eliminate_dead_code()
        _erase_checked(program.graph)
    return report


def _rotations(node: Node, functions: TokenFunctions) -> list[Rotation]:
    """The rotations of q, and of k if the layer stores one. UnmatchedError if they differ."""
    given = arguments(UPDATE_AND_ATTEND, node)
    expect(given["cos_sin"] is None, "expected no cos_sin yet, got one")
    found = []
    for name in ("q", "k"):
        if given[name] is not None:
            try:
                found.append(find_rotation(given[name], functions))
            except UnmatchedError as why:
                raise UnmatchedError(f"{name}: {why}") from why
    first, last = found[0], found[-1]
    expect(first.turn == last.turn, f"expected one table for q and k, got {_two(first, last)}")
    return found


def _two(q: Rotation, k: Rotation) -> str:
    said = [f"{r.cos.table.name} and {r.sin.table.name} (style {r.style})" for r in (q, k)]
    return f"{said[0]} for q, {said[1]} for k"


def _table(
    style: int, cos: Columns, sin: Columns, functions: TokenFunctions, positions: int
) -> torch.Tensor:
    """The table `[positions, rotary_dim]` in float32: each pair's cosine, then each pair's sine."""
    rotary = len(cos.columns)
    size = positions * rotary * 4
    expect(
        size <= TABLE_BYTES,
        f"expected a table of at most {TABLE_BYTES} bytes, got {size} for {positions} positions of "
        f"{rotary} elements",
    )
    halves = []
    for name, part in (("cos", cos), ("sin", sin)):
        width = functions.shape(part.table, 1)[-1]
        rows = functions.evaluate(part.table, positions).float().reshape(positions, width)
        rows = rows[:, list(part.columns)]
        pair = rows.chunk(2, -1) if style == ROPE_HALVES else (rows[:, 0::2], rows[:, 1::2])
        expect(torch.equal(*pair), f"expected one {name} for both elements of a pair, got two")
        expect(bool(pair[0].isfinite().all()), f"expected a finite {name} at every position")
        halves.append(pair[0])
    return torch.cat(halves, -1).contiguous()


def _fuse(node: Node, rotations: list[Rotation], table: Node) -> None:
    given = arguments(UPDATE_AND_ATTEND, node)
    operands = {"cos_sin": table}
    for name, rotation in zip(("q", "k"), rotations, strict=False):
        operands[name] = _unrotated(node, rotation, value(given[name]))
        expected = typed(given[name])
        assert typed(operands[name]) == expected, f"{name}: {typed(operands[name])}, {expected}"
    style = rotations[0].style
    given |= operands
    rotated = [x for x in node.all_input_nodes if x not in given.values()]
    node.args = tuple(given[operand.name] for operand in UPDATE_AND_ATTEND.inputs)
    node.kwargs = {**node.kwargs, **({"rope_style": style} if style != ROPE_HALVES else {})}
    for operand in rotated:
        erase_unused(operand)


def _unrotated(before: Node, rotation: Rotation, like: torch.Tensor) -> Node:
    """The operand of `rotation`, before it is rotated, as `[T, N, D]`."""
    node, dims = rotation.source, list(rotation.dims)
    moved = [i for i, dim in enumerate(dims) if i != dim]
    graph = before.graph
    with graph.inserting_before(before):
        if len(moved) == 2:
            node = add_call(graph, aten.transpose.int, node, *moved)
        elif moved:
            node = add_call(graph, aten.permute.default, node, dims)
        for _ in range(len(dims) - like.dim()):
            node = add_call(graph, aten.select.int, node, 0, 0)
    return node


def _erase_checked(graph: Graph) -> None:
    """Remove values that only torch.export's dtype checks read, together with these checks."""
    for node in reversed(list(graph.nodes)):
        users = list(node.users)
        if node.op == "call_function" and users and all(u.target is CHECK for u in users):
            for check in users:
                graph.erase_node(check)
            erase_unused(node)
