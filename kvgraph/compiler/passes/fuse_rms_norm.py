"""Replace RMSNorm (ATen operators or aten.rms_norm) and a sum before it by kvgraph.rms_norm.

Applies to `x * rsqrt(mean(x^2) + epsilon)` over the last dim, in float32, times a weight `[W]` of
x's dtype (plus a constant, as in Gemma). It may be rounded to x's dtype before the weight or after
it; the kernel rounds at the same points. If x is a sum, the sum is fused too, provided that nothing
reads one of its terms later: the kernel then writes the sum into that term's memory.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.norms import ADD, COMPOSED, MUL, RATE, Norm, find_norm
from kvgraph.compiler.passes.operands import (
    CASTS,
    UnmatchedError,
    any_node,
    erase_unused,
    expect,
    node_of,
    other_factor,
    own_rows,
    require_rows,
    typed,
    value,
)
from kvgraph.ops import torch_fusions
from kvgraph.ops.torch_nodes import is_dense

aten = torch.ops.aten
FUSED = torch_fusions.rms_norm.default
QUANTIZED = torch_fusions.quantized_linear.default
TRANSPOSE = aten.transpose.int

OWN_MEMORY = (
    ADD,
    MUL,
    FUSED,
    aten.linear.default,
    aten.embedding.default,
    torch_fusions.fused_experts.default,
    QUANTIZED,
)
"""Operators that return new memory, which shares nothing with their operands."""


def fuse_rms_norm(graph: Graph) -> PassReport:
    """Rewrite `graph` in place; needs `drop_no_ops` before it."""
    report = PassReport("fuse_rms_norm")
    for node in list(graph.nodes):
        if node.target in (RATE, COMPOSED):
            try:
                norm = find_norm(node)
                require_rows(_before_transpose(norm.x)[0])
            except UnmatchedError as why:
                report.unmatched.append(f"{node.name}: {why}")
                continue
            _fuse(graph, norm, report)
            report.applied += 1
    graph.lint()
    return report


def _before_transpose(x: Node) -> tuple[Node, tuple[int, ...]]:
    """The operand of a transpose that leaves the last dim in place, and its dims; else x and ().

    Such a transpose keeps each row's elements, so the norm can be computed before it.
    """
    if x.target is TRANSPOSE:
        source, *given = x.args
        rank = value(x).dim()
        dims = tuple(d % rank for d in given if isinstance(d, int))
        if rank - 1 not in dims:
            return any_node(source, "a tensor"), dims
    return x, ()


def _fuse(graph: Graph, norm: Norm, report: PassReport) -> None:
    attributes: dict[str, float | bool] = {"epsilon": norm.epsilon}
    attributes |= {"weight_offset": norm.offset} if norm.offset else {}
    attributes |= {"round_first": True} if norm.round_first else {}
    try:
        stream, term = _stream(norm)
    except UnmatchedError as why:
        if norm.x.target is ADD:
            report.unmatched.append(f"{norm.out.name}: fused without the sum before it: {why}")
        x, dims = _before_transpose(norm.x)
        fused = _call(graph, norm.out, FUSED, (x, norm.weight), attributes, own_rows(value(x)))
        if dims:
            # norm.out has other strides, because torch's own norm makes its result row-major.
            moved = value(fused).transpose(*dims)
            fused = _call(graph, norm.out, TRANSPOSE, (fused, *dims), {}, moved)
        norm.out.replace_all_uses_with(fused)
    else:
        # Nothing reads the result before the sum's place, and nothing reads the term after it.
        total = norm.x
        given = (term, norm.weight, stream)
        norm.out.replace_all_uses_with(
            _call(graph, total, FUSED, given, attributes, value(norm.out))
        )
        total.replace_all_uses_with(stream)
        erase_unused(total)
    erase_unused(norm.out)


def _call(
    graph: Graph,
    before: Node,
    target: object,
    args: tuple[object, ...],
    attributes: object,
    like: torch.Tensor,
) -> Node:
    with graph.inserting_before(before):
        node = graph.call_function(target, args, attributes)  # type: ignore[arg-type]
    node.meta["val"] = like
    return node


def _stream(norm: Norm) -> tuple[Node, Node]:
    """The two terms of a sum that is normalised; the first can become the sum in place.

    UnmatchedError if neither can, or if x is no sum.
    """
    total = node_of(norm.x, [ADD], "a sum")
    expect(norm.weight < total, f"expected a weight from before the sum, got {norm.weight.name}")
    expect(len(total.args) == 2 and not total.kwargs, f"expected two terms, got {total.args}")
    first = any_node(total.args[0], "a tensor")
    second = other_factor(total, first)
    types = typed(first), typed(second)
    expect({*types} == {typed(total)}, f"expected terms of one type, got {' and '.join(types)}")
    dense = is_dense(value(first)) and is_dense(value(second))
    expect(dense, "expected two row-major terms")
    reasons = []
    for term, other in ((first, second), (second, first)):
        reason = _still_read(term, total)
        if not reason:
            return term, other
        reasons.append(reason)
    raise UnmatchedError(" and ".join(reasons))


def _still_read(term: Node, total: Node) -> str:
    """Why `term` cannot become `total` in place; empty if it can."""
    if not _has_own_memory(term):
        return f"{term.name} may share its memory ({term.target})"
    for user in term.users:
        if user is not total and not user < total:
            return f"{term.name} is read later, by {user.name}"
        if user is not total and not _is_done_with(term, user):
            return f"{term.name} may live on in {user.name} ({user.target})"
    return ""


def _has_own_memory(term: Node) -> bool:
    if term.target is operator.getitem:  # one of several results
        return getattr(term.args[0], "target", None) is QUANTIZED
    return term.target in OWN_MEMORY


def _is_done_with(term: Node, user: Node) -> bool:
    """Whether the result of `user` shares no memory with `term`."""
    is_cast = user.target in CASTS and value(user).dtype != value(term).dtype
    return user.target in OWN_MEMORY or is_cast
