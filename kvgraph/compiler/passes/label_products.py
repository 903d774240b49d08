"""Compute labels of matrix products: what is summed over a dim depends on all of it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.fx import Node

from kvgraph.compiler.passes.labels import Followed, Value, aligned, join
from kvgraph.compiler.passes.token_functions import packet

aten = torch.ops.aten


def contracted(labels: Followed, node: Node) -> Value | None:
    """Labels of a product over the last dim of `a` and the second last of `b`, plus a bias."""
    given: list[Any] = list(node.args)
    added: list[Any] = []
    kind = packet(node)
    if kind in (aten.addmm, aten.baddbmm):
        added, given = given[:1], given[1:]
    elif kind is aten.linear:
        added, given = given[2:], given[:2]
    first, second = given[:2]
    a, b = labels[first], labels[second]
    if a.low.dim() < 2 or b.low.dim() < 2:
        return None
    rows = a.joined([a.low.dim() - 1])
    columns = b.joined([b.low.dim() - (1 if kind is aten.linear else 2)])
    if kind is aten.linear:
        columns = columns.map(lambda x: x.transpose(-1, -2))
    parts = [rows, columns, *(labels[x] for x in added if isinstance(x, Node))]
    return labels.filled(node.meta["val"], join(parts))


def einsum(labels: Followed, node: Node) -> Value | None:
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
        found = labels[x].joined(gone)
        order = [letters.index(letter) for letter in result if letter in left]
        shape = [labels.shape(x)[letters.index(c)] if c in left else 1 for c in result]
        parts.append(found.map(partial(aligned, dims=[*order, *gone], shape=shape)))
    return labels.filled(node.meta["val"], join(parts))
