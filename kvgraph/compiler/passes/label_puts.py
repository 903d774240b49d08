"""Labels of a value whose places are written by index: `a[a > 0.3] = 0.1`, `a[:, [0, 3]] = b`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from kvgraph.compiler.passes.labels import Labels, Value, join

if TYPE_CHECKING:
    from kvgraph.compiler.passes.token_labels import TokenLabels


def put(labels: TokenLabels, node: Node) -> Value | None:
    """Of `index_put` with one index: a mask that takes one number, or places along one dim, of
    which any may take what is written there. None for others."""
    source, indices, values = node.args[:3]
    assert isinstance(source, Node)
    assert isinstance(indices, list | tuple)
    assert isinstance(values, Node)
    given = [(dim, x) for dim, x in enumerate(indices) if isinstance(x, Node)]
    if len(given) != 1:
        return None
    (dim, index), shape = given[0], labels.shape(source)
    if index.meta["val"].dtype is torch.bool:
        if torch.Size(labels.shape(values)).numel() != 1:
            return None  # which element goes where depends on the whole mask
        mask = labels.shape(index)
        behind = len(shape) - dim - len(mask)
        wide = [*[1] * dim, *mask, *[1] * behind]
        chosen = labels[index].map(lambda x: x.reshape(wide))
        return _filled(shape, labels[source], chosen, labels[values].whole())
    places = labels.shape(index)
    if len(places) != 1:
        return None
    written = labels[values].expand([*shape[:dim], *places, *shape[dim + 1 :]]).joined([dim])
    one = written.map(lambda x: x.narrow(dim, 0, 1))
    return _filled(shape, labels[source], one, labels[index].whole())


def _filled(shape: list[int], *parts: Labels) -> Labels:
    return join(parts).expand(shape)
