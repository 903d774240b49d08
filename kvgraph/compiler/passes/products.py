"""Turn products with a weight of the model into linear layers, for the passes that pack weights.

A product sums over dims of rows and of a weight: `x @ weight` (transformers' Conv1D), `x @
weight.T`, torch.einsum and torch.tensordot. It becomes aten.linear, together with a bias that is
added. The weight is then an operand `[outputs, inputs]` through transposes and reshapes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.passes.operands import (
    VIEWS,
    UnmatchedError,
    add_call,
    any_node,
    erase_unused,
    expect,
    only_user,
    other_factor,
    value,
)
from kvgraph.compiler.passes.parameters import held

aten = torch.ops.aten
PRODUCTS = (
    aten.matmul.default,
    aten.mm.default,
    aten.addmm.default,
    aten.einsum.default,
    aten.tensordot.default,
)
REVERSALS = (aten.t.default, aten.numpy_T.default)
TRANSPOSES = (*REVERSALS, aten.permute.default, aten.transpose.int, aten.mT.default)
RESHAPES = (*VIEWS, aten.flatten.using_ints)

Labels = Sequence[object]
"""A label for each dim of a tensor; equal labels of two operands are one dim of their product."""


@dataclass(frozen=True)
class StoredWeight:
    """A weight of the model, seen through transposes and reshapes.

    `dims`: for each dim of what is seen, the dims of the stored tensor that it joins, in order.
    """

    node: Node
    name: str
    tensor: torch.Tensor
    dims: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(self.dims))

    @property
    def is_plain(self) -> bool:
        """Whether the stored tensor is what is seen."""
        return self.dims == tuple((dim,) for dim in range(self.tensor.dim()))

    def turned(self, order: Sequence[int]) -> StoredWeight:
        return replace(self, dims=tuple(self.dims[i] for i in order))

    def joined(self, shape: Sequence[int]) -> StoredWeight | None:
        """What is seen as `shape`, which joins dims that follow each other; None for others."""
        left, dims = list(self.dims), []
        for size in shape:
            group: tuple[int, ...] = ()
            while left and (self._size(group) < size or not group):
                group += left.pop(0)
            if self._size(group) != size:
                return None
            dims.append(group)
        while left and dims and self._size(left[0]) == 1:
            dims[-1] += left.pop(0)
        return None if left else replace(self, dims=tuple(dims))

    def matrix(self) -> torch.Tensor:
        """`[outputs, inputs]`, of a weight with two dims."""
        sizes = [self._size(group) for group in self.dims]
        return self.tensor.detach().permute(self.order).reshape(sizes)

    def _size(self, group: Sequence[int]) -> int:
        return math.prod(self.tensor.shape[dim] for dim in group)


def turn_products(program: ExportedProgram) -> list[str]:
    """Rewrite `program` in place. Return a sentence for each product with a weight that stays."""
    unmatched = []
    for node in list(program.graph.nodes):
        if node.target in PRODUCTS and any(_of_weight(program, x) for x in node.all_input_nodes):
            try:
                _turn(program, node)
            except UnmatchedError as why:
                unmatched.append(f"{node.name}: {why}, in {node.target.name()}")
    return unmatched


def weight_of(program: ExportedProgram, node: object) -> StoredWeight | None:
    """The weight of the model that `node` is, or of which it is a transpose or a reshape."""
    if not isinstance(node, Node):
        return None
    if (found := held(program, node)) is not None:
        return StoredWeight(node, *found, tuple((dim,) for dim in range(found[1].dim())))
    if node.target not in TRANSPOSES and node.target not in RESHAPES:
        return None
    source = weight_of(program, node.args[0])
    if source is None or node.target in TRANSPOSES:
        return source and source.turned(_order(node, len(source.dims)))
    return source.joined(value(node).shape)


def _order(node: Node, rank: int) -> list[int]:
    """The dims of its operand that `node`, a transpose, has in turn."""
    dims = list(range(rank))
    if node.target in REVERSALS:
        return dims[::-1]
    if node.target is aten.permute.default:
        return [dims[i] for i in node.args[1]]  # type: ignore[union-attr, index]
    a, b = node.args[1:] or (-2, -1)
    dims[a], dims[b] = dims[b], dims[a]  # type: ignore[index]
    return dims


def _of_weight(program: ExportedProgram, node: Node) -> bool:
    """Whether `node` is a weight of the model, is seen of one, or is computed directly from one."""
    return weight_of(program, node) is not None or any(held(program, x) for x in node.args[:1])


def _turn(program: ExportedProgram, product: Node) -> None:
    (a, b), labels, result = _labels(product)
    if weight_of(program, b) is None:
        a, b, labels = b, a, labels[::-1]
    weight = weight_of(program, b)
    expect(weight is not None, "expected a weight of the model, got a computed one")
    assert weight is not None
    expect(weight_of(program, a) is None and value(a).dim() > 1, "expected rows and a weight")
    inputs = [each for each in labels[0] if each in labels[1]]
    sizes = [
        [value(x).shape[own.index(each)] for each in inputs]
        for x, own in zip((a, b), labels, strict=True)
    ]
    expect(sizes[0] == sizes[1], f"expected equal dims, got {sizes[0]} and {sizes[1]}")
    kept = [each for each in labels[0] if each not in inputs]
    outputs = [each for each in labels[1] if each not in inputs]
    expect(max(Counter(chain(*labels)).values()) <= 2 and len(inputs) > 0, "expected a product")
    expect(
        Counter(result) == Counter(kept + outputs) and bool(outputs),
        "expected a result with all dims that the operands do not share",
    )
    graph, last, bias = product.graph, product, None
    if product.target is aten.addmm.default:
        bias = any_node(product.args[0], "a bias")
        expect(not product.kwargs, "expected a sum without factors")
        expect(_is_bias(program, bias, product), "expected a bias of the model")
        expect(result[-1] == outputs[0], "expected rows at the left of a sum")
    elif len(outputs) == 1 and result[-1] == outputs[0]:
        last, bias = _with_bias(program, product)
    with graph.inserting_before(last):
        x = _matrix(a, labels[0], kept, [inputs])
        made = weight.turned([labels[1].index(each) for each in outputs + inputs])
        is_stored = made.is_plain and len(made.dims) == 2
        w = made.node if is_stored else _matrix(b, labels[1], [], [outputs, inputs])
        layer = add_call(graph, aten.linear.default, x, w, bias)
        if len(outputs) > 1:
            widths = [value(b).shape[labels[1].index(each)] for each in outputs]
            layer = add_call(graph, aten.unflatten.int, layer, -1, widths)
        layer = _permuted(layer, kept + outputs, result)
    last.replace_all_uses_with(layer)
    erase_unused(last)


def _labels(product: Node) -> tuple[tuple[Node, Node], tuple[Labels, Labels], Labels]:
    """The two operands of a product, their labels and those of the result."""
    if product.target is aten.einsum.default:
        operands = product.args[1]
        assert isinstance(operands, Sequence)
        expect(len(operands) == 2, f"expected two operands, got {len(operands)}")
        a, b = (any_node(each, "an operand") for each in operands)
        return (a, b), *_einsum_labels(str(product.args[0]), value(a).dim(), value(b).dim())
    if product.target is aten.tensordot.default:
        a, b = (any_node(each, "an operand") for each in product.args[:2])
        ranks, (ours, theirs) = (value(a).dim(), value(b).dim()), product.args[2:]
        first: list[object] = [f"a{dim}" for dim in range(ranks[0])]
        second: list[object] = [f"b{dim}" for dim in range(ranks[1])]
        for i, j in zip(ours, theirs, strict=True):  # type: ignore[arg-type]
            second[j] = first[i]
        return (a, b), (first, second), [x for x in first + second if (x in first) != (x in second)]
    a, b = (any_node(each, "an operand") for each in product.args[-2:])
    rank, found = value(a).dim(), value(b).dim()
    expect(found == 2, f"expected a matrix, got {found} dims")
    first = [*range(rank)]
    return (a, b), (first, [rank - 1, rank]), [*first[:-1], rank]


def _einsum_labels(equation: str, *ranks: int) -> tuple[tuple[Labels, Labels], Labels]:
    """Labels of a valid equation of two operands; those of an ellipsis are numbers."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    parts = given.split(",")
    counts = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True)]
    most = max([0, *(n for n, part in zip(counts, parts, strict=True) if "..." in part)])
    if not arrow:
        once = [x for x, n in Counter(given).items() if x.isalpha() and n == 1]
        result = "..." + "".join(sorted(once))

    def spread(part: str, count: int) -> Labels:
        before, dots, after = part.partition("...")
        return [*before, *(range(most - count, most) if dots else ()), *after]

    first, second = (spread(part, count) for part, count in zip(parts, counts, strict=True))
    return (first, second), spread(result, most)


