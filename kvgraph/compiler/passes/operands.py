"""Helpers for passes over ATen graphs. A condition that does not hold raises UnmatchedError, which
the pass reports."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from kvgraph.contract.dtypes import ACTIVATIONS
from kvgraph.kernels.variants import ALIGNMENT
from kvgraph.ops.torch_nodes import is_dense, row_stride

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten.type_as.default)
"""Operators that cast to another dtype, or to the same one."""

VIEWS = (aten.view.default, aten.reshape.default)

CHECK = aten._assert_tensor_metadata.default
"""Operator that torch.export adds to check a tensor's dtype; it computes nothing."""

KINDS = tuple(getattr(torch, name) for name in ACTIVATIONS)
"""dtypes of activations."""


class UnmatchedError(Exception):
    """A place in a graph does not match a pass; the message says why. It never leaves the pass."""


def expect(holds: bool, why: str) -> None:
    if not holds:
        raise UnmatchedError(why)


def expect_dtype(found: torch.dtype, kinds: Collection[torch.dtype]) -> None:
    expect(found in kinds, f"expected {' or '.join(map(str, kinds))}, got {found}")


def node_of(given: object, targets: Container[object], what: str) -> Node:
    """`given`, if it is a call of one of `targets`; else UnmatchedError that names `what`."""
    if isinstance(given, Node) and given.target in targets:
        return given
    raise UnmatchedError(f"expected {what}, got {getattr(given, 'target', given)}")


def any_node(given: object, what: str) -> Node:
    if isinstance(given, Node):
        return given
    raise UnmatchedError(f"expected {what}, got {given}")


def only_user(node: Node, what: str) -> Node:
    """The only node that reads `node`. UnmatchedError, with `what` in it, if there are others."""
    users = list(node.users)
    expect(len(users) == 1, f"expected one use of {what}, got {len(users)}")
    return users[0]


def other_factor(product: Node, factor: Node) -> Node:
    """The operand of a product or sum of two that is not `factor`."""
    others = [x for x in product.args if x is not factor]
    expect(len(others) == 1, f"expected two different operands of {product.name}")
    return any_node(others[0], f"a tensor in {product.name}")


def value(node: Node) -> torch.Tensor:
    """The fake tensor of a node's result."""
    found = node.meta.get("val")
    assert isinstance(found, torch.Tensor), f"{node.name}: torch.export notes every value"
    return found


def require_rows(*nodes: Node) -> None:
    """Raise UnmatchedError unless kernels can read the rows of `nodes`.

    A tensor is dense, or its rows are parts of a larger tensor's rows, equally far apart and
    aligned to ALIGNMENT bytes.
    """
    for node in nodes:
        tensor = value(node)
        if is_dense(tensor):
            continue
        stride, offset = row_stride(tensor), tensor.storage_offset()
        expect(
            stride is not None and isinstance(offset, int),
            f"expected rows that are equally far apart, got {node.name} of strides "
            f"{tuple(tensor.stride())}",
        )
        assert stride is not None
        step = math.gcd(stride, offset) * tensor.element_size()
        expect(
            step % ALIGNMENT == 0,
            f"expected rows at multiples of {ALIGNMENT} bytes, got {node.name} at {step}",
        )


def own_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The fake result of an op over such rows: a dense tensor of the same shape."""
    return tensor if is_dense(tensor) else tensor.new_empty(tensor.shape)


def typed(node: Node) -> str:
    """dtype and dims of a node's result as text; equal texts mean equal types."""
    tensor = value(node)
    dims = ", ".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{dims}]"


def with_residual(node: Node) -> tuple[Node | None, Node]:
    """The residual that is added to `node`, and the sum.

    `(None, node)` if `node` has any other use, or the types differ.
    """
    total = next(iter(node.users), node)
    if len(node.users) != 1 or total.target is not aten.add.Tensor or total.kwargs:
        return None, node
    others = [x for x in total.args if x is not node]
    other = others[0] if len(others) == 1 else None
    if isinstance(other, Node) and typed(other) == typed(node):
        return other, total
    return None, node


def erase_unused(node: Node) -> None:
    """Remove `node`, if nothing reads it, and then each operand that nothing else reads."""
    waiting = {node: None}
    while waiting:
        node, _ = waiting.popitem()
        if node.op == "call_function" and not node.users:
            waiting |= dict.fromkeys(node.all_input_nodes)
            node.graph.erase_node(node)


def add_call(
    graph: Graph, target: Callable[..., object], *args: Argument, **attributes: Argument
) -> Node:
    """Add a call at the graph's insertion point, with its fake value."""
    node: Node = graph.call_function(target, args, attributes)
    node.meta["val"] = computed(node)
    return node


@torch.no_grad()
def computed(call: Node) -> object:
    """The result of a call over the fake values of its operands."""
    assert callable(call.target)
    args = [map_arg(arg, lambda node: node.meta["val"]) for arg in call.args]
    named = {name: map_arg(arg, lambda node: node.meta["val"]) for name, arg in call.kwargs.items()}
    return call.target(*args, **named)


def rounded(node: Node, dtype: torch.dtype) -> Node:
    """The cast of `node` to `dtype` if that is its only user and `node` has another dtype; else
    `node`."""
    user = next(iter(node.users), node)
    is_cast = user.target in CASTS and value(user).dtype == dtype != value(node).dtype
    return user if len(node.users) == 1 and is_cast else node


def cast(node: Node, dtype: torch.dtype) -> Node:
    """`node` in `dtype`: itself, or a new cast at the graph's insertion point."""
    if value(node).dtype == dtype:
        return node
    return add_call(node.graph, torch.ops.aten._to_copy.default, node, dtype=dtype)
