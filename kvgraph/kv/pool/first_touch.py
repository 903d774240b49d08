"""Touches the pages of a pool shortly before requests take them, some at each step.

The system gives memory at its first touch, and clears it then: 2 MiB take 0.2 ms, and 4 ms on a
virtual machine that must first get them from its host. Rows of the same age take their next pages
in the same step, which then takes several times as long: 32 rows with pages of 4 MiB, 140 ms
instead of 35.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.inputs import Buffer

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14 and later (madvise(2)): as a write, but it changes no byte."""

HUGE = 2 << 20
"""Bytes of a huge page, which NumPy asks for in large arrays."""

SMALL = mmap.PAGESIZE
"""Bytes of a page of the system."""

AS_FAST = 2
"""Times as many bytes are touched at a step as its rows fill."""

_madvise = ctypes.CDLL(None).madvise if sys.platform == "linux" else None
if _madvise is not None:
    _madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FirstTouch:
    """The memory of `kv_blocks`, whose pages a new pool gives in their order.

    `touched`: bytes at the start that were touched, or are before a page that a request took.
    `end`: the size in bytes without the null page, which is the last; 0 if the system cannot touch
    memory without a write.
    """

    __slots__ = ("_address", "_memory", "_page", "_row", "end", "touched")

    def __init__(self, memory: np.ndarray, page_size: int) -> None:
        self._memory = memory  # stays mapped
        self._address = memory.ctypes.data
        self._page = memory.nbytes // max(1, memory.shape[0])
        self._row = ceildiv(self._page, page_size)
        self.end = 0 if _madvise is None else memory.nbytes - self._page
        self.touched = 0

    def step(self, page: int, rows: int) -> None:
        """Touch a part of the `rows` pages from `page` on, which is the next one to be taken.

        It takes no longer than half the time between two pages of a row to touch all of them.
        """
        start = max(self.touched, page * self._page)
        if start >= min((page + rows) * self._page, self.end):
            return
        size = ceildiv(AS_FAST * rows * self._row, HUGE) * HUGE
        first = (self._address + start) // SMALL * SMALL
        last = min(first + size, self._address + self.end)
        assert _madvise is not None
        if _madvise(first, last - first, POPULATE_WRITE):
            self.end = 0
        self.touched = last - self._address


def first_touch_of(buffer: Buffer, page_size: int) -> FirstTouch | None:
    """The first touch of a pool in host memory; None for memory of a device."""
    memory = buffer.handle
    return FirstTouch(memory, page_size) if isinstance(memory, np.ndarray) else None
