"""Copies of whole pages between a pool on the GPU and host memory, while steps run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from kvgraph.contract.abilities import Rows
from kvgraph.contract.inputs import Buffer
from kvgraph.contract.sizes import size_text
from kvgraph.errors import CapacityError

PAGE = 4096
"""Page size of the host in bytes; locked ranges begin and end at a multiple."""


class PageCopies:
    """Copies pages on a separate stream, so that neither copies nor steps wait for the other.

    A copy is complete when its call returns. It needs no ordering with steps: `run` returns when
    its kernels have ended, and no step that starts meanwhile uses these pages.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def out(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        def copy(page: torch.Tensor, row: torch.Tensor) -> None:
            row.copy_(page, non_blocking=True)

        self._each(buffer, pages, rows, copy)

    def into(self, buffer: Buffer, pages: Sequence[int], rows: Rows) -> None:
        def copy(page: torch.Tensor, row: torch.Tensor) -> None:
            page.copy_(row, non_blocking=True)

        self._each(buffer, pages, rows, copy)

    def settle(self) -> None:
        """Wait for the steps' stream, so that later copies see all work that is enqueued there."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked bytes, as long as a view of them is referenced.

        torch's own pinned memory is rounded to a power of two: up to twice a slab's size."""
        memory = np.empty(nbytes + 2 * PAGE, np.uint8)
        if self._stream is None:
            return memory[:nbytes]
        start = -memory.ctypes.data % PAGE
        address, length = memory.ctypes.data + start, -(-nbytes // PAGE) * PAGE
        if nbytes:
            cudart = torch.cuda.cudart()
            self._require_locked(int(cudart.cudaHostRegister(address, length, 0)), nbytes)
            free = weakref.finalize(memory, cudart.cudaHostUnregister, address)
            free.atexit = False  # at process exit, the driver unlocks everything
        return memory[start : start + nbytes]

    def _require_locked(self, status: int, nbytes: int) -> None:
        if status:
            with suppress(RuntimeError):  # clears the error, which torch's next launch would raise
                torch.zeros(1, device=self._device)
            raise CapacityError(
                f"host memory: expected {size_text(nbytes)} that the system locks for "
                f"{self._device}, got error {status} of cudaHostRegister; take less"
            )

    def _each(
        self,
        buffer: Buffer,
        pages: Sequence[int],
        rows: Rows,
        copy: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> None:
        pool = buffer.handle.view(torch.uint8).flatten(1)
        with torch.cuda.stream(self._stream):  # None: no effect
            for page, row in zip(pages, rows, strict=True):
                copy(pool[page], torch.from_numpy(row))
        if self._stream is not None:
            self._stream.synchronize()
