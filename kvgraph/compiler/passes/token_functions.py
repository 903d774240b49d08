"""Find values of a program that are functions of a token's position and of constants alone.

Decision: the effect of an operator on tokens is found by running it on two tokens. Operators that
only move elements run on numbers that say which token an element belongs to. All others must keep
to the tokens of their operands, or are refused. So shapes, layouts and axes need no rules here.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from itertools import accumulate, product
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import Argument, map_arg

from kvgraph.compiler.passes.operands import UnmatchedError, expect, value
from kvgraph.compiler.passes.parameters import inputs_of
from kvgraph.contract.signature import GraphSignature

aten = torch.ops.aten
TOKENS = 2
"""Number of tokens on which operators are run."""

CASTS = (aten.to, aten.type_as, aten._to_copy)
LAYOUT = (
    *(aten.view, aten.reshape, aten.flatten, aten.unflatten, aten._unsafe_view),
    *(aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand, aten.t),
    *(aten.slice, aten.select, aten.chunk, aten.split, aten.split_with_sizes, aten.unbind),
    *(aten.cat, aten.stack, aten.repeat_interleave, aten.repeat, operator.getitem),
    *(aten.slice_scatter, aten.select_scatter, aten.copy),
    *(aten.alias, aten.clone, aten.contiguous, aten.detach, aten.lift_fresh_copy),
)
"""Operators that move elements and compute nothing."""
VIEWS = (aten.view, aten._unsafe_view)
"""Operators of LAYOUT that need compatible strides."""

ELEMENTWISE = (
    *CASTS,
    *(aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.pow, aten.neg, aten.reciprocal),
    *(aten.cos, aten.sin, aten.exp, aten.log, aten.sqrt, aten.rsqrt, aten.floor, aten.clamp),
    *(aten.where, aten.gt, aten.ge, aten.lt, aten.le, aten.minimum, aten.maximum),
)
OUTER = (aten.matmul, aten.bmm, aten.mm)
"""Products that are accepted as outer products of a column by a row."""

REDUCED = (
    *(aten.sum, aten.mean, aten.amax, aten.amin, aten.max, aten.min, aten.prod, aten.argmax),
    *(aten.argmin, aten.var, aten.std, aten.var_mean, aten.norm, aten.linalg_vector_norm),
    *(aten.logsumexp, aten.any, aten.all, aten.count_nonzero, aten.median),
)
BATCH_NORM = (aten._native_batch_norm_legit_no_training,)
"""Batch norm in its eval form, by stored statistics: it does not mix tokens."""

CREATED = (aten.arange, aten.full, aten.ones, aten.zeros, aten.scalar_tensor, aten.linspace)
ROW_OPS = (
    *(*CASTS, aten.arange, aten.unsqueeze, aten.slice, aten.sum, aten.sub),
    *(aten.ge, aten.gt, aten.le, aten.lt, aten.bucketize, aten.searchsorted),
)
ADD, SUB = aten.add, aten.sub


def packet(node: Node) -> Any:
    """The operator of a call, without its overload."""
    return getattr(node.target, "overloadpacket", node.target)


class TokenFunctions:
    """Finds functions of positions among the nodes that `program` has now."""

    def __init__(self, program: ExportedProgram, signature: GraphSignature) -> None:
        graph_signature = program.graph_signature
        nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        inputs = {symbol.name: node for node, symbol in inputs_of(program, signature).items()}
        self._offsets = inputs["input_row_offsets"]
        self._lengths = [x for name, x in inputs.items() if name.endswith("cache_lengths")]
        self._count = str(value(inputs["tokens"]).shape[0])
        stored = {**program.constants, **program.state_dict}
        constants = {
            **graph_signature.inputs_to_buffers,
            **graph_signature.inputs_to_lifted_tensor_constants,
        }
        self._constants = {
            nodes[name]: stored[target]
            for name, target in constants.items()
            if isinstance(stored[target], torch.Tensor)
            and not isinstance(stored[target], FakeTensor)
            and target not in graph_signature.buffers_to_mutate.values()
        }
        self._positions: dict[Node, None] = {}
        self._expressions: dict[Node, str] = {}
        self._rows: dict[Node, bool] = {}
        self._found: dict[Node, torch.Tensor | str] = {}

    def depends_on_token(self, node: Node) -> bool:
        """Whether `node` is a function of positions, and neither of constants alone nor of anything
        else."""
        try:
            return bool((self.tokens(node) >= 0).any())
        except UnmatchedError:
            return False

    def tokens(self, node: Node) -> torch.Tensor:
        """The token from whose position each element of `node` is computed, in a step of two
        tokens; -1 for constants. UnmatchedError if it is computed from anything else."""
        if node not in self._found:
            try:
                self._found[node] = self._tokens(node)
            except UnmatchedError as why:
                self._found[node] = str(why)
        found = self._found[node]
        if isinstance(found, str):
            raise UnmatchedError(found)
        return found

    def evaluate(self, node: Node, positions: int) -> torch.Tensor:
        """The value of `node` in a step with tokens at positions 0 to `positions` - 1."""
        known: dict[Node, Any] = dict(self._constants)
        for position in self._positions:
            known[position] = torch.arange(positions, dtype=value(position).dtype)
        with torch.no_grad():
            result: torch.Tensor = self._run(node, known, positions)
        return result

    def expression(self, node: Node) -> str:
        """A hash that is equal for nodes that compute the same from positions and equal constants.

        Models may compute the same embedding once for q and once for k, or in every layer.
        """
        if node not in self._expressions:
            constant = self._constants.get(node)
            if node in self._positions:
                said = "positions"
            elif constant is not None:
                content = constant.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
                said = f"{constant.dtype} {constant.shape} {sha256(content).hexdigest()}"
            else:
                given = map_arg((node.args, dict(node.kwargs)), self._said)
                said = f"{node.target} {given}"
            self._expressions[node] = sha256(said.encode()).hexdigest()
        return self._expressions[node]

    def _said(self, node: Node) -> str:
        given = node.meta.get("val")
        return str(given) if isinstance(given, torch.SymInt) else self.expression(node)

    def shape(self, node: Node, tokens: int) -> list[int]:
        """The shape of a node's result in a step of `tokens` tokens."""
        return [self._extent(extent, tokens) for extent in value(node).shape]

    def moved(self, node: Node, operand: Callable[[Node], Argument]) -> Any:
        """Run a node of LAYOUT in a step of two tokens, over `operand(x)` for each operand x."""

        def load(x: Node) -> Argument:
            given = x.meta.get("val")
            symbolic = isinstance(given, torch.SymInt)
            return self._extent(given, TOKENS) if symbolic else operand(x)

        target: Any = node.target
        if packet(node) in VIEWS:  # numbers are not laid out as the value is
            expect(target is not aten.view.dtype, f"{node.name}: expected elements that stay whole")
            target = aten.reshape.default
        return target(*map_arg(node.args, load), **map_arg(node.kwargs, load))

    def _tokens(self, node: Node) -> torch.Tensor:
        if node in self._constants:
            return torch.full(self._constants[node].shape, -1)
        if self._is_position(node):
            self._positions[node] = None
            return torch.arange(TOKENS)
        kind = packet(node)
        if kind in LAYOUT:
            moved: torch.Tensor = self.moved(node, self.tokens)
            return moved
        if kind in ELEMENTWISE:
            given = node.all_input_nodes[:1] if kind in CASTS else node.all_input_nodes
            return _joined(node, [self.tokens(x) for x in given])
        if kind in OUTER:
            column, row = (self.tokens(x) for x in node.all_input_nodes)
            expect(column.shape[-1] == 1, f"{node.name}: expected an outer product")
            return _joined(node, [column, row])
        if kind in CREATED and not node.all_input_nodes:
            target: Any = node.target
            return torch.full(target(*node.args, **node.kwargs).shape, -1)
        got = node.target if node.op == "call_function" else f"the {node.op} {node.target}"
        raise UnmatchedError(
            f"{node.name}: expected a function of each token's own position and of constants, "
            f"got {got}"
        )

    def _is_position(self, node: Node) -> bool:
        """Whether `node` is `arange(T) - row_offsets[row] + cache_lengths[row]`, the position that
        kernels compute."""
        if packet(node) not in (ADD, SUB) or value(node).dtype not in (torch.int32, torch.int64):
            return False
        found = Counter[str]()
        for sign, term in _terms(node, 1):
            found[self._term(term)] += sign
        terms = {name: factor for name, factor in found.items() if factor or not name}
        return terms == {"index": 1, "offset": -1, "length": 1}

    def _term(self, node: Node) -> str:
        if packet(node) is aten.arange:
            counts = [str(x.meta["val"]) for x in node.all_input_nodes]
            bounds = [x for x in node.args if not isinstance(x, Node)]
            return "index" if counts == [self._count] and bounds in ([], [0], [0, 1]) else ""
        if packet(node) is not aten.index:
            return ""
        source, rows = node.args
        row = rows[0] if isinstance(rows, list | tuple) and len(rows) == 1 else None
        if not isinstance(row, Node) or not self._is_row(row):
            return ""
        return "offset" if source is self._offsets else "length" if source in self._lengths else ""

    def _is_row(self, node: Node) -> bool:
        """Whether `node` computes the row of each token. It is run on all batches of three rows
        with 0 to 2 tokens each; only operators of ROW_OPS are accepted."""
        if node not in self._rows:
            self._rows[node] = all(
                self._finds_rows(node, counts) for counts in product(range(3), repeat=3)
            )
        return self._rows[node]

    def _finds_rows(self, node: Node, counts: tuple[int, ...]) -> bool:
        offsets = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
        try:
            found = self._run(node, {self._offsets: offsets}, sum(counts), ROW_OPS)
        except UnmatchedError:
            return False
        expected = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        return found.shape == expected.shape and bool((found == expected).all())

    def _run(
        self, node: Node, known: dict[Node, Any], tokens: int, allowed: tuple[Any, ...] = ()
    ) -> Any:
        """The value of `node`, given values of `known` nodes.

        `allowed`: operators that may be run; empty: all. UnmatchedError for any other.
        """
        if node not in known:
            given = node.meta.get("val")
            if isinstance(given, torch.SymInt):
                return self._extent(given, tokens)
            legal = node.op == "call_function" and (not allowed or packet(node) in allowed)
            expect(legal, f"{node.name}: expected another operator, got {node.target}")

            def load(x: Node) -> Any:
                return self._run(x, known, tokens, allowed)

            target: Any = node.target
            known[node] = target(*map_arg(node.args, load), **map_arg(node.kwargs, load))
        return known[node]

    def _extent(self, extent: Any, tokens: int) -> int:
        if isinstance(extent, int):
            return extent
        expect(str(extent) == self._count, f"expected a static extent or all tokens, got {extent}")
        return tokens


def _joined(node: Node, parts: list[torch.Tensor]) -> torch.Tensor:
    joined = torch.tensor(-1)
    for part in parts:
        a, b = torch.broadcast_tensors(joined, part)
        one = bool(((a == b) | (a < 0) | (b < 0)).all())
        expect(one, f"{node.name}: expected a function of one token, got one of several")
        joined = torch.maximum(a, b)
    return joined


def _terms(node: Node, sign: int) -> list[tuple[int, Node]]:
    """The terms of a sum with their signs. Casts are skipped: positions fit every integer type."""
    if packet(node) in CASTS and isinstance(node.args[0], Node):
        return _terms(node.args[0], sign)
    if packet(node) in (ADD, SUB) and len(node.args) == 2 and not node.kwargs:
        first, second = node.args
        if isinstance(first, Node) and isinstance(second, Node):
            other = sign if packet(node) is ADD else -sign
            return _terms(first, sign) + _terms(second, other)
    return [(sign, node)]
