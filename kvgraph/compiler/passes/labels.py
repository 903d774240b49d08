"""Labels of a value: the lowest and the highest token that each of its elements depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

TOKENS = 3
"""Fewest tokens of a step through which a program is followed."""
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
        return bool((self._distinct.high < 0).all())

    @property
    def is_mixed(self) -> bool:
        low, high = self._distinct
        return bool((low < high).any())

    @property
    def _distinct(self) -> Labels:
        """The labels with dims of stride 0 reduced to extent 1."""
        low, high = self
        for dim, extent in enumerate(low.shape):
            if extent > 1 and not (low.stride(dim) or high.stride(dim)):
                low, high = low.narrow(dim, 0, 1), high.narrow(dim, 0, 1)
        return Labels(low, high)

    def map(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Labels:
        return Labels(move(self.low), move(self.high))

    def joined(self, dims: Sequence[int]) -> Labels:
        """Labels of the same shape; elements along `dims` get the labels of all of them."""
        if not dims or 0 in self.low.shape:
            return self
        low, high = self._distinct
        shape = [1 if dim in dims else extent for dim, extent in enumerate(self.low.shape)]
        found = Labels(low.amin(tuple(dims), True), high.amax(tuple(dims), True))
        return found.expand(shape)

    def whole(self) -> Labels:
        """The labels of all elements together, as tensors without dims."""
        low, high = self._distinct
        return Labels(low.amin(), high.amax()) if low.numel() else nothing(())

    def expand(self, shape: Sequence[int]) -> Labels:
        return self.map(lambda x: x.expand(shape))

    def compact(self) -> Labels:
        """The same labels, stored with stride 0 along dims in which they are equal."""
        low, high = self._distinct
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


def own(shape: Sequence[int]) -> Labels:
    """Labels of a value `[tokens, ...]` in which elements of row t depend on token t."""
    at = torch.arange(shape[0], dtype=KIND).reshape(-1, *[1] * (len(shape) - 1))
    return Labels(at, at).expand(shape)


def join(parts: Sequence[Labels]) -> Labels:
    """Labels of elements that depend on the elements of all `parts`; shapes broadcast."""
    low, high = parts[0]
    for part in parts[1:]:
        low, high = torch.minimum(low, part.low), torch.maximum(high, part.high)
    return Labels(low, high)


Value = Labels | list[Labels]


def aligned(x: torch.Tensor, dims: list[int], shape: list[int]) -> torch.Tensor:
    return x.permute(dims).reshape(shape)


def compacted(value: Value) -> Value:
    return [x.compact() for x in value] if isinstance(value, list) else value.compact()
