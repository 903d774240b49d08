"""Turn products with a weight of the model into linear layers, for the passes that pack weights.

`x @ weight` with a weight stored as `[inputs, outputs]` (transformers' Conv1D) and `x @ weight.T`
become aten.linear, together with a bias that is added. A weight `[inputs, outputs]` is an operand
of aten.linear through a transpose.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.passes.operands import (
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
PRODUCTS = (aten.matmul.default, aten.mm.default, aten.addmm.default)
TRANSPOSES = (
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.transpose.int,
    aten.permute.default,
)


def turn_products(program: ExportedProgram) -> list[str]:
    """Rewrite `program` in place. Return a sentence for each product with a weight that stays."""
    unmatched = []
    for node in list(program.graph.nodes):
        if node.target in PRODUCTS and any(_of_weight(program, x) for x in node.args):
            try:
                _turn(program, node)
            except UnmatchedError as why:
                unmatched.append(f"{node.name}: {why}, in {node.target.name()}")
    return unmatched


def weight_of(program: ExportedProgram, node: object) -> tuple[str, torch.Tensor, bool] | None:
    """Name and tensor of a weight of the model, and whether `node` is its transpose.

    None if `node` is neither a weight nor the transpose of a matrix.
    """
    if (found := held(program, node)) is not None:
        return *found, False
    if isinstance(node, Node) and _is_transpose(node):
        found = held(program, node.args[0])
    return None if found is None else (*found, True)


def _is_transpose(node: Node) -> bool:
    """Whether `node` swaps the two dims of a matrix."""
    if node.target not in TRANSPOSES:
        return False
    made, given = value(node), value(any_node(node.args[0], "a matrix"))
    turned = given.shape[::-1], given.stride()[::-1]
    return made.dim() == 2 and (made.shape, made.stride()) == turned


def _of_weight(program: ExportedProgram, node: object) -> bool:
    """Whether `node` is a weight of the model, or is computed directly from one."""
    source = node.args[0] if isinstance(node, Node) and node.args else node
    return any(held(program, x) is not None for x in (node, source))


def _turn(program: ExportedProgram, product: Node) -> None:
    *added, rows, factor = product.args
    x, columns = any_node(rows, "rows"), any_node(factor, "a weight")
    found = weight_of(program, columns)
    expect(found is not None, "expected a weight of the model at the right, got a computed one")
    assert found is not None
    expect(value(columns).dim() == 2, f"expected a matrix, got {value(columns).dim()} dims")
    expect(held(program, x) is None and value(x).dim() > 1, "expected rows at the left")
    expect(not product.kwargs, "expected a sum without factors")
    last, bias = product, added[0] if added else None
    if added:
        expect(_is_bias(program, bias, product), "expected a bias of the model")
    else:
        last, bias = _with_bias(program, product)
    graph = product.graph
    with graph.inserting_before(last):
        _, _, is_transpose = found
        weight = columns.args[0] if is_transpose else add_call(graph, aten.t.default, columns)
        layer = add_call(graph, aten.linear.default, x, weight, bias)
    last.replace_all_uses_with(layer)
    erase_unused(last)


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
