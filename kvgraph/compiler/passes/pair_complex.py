"""Replace complex numbers by pairs of real numbers, in a new last dim of 2.

Applies to rotary embeddings that are written as products of complex numbers (DeepSeek V2, and
Llama's own code, which reads a table of them). Neither exporters nor kernels support complex
numbers. An operator without a rule here stays as it is, and later checks refuse it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import CHECK, UnmatchedError, add_call, expect, value
from kvgraph.compiler.passes.operands import cast as cast_to
from kvgraph.compiler.passes.parameters import add_buffer, drop_held, held

aten = torch.ops.aten
MOVES = (aten.alias, aten.clone, aten.contiguous, aten.detach, aten.index)
AT_DIM = (aten.unsqueeze, aten.slice, aten.select, aten.index_select, aten.squeeze)
AT_DIMS = (aten.transpose, aten.flatten)
"""Operators with two dims as arguments."""
SHAPED = (aten.view, aten.reshape, aten._unsafe_view, aten.expand)
PARTS = {aten.real: 0, aten.imag: 1}
CASTS = (aten.to, aten._to_copy)


def pair_complex(program: ExportedProgram) -> PassReport:
    """Rewrite `program` in place."""
    graph, report = program.graph, PassReport("pair_complex")
    pairs: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if node.op == "placeholder" and _is_complex(node):
            table = held(program, node)
            if table is not None and not isinstance(table[1], FakeTensor):
                real = torch.view_as_real(table[1].detach().resolve_conj()).contiguous()
                pairs[node] = add_buffer(program, f"kvgraph.pairs_{len(pairs)}", real)
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
        if not _is_complex(node):
            node.replace_all_uses_with(pairs[node])
        report.applied += 1
    for node in reversed(pairs):
        if not node.users and node.op == "placeholder":
            drop_held(program, node)
        elif not node.users:
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
        """The node with the pairs of `node`, or with its real numbers. UnmatchedError for an
        operator without a rule."""
        packet = getattr(node.target, "overloadpacket", None)
        args = cast(Sequence[Node], node.args)  # some operators have numbers among them
        if packet is aten.view_as_complex:
            return args[0]
        if packet is aten.polar:
            return self._polar(*args)
        if packet is aten.complex:
            expect(value(args[0]).shape == value(args[1]).shape, "expected parts of one shape")
            return self._call(aten.stack.default, list(args), -1)
        if packet is aten.mul:
            return self._product(*args)
        source = self._known.get(args[0])
        if source is None:
            raise UnmatchedError(f"expected an operator on pairs, got {node.target}")
        if packet is aten.view_as_real:
            return source
        if packet in PARTS:
            return self._call(aten.select.int, source, -1, PARTS[packet])
        if packet in CASTS:
            expect(_is_complex(node), "expected a complex result")
            return cast_to(source, value(node).dtype.to_real())
        return self._moved(node, packet, source, args[1:])

    def _moved(self, node: Node, packet: object, source: Node, rest: Sequence[Argument]) -> Node:
        """Apply an operator that moves pairs as it moves numbers."""
        if packet is aten.embedding:  # takes tables of rows alone
            return self._call(aten.index.Tensor, source, [rest[0]])
        dims = 1 if packet in AT_DIM else 2 if packet in AT_DIMS else 0
        if packet in SHAPED and isinstance(rest[0], Sequence):
            rest = [[*rest[0], 2], *rest[1:]]
        elif dims:
            assert isinstance(node.target, OpOverload)
            left_out = node.target._schema.arguments[1 + len(rest) : 1 + dims]
            rest = [*rest, *(each.default_value for each in left_out)]
            expect(all(isinstance(dim, int) for dim in rest[:dims]), "expected dims by number")
            expect(value(cast(Node, node.args[0])).dim() > 0, "expected a tensor with dims")
            at = [dim if dim >= 0 else dim - 1 for dim in cast(Sequence[int], rest[:dims])]
            rest = [*at, *rest[dims:]]
        elif packet not in MOVES:
            raise UnmatchedError(f"expected an operator on pairs, got {node.target}")
        return self._call(node.target, source, *rest, **node.kwargs)

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
