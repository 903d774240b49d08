"""Replace values `[1, tokens, ...]` by `[tokens, ...]`, from the embedding to the logits.

Applies to the batch dim of 1 that a Hugging Face model has around ragged rows. With it, ONNX would
squeeze and unsqueeze around each cache op, and copy q, k, v and the logits by gathers. An operation
that is not known here keeps the dim, and is reported.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import (
    VIEWS,
    UnmatchedError,
    any_node,
    erase_unused,
    expect,
    value,
)

aten = torch.ops.aten
Rule = Callable[[Node], tuple[Argument, ...]]

POINTWISE = (
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.pow.Tensor_Scalar,
    aten.rsqrt.default,
    aten.neg.default,
    aten.tanh.default,
    aten.sigmoid.default,
    aten.silu.default,
    aten.gelu.default,
    aten.relu.default,
    aten.clamp.default,
    aten.to.dtype,
    aten._to_copy.default,
    aten.contiguous.default,
    aten.clone.default,
)


def drop_batch_dim(graph: Graph) -> PassReport:
    """Rewrite `graph` in place.

    Each known operation becomes a flat operation and an unsqueeze, which the next operation skips.
    """
    report = PassReport("drop_batch_dim")
    kept: Counter[str] = Counter()
    for node in list(graph.nodes):
        try:
            if node.target is aten.select.int and _selects_all(node):
                rows = _first(node)
                node.replace_all_uses_with(rows)
                erase_unused(node)
            elif (same := _viewed(graph, node)) is not None:
                node.replace_all_uses_with(same)
                erase_unused(node)
            elif _is_batched(node) and any(_flat(x) for x in node.all_input_nodes):
                _flatten(graph, node)
            else:
                continue
            report.applied += 1
        except UnmatchedError as why:
            kept[f"{node.target}: {why}"] += 1
    report.unmatched += [f"{count} x {what}" for what, count in kept.items()]
    for node in reversed(list(graph.nodes)):
        if node.target is aten.unsqueeze.default and not node.users:
            erase_unused(node)
    return report


def _selects_all(select: Node) -> bool:
    source = select.args[0]
    return isinstance(source, Node) and select.args[1:] == (0, 0) and _is_one(value(source))


def _viewed(graph: Graph, node: Node) -> Node | None:
    """The node that a view equals, if it drops the batch dim, adds it in front, or changes nothing;
    else None."""
    if node.target not in VIEWS:
        return None
    given, dims = any_node(node.args[0], "a tensor"), _dims(node)
    for same in (given, _flat(given)):
        if same is not None and _dims(same) == dims:
            return same
    if dims != ["1", *_dims(given)]:
        return None
    with graph.inserting_before(node):
        view = graph.call_function(aten.unsqueeze.default, (given, 0))
    view.meta["val"] = value(node)
    return view


def _dims(node: Node) -> list[str]:
    return [str(extent) for extent in value(node).shape]


def _flat(node: object) -> Node | None:
    """x, if `node` is `unsqueeze(x, 0)`; else None."""
    if isinstance(node, Node) and node.target is aten.unsqueeze.default and node.args[1] == 0:
        assert isinstance(node.args[0], Node)
        return node.args[0]
    return None


def _is_batched(node: Node) -> bool:
    if node.op != "call_function" or node.target in (aten.unsqueeze.default, operator.getitem):
        return False
    found = node.meta.get("val")
    parts = found if isinstance(found, list | tuple) else [found]
    return bool(parts) and all(isinstance(t, torch.Tensor) and _is_one(t) for t in parts)


def _is_one(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 1 and isinstance(tensor.shape[0], int) and tensor.shape[0] == 1


def _flatten(graph: Graph, node: Node) -> None:
    rule = RULES.get(node.target)
    expect(rule is not None, "not known to keep rows apart")
    assert rule is not None
    with graph.inserting_before(node):
        flat = graph.call_function(node.target, rule(node), dict(node.kwargs))  # type: ignore[arg-type]
    parts = node.meta["val"]
    if not isinstance(parts, list | tuple):
        flat.meta["val"] = parts[0]
        _replace(graph, node, flat)
        return
    flat.meta["val"] = [part[0] for part in parts]
    for part in list(node.users):
        expect(part.target is operator.getitem, "used other than part by part")
        with graph.inserting_before(part):
            taken = graph.call_function(operator.getitem, (flat, part.args[1]))
        taken.meta["val"] = value(part)[0]
        _replace(graph, part, taken)


def _replace(graph: Graph, node: Node, flat: Node) -> None:
    with graph.inserting_before(node):
        view = graph.call_function(aten.unsqueeze.default, (flat, 0))
    view.meta["val"] = value(node)
    node.replace_all_uses_with(view)
    erase_unused(node)


def _rows(node: object) -> Node:
    """`node` without the batch dim: the operand of its unsqueeze, or a new squeeze."""
    flat = _flat(node)
    if flat is None:
        assert isinstance(node, Node)
        expect(_is_one(value(node)), "expected a dim of extent 1")
        with node.graph.inserting_after(node):
            flat = node.graph.call_function(aten.squeeze.dim, (node, 0))
        flat.meta["val"] = value(node)[0]
    return flat


def _first(node: Node) -> Node:
    return _rows(node.args[0])


def _pointwise(node: Node) -> tuple[Argument, ...]:
    """Arguments of an elementwise operation: operands with the result's rank lose their first dim,
    others broadcast as before."""
    rank = len(value(node).shape)

    def operand(x: Argument) -> Argument:
        if not isinstance(x, Node) or not isinstance(x.meta.get("val"), torch.Tensor):
            return x
        return _rows(x) if len(value(x).shape) == rank else x

    return tuple(operand(x) for x in node.args)


def _along(at: int) -> Rule:
    """The rule for operations along the dims in argument `at`, which must count from the end."""

    def rule(node: Node) -> tuple[Argument, ...]:
        dims = node.args[at] if len(node.args) > at else 0
        given = dims if isinstance(dims, list | tuple) else [dims]
        expect(all(isinstance(d, int) and d < 0 for d in given), "a dim counted from the front")
        return (_first(node), *node.args[1:])

    return rule


def _sized(node: Node) -> tuple[Argument, ...]:
    size = node.args[1]
    assert isinstance(size, list | tuple)
    expect(isinstance(size[0], int) and size[0] == 1, "another shape of rows")
    return (_first(node), list(size[1:]))


def _transposed(node: Node) -> tuple[Argument, ...]:
    dims = [_dim(node, at) for at in (1, 2)]
    expect(0 not in dims, "the dim moves")
    return (_first(node), *(d - 1 for d in dims))


def _sliced(node: Node) -> tuple[Argument, ...]:
    dim = _dim(node, 1)
    expect(dim > 0, "a slice of the dim")
    return (_first(node), dim - 1, *node.args[2:])


def _dim(node: Node, at: int) -> int:
    """The dim in argument `at`, counted from the front; 0 if it is left out."""
    given = node.args[at] if len(node.args) > at else 0
    assert isinstance(given, int)
    return given % len(value(node).shape)


def _indexed(node: Node) -> tuple[Argument, ...]:
    indices = node.args[1]
    assert isinstance(indices, list | tuple)
    expect(indices[0] is None and len(indices) > 1, "an index of the dim")
    return (_first(node), list(indices[1:]))


def _embedded(node: Node) -> tuple[Argument, ...]:
    return (node.args[0], _rows(node.args[1]), *node.args[2:])


RULES: dict[object, Rule] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    aten.linear.default: lambda node: (_first(node), *node.args[1:]),
    aten.embedding.default: _embedded,
    aten.mean.dim: _along(1),
    aten.softmax.int: _along(1),
    aten.chunk.default: _along(2),
    aten.split.Tensor: _along(2),
    aten.split_with_sizes.default: _along(2),
    aten.view.default: _sized,
    aten.reshape.default: _sized,
    aten.transpose.int: _transposed,
    aten.slice.Tensor: _sliced,
    aten.index.Tensor: _indexed,
}
