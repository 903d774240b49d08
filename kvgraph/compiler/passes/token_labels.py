"""Compute from which tokens each element of a program's values is computed.

A program is followed operator by operator over a step of a few tokens. The labels of a value are
the lowest and the highest token that each of its elements depends on; an element that depends on
no token has an empty range. Operators that move elements run on the labels themselves. The others
are described by the dims that they reduce, sort or contract. An operator without a rule counts as
one that mixes all its inputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.fx.node import map_arg

from kvgraph.compiler.passes.label_kinds import (
    ALONG,
    ALONG_ONE,
    GROUP_NORMS,
    MADE,
    MOVED,
    NORMS,
    OVERWRITES,
    PADS,
    RESHAPED,
    SAME,
    SIZES,
    is_pointwise,
)
from kvgraph.compiler.passes.label_norms import (
    normalised,
    normalised_by_constants,
    normalised_in_groups,
)
from kvgraph.compiler.passes.label_numbers import is_known_by_place, moves_settled, named_dims
from kvgraph.compiler.passes.label_products import contracted, einsum
from kvgraph.compiler.passes.label_puts import put
from kvgraph.compiler.passes.labels import (
    NONE,
    Labels,
    Value,
    compacted,
    everything,
    join,
    nothing,
)
from kvgraph.compiler.passes.token_functions import BATCH_NORM, REDUCED, packet
from kvgraph.ops import torch_ops

aten = torch.ops.aten
MOST_KNOWN = 1 << 22
"""Most elements of an index that is computed at compile time."""


class TokenLabels:
    """Labels of a graph's nodes, followed in order. `extents`: values of the symbols in shapes;
    `count`: the symbol of them that counts tokens; `others`: the value of any other symbol."""

    def __init__(self, extents: Mapping[object, int], count: object, others: int) -> None:
        self._extents, self._count, self._others = extents, count, others
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

    def forget(self, node: Node) -> None:
        """Free the labels of a node that nothing reads any more."""
        self._labels.pop(node, None)
        self._known.pop(node, None)

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
        is_size = kind in (*MADE, *SIZES) and not any(map(_is_counted, given))
        if is_size or all(self[x].is_empty for x in given):
            return self.filled(made, nothing(()))
        if kind in (*MOVED, *RESHAPED, *PADS) and not moves_settled(node, self._count, self._held):
            return self._anywhere(node)
        for kinds, rule in RULES:
            if kind in kinds:
                found = rule(self, node)
                if found is not None:
                    return self._unless_lost(node, found)
        if is_pointwise(node):
            return self._pointwise(node)
        return self._unknown(node)

    def _unless_lost(self, node: Node, value: Value) -> Value:
        """`value`, but an operator that leaves no token mixes them: it may move them so far that
        they show in longer steps only. It may take a part along a dim that does not grow, if no
        two tokens are along it."""
        parts = value if isinstance(value, list) else [value]
        is_lost = [x.is_empty and x.low.numel() > 0 for x in parts]
        if not any(is_lost) or packet(node) in OVERWRITES or node.target is operator.getitem:
            return value  # a list's entries were looked at before
        if dims := named_dims(node, "dim"):
            first = node.all_input_nodes[0]
            extents = first.meta["val"].shape
            is_fixed = all(type(extents[dim]) is int for dim in dims)
            if is_fixed and not self[first].joined([d % len(extents) for d in dims]).is_mixed:
                return value
        made = [
            everything(x.low.shape) if lost else x for x, lost in zip(parts, is_lost, strict=True)
        ]
        return made if isinstance(value, list) else made[0]

    def _unknown(self, node: Node) -> Value:
        self.unknown.add(node)
        return self._anywhere(node)

    def _held(self, node: Node) -> list[int]:
        """The dims along which a value has several tokens."""
        found = self[node]
        return [dim for dim in range(found.low.dim()) if found.joined([dim]).is_mixed]

    def _anywhere(self, node: Node) -> Value:
        """Labels of a call that may move any element of its operands to any place."""
        parts = [self[x].whole() for x in node.all_input_nodes if _is_tensor(x)]
        return self.filled(node.meta.get("val"), join(parts))

    def filled(self, made: object, labels: Labels) -> Value:
        """`labels`, without dims or of the result's rank, expanded to each of an op's results."""
        if isinstance(made, list | tuple):
            return [self.fill(part, labels) for part in made]
        return self.fill(made, labels)

    def fill(self, made: object, labels: Labels) -> Labels:
        return labels.expand(self.shape_of(made)) if isinstance(made, torch.Tensor) else labels

    # -- rules: None if the operator is not used in the way that the rule describes

    def _same(self, node: Node) -> Value:
        first: Any = node.args[0]
        return self[first]

    def _pointwise(self, node: Node) -> Value:
        parts = [self[x] for x in node.all_input_nodes if _is_tensor(x)]
        return self.filled(node.meta["val"], join(parts))

    def _reshaped(self, node: Node) -> Value | None:
        first: Any = node.args[0]
        made = node.meta["val"]
        if made.dtype is not first.meta["val"].dtype:
            return None
        return self[first].reshape(self.shape_of(made))  # not laid out as the value is

    def _moved(self, node: Node) -> Value | None:
        if packet(node) is aten.repeat_interleave and isinstance(node.args[1], Node):
            return None  # the counts are a tensor, so their values are not known
        thin = self._thin(node)
        low, high = (self._on_labels(node, at, thin) for at in range(2))
        if isinstance(low, torch.Tensor):
            return self.filled(node.meta["val"], Labels(low, high))
        return [Labels(*pair) for pair in zip(low, high, strict=True)]

    def _thin(self, node: Node) -> list[int]:
        """The dims along which all operands of a call have equal labels and it moves nothing."""
        kind = packet(node)
        given = [self[x] for x in node.all_input_nodes if _is_tensor(x)]
        rank = given[0].low.dim()
        if kind not in ALONG_ONE or any(x.low.dim() != rank for x in given):
            return []
        dims = [] if kind is aten.copy else named_dims(node, "dim")
        if dims is None:  # it flattens
            return []
        others = [d for d in range(rank) if d not in [dim % rank for dim in dims]]
        return [d for d in others if all(x.distinct([d]).low.shape[d] == 1 for x in given)]

    def _padded(self, node: Node) -> Value | None:
        given, sizes, *rest = node.args
        assert isinstance(given, Node)
        if packet(node) is aten.pad and rest[:1] not in ([], ["constant"]):
            return None
        pad: Any = torch.nn.functional.pad
        low, high = self[given]
        return Labels(pad(low, sizes, value=NONE), pad(high, sizes, value=-1))

    def _on_labels(self, node: Node, at: int, thin: list[int]) -> Any:
        def load(x: Node) -> Any:
            if not _is_tensor(x):
                return self._number(x)
            found = self._labels[x]
            if isinstance(found, list):
                return [part[at] for part in found]
            return found.distinct(thin)[at]

        target: Any = node.target
        return target(*map_arg(node.args, load), **map_arg(node.kwargs, load))

    def _reduced(self, node: Node) -> Value:
        first: Any = node.args[0]
        dims = named_dims(node, "dim")
        if dims is None and len(node.all_input_nodes) > 1:
            return self._pointwise(node)  # max(x, y)
        given = self[first]
        rank = given.low.dim()
        dims = [d % rank for d in dims] if dims and rank else list(range(rank))
        found = given.joined(dims)
        made = node.meta["val"]
        shape = self.shape_of(made[0] if isinstance(made, list | tuple) else made)
        return self.filled(made, found.map(lambda x: x.reshape(shape)))

    def _along(self, node: Node) -> Value:
        first: Any = node.args[0]
        given = self[first]
        dims = named_dims(node, "dim") or [-1]
        if given.low.dim() == 0:
            return self.filled(node.meta["val"], given)
        return self.filled(node.meta["val"], given.joined([dims[0] % given.low.dim()]))

    def _embedded(self, node: Node) -> Value:
        table, index = node.args[:2]
        assert isinstance(table, Node)
        assert isinstance(index, Node)
        rows = self[index].map(lambda x: x.unsqueeze(-1))
        return self.filled(node.meta["val"], join([rows, self[table].whole()]))

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
        whole = [dim for dim in range(given.low.dim()) if dim >= len(places) or places[dim] is None]
        taken = given.distinct(whole).map(
            lambda x: x[tuple(slice(None) if k is None else k for k in known)]
        )
        read = [self[x] for x in places if x is not None]
        if all(x.is_empty for x in read):
            return self.filled(node.meta["val"], taken)
        first = next(dim for dim, x in enumerate(places) if x is not None)
        last = max(dim for dim, x in enumerate(places) if x is not None)
        if sum(x is not None for x in places) != last - first + 1:
            return None  # indices that are apart move to the front
        behind = given.low.dim() - last - 1
        chosen = join(read).map(lambda x: x.reshape(*x.shape, *[1] * behind))
        return self.filled(node.meta["val"], join([taken, chosen]))

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
                return self.filled(node.meta["val"], given.joined([at]))
            others = [dim for dim in range(given.low.dim()) if dim != at]
            taken = given.distinct(others).map(lambda x: x.index_select(at, known.long()))
            return self.filled(node.meta["val"], taken)
        any_of = given.joined([at])
        for other, extent in enumerate(self.shape(index)):
            if other != at:
                any_of = any_of.map(partial(torch.narrow, dim=other, start=0, length=extent))
        return self.filled(node.meta["val"], join([any_of, self[index]]))

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
        return self.filled(node.meta["val"], join(parts))

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
        if not is_known_by_place(node, self._count):
            return None  # another step may differ
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
            found = found.subs(dict.fromkeys(found.free_symbols, self._others))
            return int(found) if found.is_integer else float(found)
        return extent


def _is_tensor(node: Node) -> bool:
    made = node.meta.get("val")
    return isinstance(made, torch.Tensor | list | tuple)


def _is_counted(node: Node) -> bool:
    """Whether the shape of a value depends on values, as that of `nonzero` does."""
    return bool(free_unbacked_symbols(node.meta["val"]))


Rule = Callable[[TokenLabels, Node], Value | None]
RULES: tuple[tuple[tuple[object, ...], Rule], ...] = (
    (SAME, TokenLabels._same),
    (RESHAPED, TokenLabels._reshaped),
    (MOVED, TokenLabels._moved),
    (PADS, TokenLabels._padded),
    (REDUCED, TokenLabels._reduced),
    (ALONG, TokenLabels._along),
    (NORMS, normalised),
    (BATCH_NORM, normalised_by_constants),
    (GROUP_NORMS, normalised_in_groups),
    ((torch_ops.all_reduce,), TokenLabels._pointwise),
    (
        (aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm),
        contracted,
    ),
    ((aten.einsum,), einsum),
    ((aten.embedding,), TokenLabels._embedded),
    ((aten.index, aten._unsafe_index), TokenLabels._indexed),
    ((aten.index_put, aten.index_put_), lambda labels, node: put(node, labels.__getitem__)),
    ((aten.gather, aten.index_select), TokenLabels._gathered),
    ((aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_), TokenLabels._scattered),
)
