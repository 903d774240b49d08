"""Copies of whole pages between a pool on the GPU and host memory, while steps run."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import torch

from kvgraph.contract.inputs import Buffer
from kvgraph.contract.sizes import size_text
from kvgraph.errors import CapacityError
from kvgraph.kv.tiers.copies import Rows

PAGE = 4096
"""Bytes; what is locked begins and ends at one."""


class PageCopies:
    """On a stream of its own, so that neither waits for a step's kernels.

    What a call copies is complete when it returns. Steps need no ordering with it: `run` returns
    when its kernels have ended, and none that starts meanwhile touches these pages.
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
        """Wait for the steps' stream: what copies find is what was enqueued there before."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).synchronize()

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked as long as a view of it lives. torch's own memory of this kind has a power of
        two of bytes: up to twice a slab's."""
        memory = np.empty(nbytes + 2 * PAGE, np.uint8)
        if self._stream is None:
            return memory[:nbytes]
        start = -memory.ctypes.data % PAGE
        address, length = memory.ctypes.data + start, -(-nbytes // PAGE) * PAGE
        if nbytes:
            cudart = torch.cuda.cudart()
            self._require_locked(int(cudart.cudaHostRegister(address, length, 0)), nbytes)
            free = weakref.finalize(memory, cudart.cudaHostUnregister, address)
            free.atexit = False  # the driver unlocks all of a process that ends
        return memory[start : start + nbytes]

    def _require_locked(self, status: int, nbytes: int) -> None:
        if status:
            with suppress(RuntimeError):  # else torch tells the error of what it launches next
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
        with torch.cuda.stream(self._stream):  # no stream: nothing happens
            for page, row in zip(pages, rows, strict=True):
                copy(pool[page], torch.from_numpy(row))
        if self._stream is not None:
            self._stream.synchronize()
