"""Copies of pages between a device's pools and rows of host memory.

A row is the bytes of one page of one buffer: `[nbytes of buffer[page]]`, uint8, contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.contract.inputs import Buffer
from kvgraph.errors import DeviceError

Rows = Sequence[npt.NDArray[np.uint8]]


@runtime_checkable
class PageCopier(Protocol):
    """Methods that a session with device memory adds. Worker threads call them.

    Both copies return when the bytes are at their destination. They may run during a step: no step
    writes a page that is copied out, or reads a page that is copied in. `pages[i]` belongs to
    `rows[i]`; a row is in memory of `pinned_host_bytes` and does not move during the call.
    """

    def copy_pages_out(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        """`rows[i] = bytes of buffer[pages[i]]`, after all steps that ran before the call."""

    def copy_pages_in(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        """`buffer[pages[i]] = rows[i]`, before all steps that run after the call returned."""

    def pinned_host_bytes(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Allocate host memory `[nbytes]` that the device copies from and to at full speed.

        CapacityError or MemoryError if the system refuses it.
        """


class HostCopier:
    """A PageCopier for pools that are NumPy arrays of any dtype."""

    def copy_pages_out(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        for page, row in zip(pages, rows, strict=True):
            row[:] = page_bytes(buffer, page)

    def copy_pages_in(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        for page, row in zip(pages, rows, strict=True):
            page_bytes(buffer, page)[:] = row

    def pinned_host_bytes(self, nbytes: int) -> npt.NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)


def page_bytes(buffer: Buffer, page: int) -> npt.NDArray[np.uint8]:
    """One page of a host pool as bytes; a view."""
    pool: Array = buffer.handle
    row: npt.NDArray[np.uint8] = pool[page].reshape(-1).view(np.uint8)
    return row


def copier_of(session: object, buffers: Sequence[Buffer]) -> PageCopier:
    """The copier for pages of `buffers`: the session if it can copy, otherwise NumPy.

    DeviceError for pools on a device if the session cannot copy.
    """
    if isinstance(session, PageCopier):
        return session
    for buffer in buffers:
        if not isinstance(buffer.handle, np.ndarray):
            raise DeviceError(
                f"tiers: expected a session that copies pages of {buffer.device} "
                f"(copy_pages_out, copy_pages_in, pinned_host_bytes), got {type(session).__name__}"
            )
    return HostCopier()
