"""Compute labels of layer norms, group norms and batch norms."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from kvgraph.compiler.passes.labels import Followed, Labels, Value, join, nothing


def normalised(labels: Followed, node: Node) -> Value:
    """Labels of a norm over the last dims. Mean and rate of each row may be further results."""
    shape: Any = node.args[1]
    given, weights = _operands(labels, node)
    rank = given.low.dim()
    rows = given.joined(list(range(rank - len(shape), rank)))
    made = node.meta["val"]
    if not isinstance(made, list | tuple):
        return labels.fill(made, join([rows, *weights]))
    rest = [labels.fill(x, rows if x.dim() == rank else rows.whole()) for x in made[1:]]
    return [labels.fill(made[0], join([rows, *weights])), *rest]


def normalised_in_groups(labels: Followed, node: Node) -> Value:
    """Labels of a group norm: each row of the first dim is mixed as a whole. Mean and rate of
    each group may be further results."""
    given, weights = _operands(labels, node)
    found = given.joined(list(range(1, given.low.dim())))
    made = node.meta["val"]
    whole = join([found, *weights])
    if not isinstance(made, list | tuple):
        return labels.fill(made, whole)
    rows = found.map(lambda x: x.flatten(1)[:, :1])
    return [labels.fill(made[0], whole), *(labels.fill(part, rows) for part in made[1:])]


def normalised_by_constants(labels: Followed, node: Node) -> Value:
    """Labels of a batch norm by stored statistics; its other outputs are empty."""
    given, weights = _operands(labels, node)
    rest = [labels.fill(part, nothing(())) for part in node.meta["val"][1:]]
    return [join([given, *weights]), *rest]


def _operands(labels: Followed, node: Node) -> tuple[Labels, list[Labels]]:
    """Labels of the value that is normalised, and of each other tensor as a whole."""
    first: Any = node.args[0]
    others = [x for x in node.args[1:] if isinstance(x, Node)]
    return labels[first], [labels[x].whole() for x in others]
