"""Find rotary embeddings in a graph, however they are written, by tracing each element of a head.

Decision: the operators between a projection and an attention are run once, in a step of two
tokens, on the numbers (ids) of elements instead of their values. A value is a sum of terms; each
term is an input element times a table entry, or times 1. The result is compared with the definition
of a rotation (RoFormer, section 3.4.2). So no spelling needs a rule: halves by slices and `cat`, by
chunks and differences, pairs by `stack`, heads after tokens or before them.

Shapes: T tokens (two), N heads, D head_dim, R rotary_dim.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import Argument

from kvgraph.compiler.passes.operands import UnmatchedError, expect, value
from kvgraph.compiler.passes.token_functions import (
    CASTS,
    ELEMENTWISE,
    LAYOUT,
    OUTER,
    TOKENS,
    TokenFunctions,
    packet,
)
from kvgraph.ops._update_and_attend import ROPE_HALVES, ROPE_INTERLEAVED

aten = torch.ops.aten
ADD, SUB, MUL, NEG = aten.add, aten.sub, aten.mul, aten.neg

Term = tuple[Any, Any]
"""A pair of tensors: ids of elements (0: none) and ids of factors (1: no factor; negative: the term
is subtracted). If an operator returns several results, a pair of tuples of tensors."""


@dataclass(frozen=True)
class Columns:
    """The column of `table [.., T, W]` that holds the factor of each rotated element of a head.

    Tables with equal `expression` have equal values, even if they are different nodes.
    """

    table: Node = field(compare=False)
    expression: str
    columns: tuple[int, ...]


@dataclass(frozen=True)
class Rotation:
    """A rotation of `source`; its dims in the order `dims` are ones, then T, N, D."""

    source: Node
    dims: tuple[int, ...]
    style: int
    cos: Columns
    sin: Columns

    @property
    def turn(self) -> tuple[int, Columns, Columns]:
        """The style and the factors, which must be equal for q and k."""
        return self.style, self.cos, self.sin


def find_rotation(operand: Node, functions: TokenFunctions) -> Rotation:
    """The rotation that computes `operand [T, N, D]`. UnmatchedError if there is none."""
    trace = _Trace(functions, value(operand).dtype)
    terms = trace.terms(operand)
    if not any((factors.abs() > 1).any() for _, factors in terms):
        _explain(operand, functions)
        raise UnmatchedError(
            f"expected a rotation by the cos and sin of positions, got {_computed(operand).target}"
        )
    whole = _Sum(
        *(torch.stack(torch.broadcast_tensors(*part)) for part in zip(*terms, strict=True))
    )
    reasons: list[str] = []
    for source, dims, elements in trace.candidates(whole.factors.shape[1:]):
        try:
            return _rotation(source, dims, elements, whole, trace)
        except UnmatchedError as why:
            reasons.append(str(why))
    raise UnmatchedError(reasons[0] if reasons else "expected one tensor that is rotated, got none")


def _explain(operand: Node, functions: TokenFunctions) -> None:
    """Raise UnmatchedError if `operand` is computed from a cos or sin that is no function of
    positions alone. Only operators that a rotation may have are followed."""
    near, waiting = {operand}, [operand]
    while waiting:
        node = waiting.pop()
        if packet(node) in (aten.cos, aten.sin):
            functions.tokens(node)
        if packet(node) in (*LAYOUT, *ELEMENTWISE, *OUTER):
            waiting += [x for x in node.all_input_nodes if x not in near]
            near |= set(node.all_input_nodes)


def _computed(node: Node) -> Node:
    """The node that computed the elements of `node`, before they were only moved."""
    while packet(node) in LAYOUT and isinstance(node.args[0], Node):
        node = node.args[0]
    return node


class _Trace:
    """Runs the operators that compute one operand, on ids of elements and factors. Ids are given in
    the order in which they are found."""

    def __init__(self, functions: TokenFunctions, dtype: torch.dtype) -> None:
        self._functions = functions
        self._dtype = dtype
        self._known: dict[Node, list[Term]] = {}
        self._next_element, self._next_factor = 1, 2
        self._tables: dict[Node, int] = {}

    def candidates(self, shape: torch.Size) -> Iterator[tuple[Node, tuple[int, ...], torch.Tensor]]:
        """Values that may be what is rotated: node, order of dims, and ids of elements.

        They have the operand's dtype and no factors, and come in graph order. Their dims in that
        order are ones, then `shape`.
        """
        for node in sorted(self._known):
            bare = _is_tensor(node) and _is_bare(self._known[node])
            if not bare or value(node).dtype != self._dtype:
                continue
            elements = self._known[node][0][0]
            for dims in permutations(range(elements.dim())):
                found = elements.permute(dims)
                ones = found.dim() - len(shape)
                if ones >= 0 and found.shape == (1,) * ones + tuple(shape):
                    yield node, dims, found.reshape(shape)

    def columns(self, factors_TNR: torch.Tensor) -> Columns:
        """The columns of the one table that all these factors come from.

        UnmatchedError unless each token uses its own row, and all heads use the same columns.
        """
        least = int(factors_TNR.min())
        started = [table for table, first in self._tables.items() if first <= least]
        table = max(started, key=lambda table: self._tables[table])
        width = self._functions.shape(table, TOKENS)[-1]
        row_T11 = torch.arange(TOKENS)[:, None, None] * width
        columns_TNR = factors_TNR - self._tables[table] - row_T11
        same = bool((columns_TNR == columns_TNR[:1, :1]).all())
        inside = bool(((columns_TNR >= 0) & (columns_TNR < width)).all())
        expect(same and inside, "expected one row of factors for each token, equal for all heads")
        expression = self._functions.expression(table)
        return Columns(table, expression, tuple(columns_TNR[0, 0].tolist()))

    def terms(self, node: Node) -> list[Term]:
        if node not in self._known:
            self._known[node] = self._terms(node) or self._elements(node)
        return self._known[node]

    def _terms(self, node: Node) -> list[Term]:
        """Terms of the result of an operator that a rotation may have; empty for any other."""
        kind = packet(node)
        given = [x for x in node.args if isinstance(x, Node)]
        if kind in LAYOUT:
            part_of_other = kind is operator.getitem and packet(given[0]) not in LAYOUT
            return [] if part_of_other else self._moved(node)
        if value(node).dtype not in (torch.float32, self._dtype) or any(map(_is_extent, given)):
            return []
        if kind in CASTS:
            return self.terms(given[0])
        if kind is NEG:
            return _negative(self.terms(given[0]))
        if len(given) != 2 or len(node.args) != 2 or node.kwargs:
            return []
        if kind is MUL:
            return self._product(given)
        if kind in (ADD, SUB):
            first, second = (self.terms(x) for x in given)
            if not (_is_bare(first) and _is_bare(second)):
                return first + (second if kind is ADD else _negative(second))
        return []

    def _product(self, given: list[Node]) -> list[Term]:
        tables = [x for x in given if self._functions.depends_on_token(x)]
        if len(tables) != 1:
            return []
        factors = self._factors(tables[0])
        terms = self.terms(given[1] if given[0] is tables[0] else given[0])
        bare = all(bool((c.abs() <= 1).all()) for _, c in terms)
        expect(bare, "expected one factor of each element, got a product of several")
        return [(x + torch.zeros_like(factors), c * factors) for x, c in terms]

    def _factors(self, node: Node) -> torch.Tensor:
        """Ids of a table's entries. Views and casts of a table have the ids of that table."""
        sources = [x for x in node.all_input_nodes if not _is_extent(x)]
        if packet(node) in CASTS:
            return self._factors(sources[0])
        if packet(node) in LAYOUT and all(map(self._is_table, sources)):
            moved: torch.Tensor = self._functions.moved(node, self._factors)
            return moved
        tokens = self._functions.tokens(node)
        rows = tokens.reshape(-1, tokens.shape[-1])
        whole = rows.shape[0] == TOKENS and bool((rows == torch.arange(TOKENS)[:, None]).all())
        expect(whole, f"{node.name}: expected one row of factors for each token")
        if node not in self._tables:
            self._tables[node] = self._next_factor
            self._next_factor += tokens.numel()
        return (self._tables[node] + torch.arange(tokens.numel())).reshape(tokens.shape)

    def _is_table(self, node: Node) -> bool:
        return _is_tensor(node) and self._functions.depends_on_token(node)

    def _moved(self, node: Node) -> list[Term]:
        parts = {x: self.terms(x) for x in node.all_input_nodes if not _is_extent(x)}
        count = max((len(terms) for terms in parts.values()), default=0)

        def run(term: int, half: int) -> Any:
            def load(x: Node) -> Argument:
                terms = parts[x]
                return terms[term][half] if term < len(terms) else torch.zeros_like(terms[0][half])

            return self._functions.moved(node, load)

        return [(run(i, 0), run(i, 1)) for i in range(count)]

    def _elements(self, node: Node) -> list[Term]:
        shape = self._functions.shape(node, TOKENS)
        count = torch.Size(shape).numel()
        numbers = torch.arange(self._next_element, self._next_element + count).reshape(shape)
        self._next_element += count
        return [(numbers, torch.ones_like(numbers))]


