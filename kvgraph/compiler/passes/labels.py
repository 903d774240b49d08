"""Labels of a value: the lowest and the highest token that each of its elements depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import NamedTuple, Protocol

import torch
from torch.fx import Node

TOKENS = 3
"""Number of tokens of the short step through which a program is followed."""
LONG_STEP = 8209
"""Number of tokens of the long step. It is a prime, so it is no multiple of a block's size."""
KIND = torch.int16
NONE = torch.iinfo(KIND).max
"""The lowest token of an element that depends on no token; its highest is -1."""


class Labels(NamedTuple):
    """Lowest and highest token that each element depends on: two tensors of one shape and of KIND.

    A dim of stride 0 holds equal labels and is processed once: a weight's labels take two numbers,
    whatever its size.
    """

    low: torch.Tensor
    high: torch.Tensor

    @property
    def is_empty(self) -> bool:
        return bool((self.distinct().high < 0).all())

    @property
    def is_mixed(self) -> bool:
        low, high = self.distinct()
        return bool((low < high).any())

    def distinct(self, dims: Sequence[int] | None = None) -> Labels:
        """The labels with those of `dims` that have stride 0 reduced to extent 1; all dims if
        None."""
        low, high = self
        for dim in range(low.dim()) if dims is None else dims:
            if low.shape[dim] > 1 and not (low.stride(dim) or high.stride(dim)):
                low, high = low.narrow(dim, 0, 1), high.narrow(dim, 0, 1)
        return Labels(low, high)

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Labels:
        return Labels(move(self.low), move(self.high))

    def joined(self, dims: Sequence[int]) -> Labels:
        """Labels of the same shape; elements along `dims` get the labels of all of them."""
        if not dims or 0 in self.low.shape:
            return self
        low, high = self.distinct()
        shape = [1 if dim in dims else extent for dim, extent in enumerate(self.low.shape)]
        found = Labels(low.amin(tuple(dims), True), high.amax(tuple(dims), True))
        return found.expand(shape)

    def whole(self) -> Labels:
        """The labels of all elements together, as tensors without dims."""
        low, high = self.distinct()
        return Labels(low.amin(), high.amax()) if low.numel() else nothing(())

    def expand(self, shape: Sequence[int]) -> Labels:
        return self.map(lambda x: x.expand(shape))

    def reshape(self, shape: Sequence[int]) -> Labels:
        """The labels in another shape. Last dims that both shapes have are processed once if they
        hold equal labels."""
        given = self.low.shape
        pairs = zip(reversed(given), reversed(shape), strict=False)
        kept = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        thin = self.distinct(range(len(given) - kept, len(given)))
        moved = [*shape[: len(shape) - kept], *thin.low.shape[len(given) - kept :]]
        return thin.map(lambda x: x.reshape(moved)).expand(shape)

    def compact(self) -> Labels:
        """The same labels, stored with stride 0 along dims in which they are equal."""
        low, high = self.distinct()
        for dim, extent in enumerate(low.shape):
            if extent > 1:
                first = Labels(low.narrow(dim, 0, 1), high.narrow(dim, 0, 1))
                if bool((low == first.low).all()) and bool((high == first.high).all()):
                    low, high = first
        return Labels(low, high).expand(self.low.shape)


def nothing(shape: Sequence[int]) -> Labels:
    """Labels of elements that depend on no token."""
    low, high = torch.tensor(NONE, dtype=KIND), torch.tensor(-1, dtype=KIND)
    return Labels(low, high).expand(shape)


def everything(shape: Sequence[int]) -> Labels:
    """Labels of elements that depend on several tokens."""
    low, high = torch.tensor(0, dtype=KIND), torch.tensor(TOKENS - 1, dtype=KIND)
    return Labels(low, high).expand(shape)


def own(shape: Sequence[int], rows: torch.Tensor | None = None) -> Labels:
    """Labels of a value `[tokens, ...]` in which elements of row t depend on token `rows[t]`; on
    token t if `rows` is None."""
    at = torch.arange(shape[0]) if rows is None else rows
    at = at.to(KIND).reshape(-1, *[1] * (len(shape) - 1))
    return Labels(at, at).expand(shape)


def join(parts: Sequence[Labels]) -> Labels:
    """Labels of elements that depend on the elements of all `parts`; shapes broadcast."""
    low, high = parts[0].distinct()
    for part in parts[1:]:
        other = part.distinct()
        low, high = torch.minimum(low, other.low), torch.maximum(high, other.high)
    return Labels(low, high).expand(torch.broadcast_shapes(*(part.low.shape for part in parts)))


Value = Labels | list[Labels]


class Followed(Protocol):
    """Labels of the nodes that were followed; `TokenLabels` is one. A list's are joined."""

    def __getitem__(self, node: Node) -> Labels: ...

    def shape(self, node: Node) -> list[int]: ...

    def fill(self, made: object, labels: Labels) -> Labels: ...

    def filled(self, made: object, labels: Labels) -> Value: ...


def aligned(x: torch.Tensor, dims: list[int], shape: list[int]) -> torch.Tensor:
    return x.permute(dims).reshape(shape)


def compacted(value: Value) -> Value:
    return [x.compact() for x in value] if isinstance(value, list) else value.compact()