def _matrix(node: Node, labels: Labels, kept: Labels, joined: Sequence[Labels]) -> Node:
    """`node` with the dims `kept`, and then one for each group of `joined` dims."""
    node = _permuted(node, labels, [*kept, *chain.from_iterable(joined)])
    at = len(kept)
    for group in joined:
        if len(group) > 1:
            node = add_call(node.graph, aten.flatten.using_ints, node, at, at + len(group) - 1)
        at += 1
    return node


def _permuted(node: Node, labels: Labels, order: Labels) -> Node:
    if list(labels) == list(order):
        return node
    return add_call(
        node.graph, aten.permute.default, node, [list(labels).index(each) for each in order]
    )


def _with_bias(program: ExportedProgram, product: Node) -> tuple[Node, Node | None]:
    """The sum of `product` and a bias, if that is its only use, and the bias; else `product`."""
    try:
        total = only_user(product, "a product")
        bias = other_factor(total, product) if total.target is aten.add.Tensor else None
    except UnmatchedError:
        return product, None
    fits = bias is not None and not total.kwargs and _is_bias(program, bias, product)
    return (total, bias) if fits else (product, None)


def _is_bias(program: ExportedProgram, node: object, product: Node) -> bool:
    """Whether `node` is a weight of the model with an element for each column of `product`."""
    bias, result = held(program, node), value(product)
    return bias is not None and bias[1].shape == result.shape[-1:] and bias[1].dtype == result.dtype
