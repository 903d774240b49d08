"""What a session may offer in addition to SessionInterface; a manager asks with isinstance.

A session needs none of them if its pools are host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import TensorType
from kvgraph.contract.inputs import Buffer
from kvgraph.contract.params import KVCacheParamInterface

Rows: TypeAlias = Sequence[npt.NDArray[np.uint8]]
"""Host memory of pages, the bytes of one page of one buffer each."""

RowOffsets: TypeAlias = npt.NDArray[np.int32] | Buffer

Upload: TypeAlias = Callable[[TensorType, npt.NDArray[np.int32], int], Buffer]
"""Function (symbol, values, most elements ever) -> the device's copy, always at one address."""


@runtime_checkable
class ChecksParams(Protocol):
    """A session of an artifact, whose layout a manager must have."""

    def require_params(self, params: KVCacheParamInterface) -> None:
        """Raise ParamsError at the first layout field that differs."""


@runtime_checkable
class Uploads(Protocol):
    """A session whose graph reads index tensors from device memory."""

    def uploader(self) -> Upload:
        """Make the function that copies a manager's index tensors to the device."""
        ...


@runtime_checkable
class Increments(Protocol):
    """A session whose cache lengths are in device memory."""

    def increment(self, cache_lengths: Buffer, row_offsets: RowOffsets) -> None:
        """Enqueue `cache_lengths += row_offsets[1:] - row_offsets[:-1]` on the device."""


@runtime_checkable
class PageCopier(Protocol):
    """A session that copies pages between pools in device memory and host memory, for tiers.

    Worker threads call it.

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
