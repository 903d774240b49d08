"""Compute from which tokens each element of a program's values is computed.

A program is followed operator by operator over a step of a few tokens. The labels of a value are
the lowest and the highest token that each of its elements depends on; an element that depends on
no token has an empty range. Operators that move elements run on the labels themselves. The others
are described by the dims that they reduce, sort or contract. An operator without a rule counts as
one that mixes all its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from kvgraph.compiler.passes.label_kinds import (
    ALONG,
    ELEMENTWISE,
    GROUP_NORMS,
    MADE,
    MOVED,
    NORMS,
    SAME,
    SIZES,
    VIEWS,
)
from kvgraph.compiler.passes.label_puts import put
from kvgraph.compiler.passes.labels import NONE, Labels, Value, aligned, compacted, join, nothing
from kvgraph.compiler.passes.token_functions import BATCH_NORM, REDUCED, packet
from kvgraph.ops import torch_ops

aten = torch.ops.aten
MOST_KNOWN = 1 << 16
"""Most elements of an index that is computed at compile time."""


class TokenLabels:
    """Labels of a graph's nodes, followed in order. `extents`: values of the symbols in shapes."""

    def __init__(self, extents: Mapping[object, int]) -> None:
        self._extents = extents
        self._labels: dict[Node, Value] = {}
        self._known: dict[Node, Any] = {}
        self.unknown: set[Node] = set()  # calls without a rule that fits

    def __getitem__(self, node: Node) -> Labels:
        found = self._labels[node]
        return join([part.whole() for part in found]) if isinstance(found, list) else found

    def mixes(self, node: Node) -> bool:
        """Whether an element of the node's value depends on several tokens."""
        found = self._labels[node]
        return any(x.is_mixed for x in (found if isinstance(found, list) else [found]))

    def set(self, node: Node, value: Value, known: torch.Tensor | None = None) -> None:
        self._labels[node] = value
        if known is not None:
            self._known[node] = known

    def shape(self, node: Node) -> list[int]:
        """The shape of a node's value in the step that is followed."""
        return self.shape_of(node.meta["val"])

    def follow(self, node: Node) -> None:
        """Compute the labels of a call from the labels of its operands."""
        try:
            found = self._call(node)
        except (RuntimeError, IndexError):  # the operator does not run on labels
            found = self._unknown(node)
        self._labels[node] = compacted(self._joined_scalars(node, found))
        with suppress(RuntimeError, IndexError):  # an index may be valid in longer steps only
            if (known := self._run(node)) is not None:
                self._known[node] = known

    def _joined_scalars(self, node: Node, value: Value) -> Value:
        """Add to `value` the labels of scalars that the program read from tensors."""
        scalars = [self[x].whole() for x in node.all_input_nodes if not _is_tensor(x)]
        if not any(x.high >= 0 for x in scalars):
            return value
        parts = value if isinstance(value, list) else [value]
        made = [join([part, *scalars]).expand(part.low.shape) for part in parts]
        return made if isinstance(value, list) else made[0]

    def _call(self, node: Node) -> Value:
        given = [x for x in node.all_input_nodes if _is_tensor(x)]
        made = node.meta.get("val")
        kind = packet(node)
        if all(self[x].is_empty for x in given) or kind in MADE or kind in SIZES:
            return self._filled(made, nothing(()))
        for kinds, rule in RULES:
            if kind in kinds:
                found = rule(self, node)
                if found is not None:
                    return found
        if kind in ELEMENTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            return self._pointwise(node)
        return self._unknown(node)

    def _unknown(self, node: Node) -> Value:
        self.unknown.add(node)
        parts = [self[x].whole() for x in node.all_input_nodes if _is_tensor(x)]
        return self._filled(node.meta.get("val"), join(parts))

    def _filled(self, made: Any, labels: Labels) -> Value:
        """`labels`, without dims or of the result's rank, expanded to each of an op's results."""
        if isinstance(made, list | tuple):
            return [self._fill(part, labels) for part in made]
        return self._fill(made, labels)

    def _fill(self, made: Any, labels: Labels) -> Labels:
        return labels.expand(self.shape_of(made)) if isinstance(made, torch.Tensor) else labels

    # -- rules: None if the operator is not used in the way that the rule describes

    def _same(self, node: Node) -> Value:
        first: Any = node.args[0]
        return self[first]

    def _pointwise(self, node: Node) -> Value:
        parts = [self[x] for x in node.all_input_nodes if _is_tensor(x)]
        return self._filled(node.meta["val"], join(parts))

    def _moved(self, node: Node) -> Value | None:
        if packet(node) in VIEWS:  # labels are not laid out as the value is
            first: Any = node.args[0]
            made = node.meta["val"]
            if made.dtype is not first.meta["val"].dtype:
                return None
            return self[first].map(lambda x: x.reshape(self.shape_of(made)))
        if packet(node) is aten.repeat_interleave and isinstance(node.args[1], Node):
            return None  # the counts are a tensor, so their values are not known
        low, high = (self._on_labels(node, at) for at in range(2))
        if isinstance(low, torch.Tensor):
            return Labels(low, high)
        return [Labels(*pair) for pair in zip(low, high, strict=True)]

    def _padded(self, node: Node) -> Value | None:
        given, sizes, *rest = node.args
        assert isinstance(given, Node)
        if packet(node) is aten.pad and rest[:1] not in ([], ["constant"]):
            return None
        pad: Any = torch.nn.functional.pad
        low, high = self[given]
        return Labels(pad(low, sizes, value=NONE), pad(high, sizes, value=-1))

    def _on_labels(self, node: Node, at: int) -> Any:
        def load(x: Node) -> Any:
            if not _is_tensor(x):
                return self._number(x)
            found = self._labels[x]
            return [part[at] for part in found] if isinstance(found, list) else found[at]

        target: Any = node.target
        return target(*map_arg(node.args, load), **map_arg(node.kwargs, load))

    def _reduced(self, node: Node) -> Value:
        first: Any = node.args[0]
        dims = _dims(node, "dim")
        if dims is None and len(node.all_input_nodes) > 1:
            return self._pointwise(node)  # max(x, y)
        given = self[first]
        rank = given.low.dim()
        dims = [d % rank for d in dims] if dims and rank else list(range(rank))
        found = given.joined(dims)
        made = node.meta["val"]
        shape = self.shape_of(made[0] if isinstance(made, list | tuple) else made)
        return self._filled(made, found.map(lambda x: x.reshape(shape)))

    def _along(self, node: Node) -> Value:
        first: Any = node.args[0]
        given = self[first]
        dims = _dims(node, "dim") or [-1]
        if given.low.dim() == 0:
            return self._filled(node.meta["val"], given)
        return self._filled(node.meta["val"], given.joined([dims[0] % given.low.dim()]))

    def _normalised(self, node: Node) -> Value:
        first: Any = node.args[0]
        shape: Any = node.args[1]
        given = self[first]
        rank = given.low.dim()
        made = node.meta["val"]
        found = given.joined(list(range(rank - len(shape), rank)))
        if isinstance(made, list | tuple):
            return [
                self._fill(part, found if part.dim() == rank else found.whole()) for part in made
            ]
        weights = [
            self[x].whole() for x in node.all_input_nodes if x is not first and _is_tensor(x)
        ]
        return self._filled(made, join([found, *weights]))

    def _normalised_in_groups(self, node: Node) -> Value:
        """Labels of a group norm: each row of the first dim is mixed as a whole. Mean and rate of
        each group may be further results."""
        first = node.args[0]
        assert isinstance(first, Node)
        found = self[first].joined(list(range(1, self[first].low.dim())))
        others = [self[x].whole() for x in node.all_input_nodes if x is not first]
        made = node.meta["val"]
        whole = join([found, *others])
        if not isinstance(made, list | tuple):
            return self._fill(made, whole)
        rows = found.map(lambda x: x.flatten(1)[:, :1])
        return [self._fill(made[0], whole), *(self._fill(part, rows) for part in made[1:])]

    def _normalised_by_constants(self, node: Node) -> Value:
        """Labels of a batch norm by stored statistics; its other outputs are empty."""
        first: Any = node.args[0]
        others = [self[x].whole() for x in node.all_input_nodes if x is not first]
        rest = [self._fill(part, nothing(())) for part in node.meta["val"][1:]]
        return [join([self[first], *others]), *rest]

    def _contracted(self, node: Node) -> Value | None:
        """Labels of a product over the last dim of `a` and the second last of `b`, plus a bias."""
        given: list[Any] = list(node.args)
        added: list[Any] = []
        kind = packet(node)
        if kind in (aten.addmm, aten.baddbmm):
            added, given = given[:1], given[1:]
        elif kind is aten.linear:
            added, given = given[2:], given[:2]
        first, second = given[:2]
        a, b = self[first], self[second]
        if a.low.dim() < 2 or b.low.dim() < 2:
            return None
        rows = a.joined([a.low.dim() - 1])
        columns = b.joined([b.low.dim() - (1 if kind is aten.linear else 2)])
        if kind is aten.linear:
            columns = columns.map(lambda x: x.transpose(-1, -2))
        parts = [rows, columns, *(self[x] for x in added if isinstance(x, Node))]
        return self._filled(node.meta["val"], join(parts))

    def _einsum(self, node: Node) -> Value | None:
        equation, given = node.args[:2]
        assert isinstance(equation, str)
        assert isinstance(given, list | tuple)
        if "->" not in equation or "." in equation:
            return None
        inputs, _, result = equation.replace(" ", "").partition("->")
        parts = []
        for letters, x in zip(inputs.split(","), given, strict=True):
            assert isinstance(x, Node)
            gone = [i for i, letter in enumerate(letters) if letter not in result]
            left = [letter for letter in letters if letter in result]
            if len(set(letters)) != len(letters):
                return None
            labels = self[x].joined(gone)
            order = [letters.index(letter) for letter in result if letter in left]
            shape = [self.shape(x)[letters.index(c)] if c in left else 1 for c in result]
            parts.append(labels.map(partial(aligned, dims=[*order, *gone], shape=shape)))
        return self._filled(node.meta["val"], join(parts))

    def _embedded(self, node: Node) -> Value:
        table, index = node.args[:2]
        assert isinstance(table, Node)
        assert isinstance(index, Node)
        rows = self[index].map(lambda x: x.unsqueeze(-1))
        return self._filled(node.meta["val"], join([rows, self[table].whole()]))

    def _indexed(self, node: Node) -> Value | None:
        source, indices = node.args[:2]
        assert isinstance(source, Node)
        assert isinstance(indices, list | tuple)
        places: list[Any] = list(indices)
        if any(x is not None and x.meta["val"].dtype is torch.bool for x in places):
            return None
        given = self[source]
        known = [x if x is None else self._known.get(x) for x in places]
        if any(x is not None and k is None for x, k in zip(places, known, strict=True)):
            # An index without a known value may choose any element of the dims that it indexes.
            given = given.joined([dim for dim, x in enumerate(places) if x is not None])
            known = [x and torch.zeros(self.shape(x), dtype=torch.long) for x in places]
        taken = given.map(lambda x: x[tuple(slice(None) if k is None else k for k in known)])
        read = [self[x] for x in places if x is not None]
        if all(x.is_empty for x in read):
            return self._filled(node.meta["val"], taken)
        first = next(dim for dim, x in enumerate(places) if x is not None)
        last = max(dim for dim, x in enumerate(places) if x is not None)
        if sum(x is not None for x in places) != last - first + 1:
            return None  # indices that are apart move to the front
        behind = given.low.dim() - last - 1
        chosen = join(read).map(lambda x: x.reshape(*x.shape, *[1] * behind))
        return self._filled(node.meta["val"], join([taken, chosen]))

    def _gathered(self, node: Node) -> Value | None:
        source, dim, index = node.args[:3]
        assert isinstance(source, Node)
        assert isinstance(dim, int)
        assert isinstance(index, Node)
        at = dim % len(self.shape(source))
        given = self[source]
        if packet(node) is aten.index_select:
            known = self._known.get(index)
            if not self[index].is_empty:
                return None
            if known is None:  # it may choose any element
                return self._filled(node.meta["val"], given.joined([at]))
            return given.map(lambda x: x.index_select(at, known.long()))
        any_of = given.joined([at])
        for other, extent in enumerate(self.shape(index)):
            if other != at:
                any_of = any_of.map(partial(torch.narrow, dim=other, start=0, length=extent))
        return self._filled(node.meta["val"], join([any_of, self[index]]))

    def _scattered(self, node: Node) -> Value | None:
        source, dim, index = node.args[:3]
        assert isinstance(source, Node)
        assert isinstance(dim, int)
        assert isinstance(index, Node)
        shape = self.shape(source)
        at = dim % len(shape)
        written = [index, *(x for x in node.args[3:4] if isinstance(x, Node) and _is_tensor(x))]
        parts = [self[x].joined([at]) for x in [source, *written]]
        narrow = [extent for i, extent in enumerate(shape) if i != at]
        if any([n for i, n in enumerate(self.shape(x)) if i != at] != narrow for x in written):
            return None
        return self._filled(node.meta["val"], join(parts))

    # -- values that are known at compile time: indices made of arange and constants

    def _run(self, node: Node) -> Any:
        made = node.meta.get("val")
        given = [x for x in node.all_input_nodes if _is_tensor(x)]
        if not isinstance(made, torch.Tensor) or made.dtype.is_floating_point:
            return None
        if any(x not in self._known for x in given) or not isinstance(
            node.target, torch._ops.OpOverload
        ):
            return None
        shape = self.shape(node)
        if torch.Size(shape).numel() > MOST_KNOWN or node.target._schema.is_mutable:
            return None

        def load(x: Node) -> Any:
            return self._known[x] if x in self._known else self._number(x)

        with torch.no_grad():
            found = node.target(*map_arg(node.args, load), **map_arg(node.kwargs, load))
        return found if isinstance(found, torch.Tensor) else None

    def _number(self, node: Node) -> Any:
        return self._extent(node.meta["val"])

    def shape_of(self, value: torch.Tensor) -> list[int]:
        return [self._extent(extent) for extent in value.shape]

    def _extent(self, extent: Any) -> Any:
        if isinstance(extent, torch.SymInt | torch.SymFloat | torch.SymBool):
            found = extent.node.expr.subs(self._extents)
            found = found.subs(dict.fromkeys(found.free_symbols, 2))  # data-dependent symbols: 2
            return int(found) if found.is_integer else float(found)
        return extent


