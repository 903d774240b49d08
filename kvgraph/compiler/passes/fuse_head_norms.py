"""Move the RMSNorm of each head of q and k (Qwen3, Gemma 3) into update_and_attend.

Applies where the norms of q and k (or of q alone, if nothing is stored) have one epsilon and one
offset, a weight `[head_dim]` each, and nothing else reads their results. A model with such norms
has two nodes fewer in each layer.

Numerics: kernels normalise and rotate in float32 and round once; a program in half precision rounds
after the norm, and may round before its weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED, arguments
from kvgraph.compiler.passes.norms import COMPOSED, RATE, Norm, find_norm
from kvgraph.compiler.passes.operands import (
    UnmatchedError,
    any_node,
    computed,
    erase_unused,
    expect,
    only_user,
    value,
)
from kvgraph.ops import UPDATE_AND_ATTEND

aten = torch.ops.aten
MOVES = (aten.transpose.int, aten.permute.default, aten.select.int)
"""Operators that move heads between their norm and the op."""


def fuse_head_norms(graph: Graph) -> PassReport:
    """Rewrite `graph` in place, after `fuse_rope`."""
    report = PassReport("fuse_head_norms")
    norms = _norms(graph)
    for node in list(graph.nodes):
        if node.target is not FUSED:
            continue
        given = arguments(UPDATE_AND_ATTEND, node)
        try:
            q, k = (_norm_of(name, given, norms) for name in ("q", "k"))
            if q or k:
                _fuse(node, given, q, k)
                report.applied += 1
        except UnmatchedError as why:
            report.unmatched.append(f"{node.name}: {why}")
    graph.lint()
    return report


def _norms(graph: Graph) -> dict[Node, Norm]:
    """The norms of a graph by their results."""
    found = {}
    for node in graph.nodes:
        if node.target in (RATE, COMPOSED):
            try:
                norm = find_norm(node)
            except UnmatchedError:
                continue
            found[norm.out] = norm
    return found


def _norm_of(name: str, given: Mapping[str, object], norms: Mapping[Node, Norm]) -> Norm | None:
    """The norm of which operand `name` is the result, maybe moved; None if it is another value."""
    operand = given[name]
    path = [operand] if isinstance(operand, Node) else []
    while path and path[-1] not in norms and _moves_whole_heads(path[-1]):
        path.append(path[-1].all_input_nodes[0])
    if not path or path[-1] not in norms:
        return None
    for node in path:
        only_user(node, "the normalised heads")
    places = sum(other is operand for other in given.values())
    expect(places == 1, "expected q and k of their own, got one value twice")
    return norms[path[-1]]


def _moves_whole_heads(node: Node) -> bool:
    if node.target not in MOVES:
        return False
    last, given = value(node.all_input_nodes[0]).dim() - 1, node.args[1:]
    if node.target is aten.permute.default:
        assert isinstance(given[0], list | tuple)
        return given[0][-1] in (last, -1)
    dims = given if node.target is aten.transpose.int else given[:1]
    return not {last, -1} & set(dims)


def _fuse(node: Node, given: dict[str, Argument], q: Norm | None, k: Norm | None) -> None:
    expect(q is not None, "expected a norm of q, as k has one, got none")
    assert q is not None
    if given["k"] is not None:
        expect(k is not None, "expected a norm of k, as q has one, got none")
        assert k is not None
        ours, others = (q.epsilon, q.offset), (k.epsilon, k.offset)
        expect(ours == others, f"expected one epsilon and offset, got {ours} and {others}")
    width = value(any_node(given["kv_blocks"], "a pool")).shape[-1]
    for norm in filter(None, (q, k)):
        size = value(norm.weight).shape[0]
        expect(size == width, f"expected norms of heads of {width} elements, got {size}")
    given |= {"q_norm": q.weight, "k_norm": k.weight if k else None}
    given |= {"norm_epsilon": q.epsilon, "norm_offset": q.offset}
    node.args, node.kwargs = UPDATE_AND_ATTEND.call(given)
    for norm in filter(None, (q, k)):
        _remove(norm, node)


def _remove(norm: Norm, attend: Node) -> None:
    """Let the readers of a norm, up to `attend`, read what it normalises."""
    reader = only_user(norm.out, "the normalised heads")
    norm.out.replace_all_uses_with(norm.x)
    while reader is not attend:
        reader.meta["val"] = computed(reader)
        reader = only_user(reader, "the heads")
    erase_unused(norm.out)
