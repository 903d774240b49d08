"""NumPy arrays as torch tensors over the same memory, and back."""

from __future__ import annotations

import torch

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import ALL, DTYPES

PLAIN = {dtype.name: dtype.plain for dtype in ALL if dtype.plain != dtype.numpy}
"""Integer dtypes by name of a dtype that NumPy has only through ml_dtypes, which torch cannot read.
"""


def tensor_over(array: Array, dtype: str) -> torch.Tensor:
    """A tensor over the memory of `array`, or over a copy if the array is read-only."""
    if not array.flags.writeable:
        array = array.copy()
    if min(array.strides, default=0) < 0:  # torch refuses it, also of an axis of one element
        array = array.reshape(-1).reshape(array.shape)
    plain = PLAIN.get(dtype)
    if plain is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(plain)).view(getattr(torch, dtype))


def array_over(tensor: torch.Tensor) -> Array:
    """An array over the memory of a row-major CPU tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    plain = PLAIN.get(name)
    raw: Array = (tensor if plain is None else tensor.view(getattr(torch, plain.name))).numpy()
    return raw.view(DTYPES[name].numpy)