def _is_tensor(node: Node) -> bool:
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor | list | tuple)


def _dims(node: Node, name: str) -> list[int] | None:
    """The dims in argument `name` of a call, or its default; None if there is none."""
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            given: Any = argument.default_value if argument.has_default_value() else None
            given = node.args[place] if place < len(node.args) else node.kwargs.get(name, given)
            return given if given is None else [given] if isinstance(given, int) else list(given)
    return None


Rule = Callable[[TokenLabels, Node], Value | None]
RULES: tuple[tuple[tuple[object, ...], Rule], ...] = (
    (SAME, TokenLabels._same),
    (MOVED, TokenLabels._moved),
    ((aten.pad, aten.constant_pad_nd), TokenLabels._padded),
    (REDUCED, TokenLabels._reduced),
    (ALONG, TokenLabels._along),
    (NORMS, TokenLabels._normalised),
    (BATCH_NORM, TokenLabels._normalised_by_constants),
    (GROUP_NORMS, TokenLabels._normalised_in_groups),
    ((torch_ops.all_reduce,), TokenLabels._pointwise),
    (
        (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm),
        TokenLabels._contracted,
    ),
    ((aten.einsum,), TokenLabels._einsum),
    ((aten.embedding,), TokenLabels._embedded),
    ((aten.index, aten._unsafe_index), TokenLabels._indexed),
    ((aten.index_put, aten.index_put_), lambda labels, node: put(node, labels.__getitem__)),
    ((aten.gather, aten.index_select), TokenLabels._gathered),
    ((aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_), TokenLabels._scattered),
)
