"""Device memory: separate buffers with bounds, over the bytes of host arrays."""

from __future__ import annotations

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.errors import KernelError

FIRST, GAP, ALIGNED = 1 << 40, 1 << 16, 256


class AccessError(Exception):
    """An address outside of all buffers. `lanes`: its places in the array of addresses."""

    def __init__(self, sentence: str, lanes: npt.NDArray[np.bool_]) -> None:
        super().__init__(sentence)
        self.lanes = lanes


@dataclass(order=True)
class Buffer:
    """Bytes `raw [size]` at `address`. `views`: views of the bytes, by width of an element."""

    address: int
    name: str = field(compare=False)
    raw: npt.NDArray[np.uint8] = field(compare=False)
    views: dict[int, Array] = field(default_factory=dict, compare=False)

    @property
    def end(self) -> int:
        return self.address + self.raw.size

    def view(self, width: int) -> Array | None:
        """View as elements of `width` bytes; for 16, rows `[n, 4]` of 4 bytes each. None if they
        are not aligned."""
        if self.address % width:
            return None
        if width not in self.views:
            whole = self.raw[: self.raw.size // width * width]
            kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint32}[width]
            self.views[width] = whole.view(kind) if width < 16 else whole.view(kind).reshape(-1, 4)
        return self.views[width]


Parts: TypeAlias = list[tuple[Buffer, npt.NDArray[np.bool_] | None]]
"""Buffers, each with the mask of the accesses in it (None: all)."""


class Memory:
    """Memory of a kernel's pointers. A run writes into the added arrays themselves."""

    def __init__(self) -> None:
        self._buffers: list[Buffer] = []
        self._next = FIRST

    def add(self, array: Array, name: str) -> int:
        """Add a C-contiguous array; return its device address, a multiple of 256. Buffers are at
        least 64 KiB apart."""
        address = self._next
        self._next += -(-(array.nbytes + GAP) // ALIGNED) * ALIGNED
        self.map(address, array, name)
        return address

    def map(self, address: int, array: Array, name: str) -> None:
        """Add an array at an address that the caller chooses. KernelError if another buffer is
        there."""
        if not array.flags.c_contiguous:
            raise KernelError(f"{name}: expected a C-contiguous array, got strides {array.strides}")
        raw = array.reshape(-1).view(np.uint8) if array.size else np.empty(0, np.uint8)
        at = bisect_right(self._buffers, address, key=lambda buffer: buffer.address)
        for other in self._buffers[max(at - 1, 0) : at + 1]:
            if address < other.end and other.address < address + raw.size:
                raise KernelError(
                    f"{name}: expected {raw.size} free bytes at {address:#x}, got {other.name}"
                )
        insort(self._buffers, Buffer(address, name, raw))

    def remove(self, address: int) -> None:
        """Remove the buffer at `address`; KernelError if none begins there."""
        for at, buffer in enumerate(self._buffers):
            if buffer.address == address:
                del self._buffers[at]
                return
        raise KernelError(f"{address:#x}: expected the address of a buffer, got none")

    def parts(self, addresses: npt.NDArray[np.uint64], width: int) -> Parts:
        """Buffers of flat accesses of `width` bytes, each with the mask of accesses (None: all).

        AccessError for an access that is not inside one buffer.
        """
        low, high = int(addresses.min()), int(addresses.max())
        at = bisect_right(self._buffers, low, key=lambda buffer: buffer.address) - 1
        if at >= 0 and high + width <= self._buffers[at].end:
            return [(self._buffers[at], None)]
        return self._several(addresses, width)

    def _several(self, addresses: npt.NDArray[np.uint64], width: int) -> Parts:
        starts = np.array([buffer.address for buffer in self._buffers], np.uint64)
        index = np.searchsorted(starts, addresses, side="right").astype(np.int64) - 1
        found: Parts = []
        for at in np.unique(index).tolist():
            here = index == at
            outside = here
            if at >= 0:
                buffer = self._buffers[at]
                outside = here & (addresses > np.uint64(max(buffer.end - width, 0)))
                outside |= here & (buffer.end - width < buffer.address)
                found.append((buffer, here))
            if outside.any():
                raise AccessError(self._nearest(int(addresses[outside][0]), width), outside)
        return found

    def _nearest(self, address: int, width: int) -> str:
        """Error text for an access outside of all buffers."""
        if not self._buffers:
            return f"expected a buffer at {address:#x}, got none"
        near = min(
            self._buffers,
            key=lambda b: max(b.address - address, address + width - b.end, 0),
        )
        distance = address - near.address
        return (
            f"expected {width} bytes inside of a buffer, got byte {distance} of {near.name}, which "
            f"has {near.raw.size}"
        )
