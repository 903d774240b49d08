"""Replace complex numbers by pairs of real numbers, in a new last dim of 2.

Applies to rotary embeddings that are written as products of complex numbers (DeepSeek V2). Neither
exporters nor kernels support complex numbers. An operator without a rule here stays as it is, and
later checks refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import UnmatchedError, add_call, expect, value
from kvgraph.compiler.passes.operands import cast as cast_to

aten = torch.ops.aten
MOVES = (aten.alias, aten.clone, aten.contiguous, aten.detach)
AT_DIM = (aten.unsqueeze, aten.slice)
CASTS = (aten.to, aten._to_copy)
CHECK = aten._assert_tensor_metadata.default


def pair_complex(graph: Graph) -> PassReport:
    """Rewrite `graph` in place."""
    report = PassReport("pair_complex")
    pairs: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not _concerns(node):
            continue
        if node.target is CHECK:
            graph.erase_node(node)
            continue
        with graph.inserting_before(node):
            try:
                pairs[node] = _Pairs(graph, pairs).of(node)
            except UnmatchedError as why:
                report.unmatched.append(f"{node.name}: {why}")
                continue
        if node.target is aten.view_as_real.default:
            node.replace_all_uses_with(pairs[node])
        report.applied += 1
    for node in reversed(pairs):
        if not node.users:
            graph.erase_node(node)
    return report


def _concerns(node: Node) -> bool:
    return _is_complex(node) or any(map(_is_complex, node.all_input_nodes))


def _is_complex(node: Node) -> bool:
    found = node.meta.get("val")
    return isinstance(found, torch.Tensor) and found.is_complex()


class _Pairs:
    """Makes operators on pairs for operators on complex numbers, at the graph's insertion point."""

    def __init__(self, graph: Graph, known: dict[Node, Node]) -> None:
        self._graph = graph
        self._known = known

    def of(self, node: Node) -> Node:
        """The node with the pairs of `node`. UnmatchedError for an operator without a rule."""
        packet = getattr(node.target, "overloadpacket", None)
        args = cast(Sequence[Node], node.args)  # some operators have numbers among them
        if packet is aten.view_as_complex:
            return args[0]
        if packet is aten.polar:
            return self._polar(*args)
        if packet is aten.mul:
            return self._product(*args)
        source = self._known.get(args[0])
        if source is None:
            raise UnmatchedError(f"expected an operator on pairs, got {node.target}")
        if packet is aten.view_as_real:
            return source
        if packet in CASTS:
            expect(_is_complex(node), "expected a complex result")
            return cast_to(source, value(node).dtype.to_real())
        if packet in MOVES:
            return self._call(node.target, source, *args[1:], **node.kwargs)
        if packet in AT_DIM and len(args) > 1:
            dim = cast(int, args[1])
            return self._call(node.target, source, dim if dim >= 0 else dim - 1, *args[2:])
        raise UnmatchedError(f"expected an operator on pairs, got {node.target}")

    def _polar(self, size: Node, angle: Node) -> Node:
        parts = [
            self._times(size, self._call(function, angle))
            for function in (aten.cos.default, aten.sin.default)
        ]
        return self._call(aten.stack.default, parts, -1)

    def _product(self, one: Node, other: Node | complex) -> Node:
        if isinstance(other, int | float) and one in self._known:
            return self._call(aten.mul.Tensor, self._known[one], other)
        pairs = [self._known.get(factor) for factor in (one, other)]  # type: ignore[arg-type]
        if pairs[0] is None or pairs[1] is None:
            raise UnmatchedError("expected a product of two complex numbers, or with a real one")
        (a, b), (c, d) = (
            [self._call(aten.select.int, pair, -1, part) for part in (0, 1)] for pair in pairs
        )
        real = self._call(aten.sub.Tensor, self._times(a, c), self._times(b, d))
        imaginary = self._call(aten.add.Tensor, self._times(a, d), self._times(b, c))
        return self._call(aten.stack.default, [real, imaginary], -1)

    def _times(self, one: Node, other: Node) -> Node:
        return self._call(aten.mul.Tensor, one, other)

    def _call(self, target: object, *args: Argument, **attributes: Argument) -> Node:
        assert callable(target)
        return add_call(self._graph, target, *args, **attributes)
