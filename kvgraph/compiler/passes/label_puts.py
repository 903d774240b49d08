"""Compute labels of a value that is written by index: `a[a > 0.3] = 0.1`, `a[:, [0, 3]] = b`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from kvgraph.compiler.passes.labels import Labels, Value, join


def put(node: Node, labels: Callable[[Node], Labels]) -> Value | None:
    """Labels of the result of an `index_put` with one index; None for any other.

    The index is a mask that takes one number, or places along one dim. Each place along that dim
    may take any of the values that are written.
    """
    source, indices, values = node.args[:3]
    assert isinstance(source, Node)
    assert isinstance(indices, list | tuple)
    assert isinstance(values, Node)
    given = [(dim, x) for dim, x in enumerate(indices) if isinstance(x, Node)]
    if len(given) != 1:
        return None
    (dim, index), shape = given[0], labels(source).low.shape
    places, numbers = labels(index), labels(values)
    extents = places.low.shape
    if index.meta["val"].dtype is torch.bool:
        if numbers.low.numel() != 1:
            return None  # which number goes where depends on the whole mask
        behind = len(shape) - dim - len(extents)
        mask = places.map(lambda x: x.reshape([1] * dim + [*extents] + [1] * behind))
        return join([labels(source), mask, numbers.whole()]).expand(shape)
    if len(extents) != 1:
        return None
    written = numbers.expand([*shape[:dim], *extents, *shape[dim + 1 :]]).joined([dim])
    any_of = written.map(lambda x: x.narrow(dim, 0, 1))
    return join([labels(source), any_of, places.whole()]).expand(shape)
