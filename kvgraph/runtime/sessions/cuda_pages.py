"""Copies of whole pages between a pool on the GPU and host memory, while steps run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvgraph.contract.inputs import Buffer
from kvgraph.kv.tiers.copies import Rows


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

    def pinned(self, nbytes: int) -> npt.NDArray[np.uint8]:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._stream is not None)
        return memory.numpy()

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
