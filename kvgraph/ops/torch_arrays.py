"""NumPy arrays as torch tensors over the same memory."""

from __future__ import annotations

import torch

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import ALL

PLAIN = {dtype.name: dtype.plain for dtype in ALL if dtype.plain != dtype.numpy}
"""NumPy has these only through ml_dtypes, which torch does not read: they cross as integers."""


def tensor_over(array: Array, dtype: str) -> torch.Tensor:
    """A tensor over the memory of `array`, or over a copy where that is read-only."""
    if not array.flags.writeable:
        array = array.copy()
    plain = PLAIN.get(dtype)
    if plain is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(plain)).view(getattr(torch, dtype))
