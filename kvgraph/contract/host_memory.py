"""Host memory of pools, tables and logits."""

from __future__ import annotations

from math import prod

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.sizes import size_text
from kvgraph.errors import CapacityError

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector load."""


def host_zeros(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """Zeroed host memory `name`, aligned to ALIGNMENT bytes; the system provides pages on first
    touch. CapacityError if it refuses."""
    kind = DTYPES[dtype].numpy
    nbytes = prod(shape) * kind.itemsize
    try:
        raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    except (MemoryError, ValueError, OverflowError) as error:  # beyond memory or address space
        raise CapacityError(
            f"{name}: expected {size_text(nbytes)} of host memory for {list(shape)}, "
            "which the system refused; use fewer pages, or fewer or shorter rows"
        ) from error
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(kind).reshape(shape)
