"""Copies of pages between a device's pools and rows of host memory.

A row is the bytes of one page of one buffer: `[nbytes of buffer[page]]`, uint8, contiguous.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.contract.abilities import PageCopier, Rows
from kvgraph.contract.dims import Array
from kvgraph.contract.inputs import Buffer
from kvgraph.errors import DeviceError


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
