"""Replace RMSNorm (ATen operators or aten.rms_norm) and a sum before it by kvgraph.rms_norm.

Applies to `x * rsqrt(mean(x^2) + epsilon)` over the last dim, in float32, times a weight `[W]` of
x's dtype (plus a constant, as in Gemma). It may be rounded to x's dtype before the weight or after
it; the kernel rounds at the same points. If x is a sum, the sum is fused too, provided that nothing
reads one of its terms later: the kernel then writes the sum into that term's memory.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import (
    CASTS,
    UnmatchedError,
    any_node,
    erase_unused,
    expect,
    node_of,
    only_user,
    other_factor,
    own_rows,
    require_rows,
    rounded,
    typed,
    value,
)
from kvgraph.ops import torch_fusions
from kvgraph.ops.torch_nodes import is_dense

aten = torch.ops.aten
FUSED = torch_fusions.rms_norm.default
QUANTIZED = torch_fusions.quantized_linear.default
COMPOSED, RATE = aten.rms_norm.default, aten.rsqrt.default
ADD, MUL, TRANSPOSE = aten.add.Tensor, aten.mul.Tensor, aten.transpose.int
HALVES = (torch.float16, torch.bfloat16)

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


@dataclass(frozen=True)
class Norm:
    """One RMSNorm of a graph; `out` is its result."""

    x: Node
    weight: Node
    epsilon: float
    offset: float
    round_first: bool
    out: Node


def fuse_rms_norm(graph: Graph) -> PassReport:
    """Rewrite `graph` in place; needs `drop_no_ops` before it."""
    report = PassReport("fuse_rms_norm")
    for node in list(graph.nodes):
        if node.target in (RATE, COMPOSED):
            try:
                norm = _composed(node) if node.target is COMPOSED else _written_out(node)
                _require_operands(norm)
            except UnmatchedError as why:
                report.unmatched.append(f"{node.name}: {why}")
                continue
            _fuse(graph, norm, report)
            report.applied += 1
    graph.lint()
    return report


def _written_out(rate: Node) -> Norm:
    wide, epsilon = _squares(rate)
    x = _before_cast(wide)
    dtype = value(x).dtype
    scaled = node_of(only_user(rate, "the rate"), [MUL], "x times the rate")
    expect(other_factor(scaled, rate) is wide, "expected x times its own rate")
    normal = rounded(scaled, dtype)
    weighted = node_of(only_user(normal, "the normalised rows"), [MUL], "a weight next")
    weight, offset = _weight(other_factor(weighted, normal), dtype)
    return Norm(x, weight, epsilon, offset, normal is not scaled, rounded(weighted, dtype))


def _squares(rate: Node) -> tuple[Node, float]:
    """x in float32 and epsilon, if `rate` is `rsqrt(mean(x^2) + epsilon)`; else UnmatchedError."""
    shifted = node_of(rate.args[0], [ADD], "the rate of a mean plus epsilon")
    epsilon = shifted.args[1]
    if not isinstance(epsilon, float):
        raise UnmatchedError(f"expected a constant epsilon, got {epsilon}")
    mean = node_of(shifted.args[0], [aten.mean.dim], "the rate of a mean")
    expect(list(mean.args[1:]) == [[-1], True], f"expected the last dim's mean, got {mean.args}")
    square = node_of(mean.args[0], [aten.pow.Tensor_Scalar], "a mean of squares")
    expect(square.args[1] in (2, 2.0), f"expected a mean of squares, got power {square.args[1]}")
    wide = any_node(square.args[0], "a tensor")
    expect(value(wide).dtype == torch.float32, f"expected squares in float32, got {typed(wide)}")
    return wide, epsilon


def _before_cast(wide: Node) -> Node:
    """x in 16 bits, if `wide` is x cast to float32; else `wide`."""
    given = wide.args[0] if wide.target in CASTS else wide
    return given if isinstance(given, Node) and value(given).dtype in HALVES else wide


def _weight(factor: Node, dtype: torch.dtype) -> tuple[Node, float]:
    """The norm's weight, and the constant that is added to it in float32 (0 if none)."""
    offset = 0.0
    if factor.target is ADD:
        constant = factor.args[1]
        if not isinstance(constant, int | float) or value(factor).dtype != torch.float32:
            raise UnmatchedError(f"expected a weight plus a constant in float32, got {factor.args}")
        factor, offset = any_node(factor.args[0], "a weight"), float(constant)
    if factor.target in CASTS:
        factor = any_node(factor.args[0], "a weight")
    expect(factor.op == "placeholder", f"expected a weight of the model, got {factor.target}")
    return factor, offset


def _composed(norm: Node) -> Norm:
    """The Norm of an aten.rms_norm, which computes in float32 and rounds once.

    Its epsilon may be left out.
    """
    given = dict(zip(("input", "normalized_shape", "weight", "eps"), norm.args, strict=False))
    given |= norm.kwargs
    epsilon, dims = given.get("eps"), given["normalized_shape"]
    if epsilon is None:
        epsilon = torch.finfo(torch.float32).eps
    assert isinstance(epsilon, float)
    assert isinstance(dims, list | tuple)
    expect(len(dims) == 1, f"expected one normalised dim, got {dims}")
    weight = any_node(given.get("weight"), "a weight")
    return Norm(any_node(given["input"], "a tensor"), weight, epsilon, 0.0, False, norm)


def _require_operands(norm: Norm) -> None:
    x, weight, out = value(norm.x), value(norm.weight), value(norm.out)
    expect(
        weight.dtype == x.dtype == out.dtype,
        f"expected one dtype of x, weight and result, got {x.dtype}, {weight.dtype}, {out.dtype}",
    )
    width = x.shape[-1]
    expect(
        tuple(weight.shape) == (width,), f"expected a weight [{width}], got {typed(norm.weight)}"
    )
    source, _ = _before_transpose(norm.x)
    require_rows(source)


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
