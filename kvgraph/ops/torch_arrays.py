"""NumPy arrays as torch tensors over the same memory."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch

PLAIN = {"bfloat16": "int16", "float8_e4m3fn": "int8"}
"""NumPy has these only through ml_dtypes, which torch does not read: they cross as integers."""


def tensor_over(array: npt.NDArray[Any], dtype: str) -> torch.Tensor:
    """A tensor over the memory of `array`, or over a copy where that is read-only."""
    if not array.flags.writeable:
        array = array.copy()
    plain = PLAIN.get(dtype)
    if plain is None:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(plain)).view(getattr(torch, dtype))
