"""What passes over ATen graphs ask of a node; what does not hold is why they do not match."""

from __future__ import annotations

import math
from collections.abc import Callable, Container

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from kvgraph.contract.dtypes import ACTIVATIONS
from kvgraph.kernels.variants import ALIGNMENT
from kvgraph.ops.torch_nodes import is_dense, row_stride

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten.type_as.default)
"""To another dtype, or to none other."""

VIEWS = (aten.view.default, aten.reshape.default)

KINDS = tuple(getattr(torch, name) for name in ACTIVATIONS)
"""dtypes of activations."""


class UnmatchedError(Exception):
    """Why a place is not what a pass rewrites. It never leaves the pass."""


def expect(holds: bool, why: str) -> None:
    if not holds:
        raise UnmatchedError(why)


def node_of(given: object, targets: Container[object], what: str) -> Node:
    """`given`, if it is a call of one of `targets`; `what` those are comes into the sentence."""
    if isinstance(given, Node) and given.target in targets:
        return given
    raise UnmatchedError(f"expected {what}, got {getattr(given, 'target', given)}")


def any_node(given: object, what: str) -> Node:
    if isinstance(given, Node):
        return given
    raise UnmatchedError(f"expected {what}, got {given}")


def only_user(node: Node, what: str) -> Node:
    """The one node that reads `node`; `what` it is comes into the sentence."""
    users = list(node.users)
    expect(len(users) == 1, f"expected one use of {what}, got {len(users)}")
    return users[0]


def other_factor(product: Node, factor: Node) -> Node:
    """The other one of two factors or terms."""
    others = [x for x in product.args if x is not factor]
    expect(len(others) == 1, f"expected two different operands of {product.name}")
    return any_node(others[0], f"a tensor in {product.name}")


def value(node: Node) -> torch.Tensor:
    """The fake tensor of what a node computes."""
    found = node.meta.get("val")
    assert isinstance(found, torch.Tensor), f"{node.name}: torch.export notes every value"
    return found


def require_rows(*nodes: Node) -> None:
    """Rows as kernels take them: of a tensor of their own, or parts of a larger one's."""
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
    """The fake result of an op over such rows: a tensor of its own."""
    return tensor if is_dense(tensor) else tensor.new_empty(tensor.shape)


def typed(node: Node) -> str:
    """dtype and dims of what a node computes: equal texts are equal types."""
    tensor = value(node)
    dims = ", ".join(map(str, tensor.shape))
    return f"{str(tensor.dtype).removeprefix('torch.')}[{dims}]"


def with_residual(node: Node) -> tuple[Node | None, Node]:
    """What is added to `node` where nothing else reads it, and the sum; else none, and `node`."""
    total = next(iter(node.users), node)
    if len(node.users) != 1 or total.target is not aten.add.Tensor or total.kwargs:
        return None, node
    others = [x for x in total.args if x is not node]
    other = others[0] if len(others) == 1 else None
    if isinstance(other, Node) and typed(other) == typed(node):
        return other, total
    return None, node


def erase_unused(node: Node) -> None:
    """Take `node`, which nothing reads, and what only it read out of the graph."""
    waiting = {node: None}
    while waiting:
        node, _ = waiting.popitem()
        if node.op == "call_function" and not node.users:
            waiting |= dict.fromkeys(node.all_input_nodes)
            node.graph.erase_node(node)


def add_call(
    graph: Graph, target: Callable[..., object], *args: Argument, **attributes: Argument
) -> Node:
    """A call at the graph's point of insertion, with its value."""
    node: Node = graph.call_function(target, args, attributes)
    node.meta["val"] = computed(node)
    return node


@torch.no_grad()
def computed(call: Node) -> object:
    """What a call gives, over the fake tensors of its operands."""
    assert callable(call.target)
    args = [map_arg(arg, lambda node: node.meta["val"]) for arg in call.args]
    named = {name: map_arg(arg, lambda node: node.meta["val"]) for name, arg in call.kwargs.items()}
    return call.target(*args, **named)


def cast(node: Node, dtype: torch.dtype) -> Node:
    """`node` in `dtype`, at the graph's point of insertion."""
    if value(node).dtype == dtype:
        return node
    return add_call(node.graph, torch.ops.aten._to_copy.default, node, dtype=dtype)