@dataclass(frozen=True)
class _Sum:
    """Ids of the elements and of the factors of an operand's terms, `[terms, T, N, D]` each."""

    elements: torch.Tensor
    factors: torch.Tensor


def _rotation(
    source: Node, dims: tuple[int, ...], elements_TND: torch.Tensor, whole: _Sum, trace: _Trace
) -> Rotation:
    own = whole.elements == elements_TND
    other = (whole.elements != 0) & ~own
    once = bool((own.sum(0) == 1).all()) and bool((other.sum(0) <= 1).all())
    expect(once, "expected each element with at most one partner")
    cos_TND, sin_TND = ((whole.factors * part).sum(0) for part in (own, other))
    partners_TND = (whole.elements * other).sum(0)
    rotary = int((cos_TND[0, 0].abs() > 1).sum())
    rest = slice(rotary, None)
    still = bool((cos_TND[..., rest] == 1).all()) and not bool(partners_TND[..., rest].any())
    expect(still, f"expected the first {rotary} elements of each head rotated, the others not")
    for style, index, sign in _pairs(rotary):
        if torch.equal(partners_TND[..., :rotary], elements_TND[..., index]):
            cos, sin = cos_TND[..., :rotary], sin_TND[..., :rotary] * sign
            expect(bool((cos > 1).all() and (sin > 1).all()), "expected a turn in one direction")
            return Rotation(source, dims, style, trace.columns(cos), trace.columns(sin))
    raise UnmatchedError("expected pairs of halves or of neighbours, got others")


def _pairs(rotary: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each style with the index of each element's partner, and the sign of its sine."""
    index = torch.arange(rotary)
    half = rotary // 2
    yield ROPE_HALVES, (index + half) % max(rotary, 1), torch.where(index < half, -1, 1)
    yield ROPE_INTERLEAVED, index ^ 1, torch.where(index % 2 == 0, -1, 1)


def _is_bare(terms: list[Term]) -> bool:
    return len(terms) == 1 and bool((terms[0][1] == 1).all())


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _is_extent(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.SymInt)


def _negative(terms: list[Term]) -> list[Term]:
    return [(x, -c) for x, c in terms]
