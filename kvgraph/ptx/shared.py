"""Shared memory of a batch of blocks, and its users since the last barrier.

It is checked by granule (the narrowest store of the kernel, at most 4 bytes). The epoch of a block
is the number of barriers that it has passed. Two warps that use a granule in one epoch race if one
of them writes, in either order, since no barrier separates them. Threads of one warp are assumed
to run in step.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array

SEVERAL = 63
"""Stands for a warp if more than one warp read the granule in this epoch."""

POISON = 0xFF

Places: TypeAlias = npt.NDArray[np.int64]


class RaceError(Exception):
    """A wrong use of shared memory. `lanes`: its places in the array of uses."""

    def __init__(self, sentence: str, lanes: npt.NDArray[np.bool_]) -> None:
        super().__init__(sentence)
        self.lanes = lanes


class Shared:
    """Shared memory: `blocks` times `size` bytes. A place is an address plus the offset of its
    block, a multiple of `stride`."""

    def __init__(self, blocks: int, size: int, granule: int, *, checks: bool) -> None:
        self.size = size
        self.stride = -(-max(size, 1) // 1024) * 1024
        self.checks = checks
        self._granule = granule
        self.raw = np.full(blocks * self.stride, POISON, np.uint8)
        self.views: dict[int, Array] = {
            width: self.raw.view(kind)
            for width, kind in ((1, "u1"), (2, "u2"), (4, "u4"), (8, "u8"))
        }
        self.views[16] = self.raw.view("u4").reshape(-1, 4)
        count = self.raw.size // granule
        self._known = np.zeros(count, bool)
        self._writer = np.full(count, -1, np.int64)
        self._reader = np.full(count, -1, np.int64)
        self._landing = np.zeros(count, bool)
        self._busy = np.zeros(count, bool)
        self.fenced = np.zeros(count, bool)

    def granules(self, places: Places, width: int) -> Places:
        """Granules of each place, `[..., width / granule]`."""
        first = places // self._granule
        count = max(width // self._granule, 1)
        return first[..., None] + np.arange(count) if count > 1 else first[..., None]

    def require_inside(self, addresses: npt.NDArray[np.int64], width: int) -> None:
        bad = (addresses < 0) | (addresses > self.size - width)
        if bad.any():
            raise RaceError(
                f"expected {width} bytes inside of {self.size} bytes of shared memory, got byte "
                f"{addresses[bad][0]}",
                bad,
            )

    def read(self, places: Places, width: int, code: npt.NDArray[np.int64]) -> None:
        """Check a read of flat `places` by threads of the warps `code`."""
        at = self.granules(places, width)
        code = code[:, None]
        self._expect(self._known[at], "bytes that were written", "some that were not")
        self._expect(~self._landing[at], "bytes that are there", "a copy that was not waited for")
        writer = self._writer[at]
        self._expect(
            (writer >> 6 != code >> 6) | (writer == code),
            "a barrier between the write and this read",
            "another warp's write before it and no barrier",
        )
        self._mark_read(at, code)

    def _mark_read(self, at: Places, code: npt.NDArray[np.int64]) -> None:
        reader = self._reader[at]
        mixed = (reader >> 6 == code >> 6) & (reader != code)
        new = np.where(mixed, code | SEVERAL, code)
        self._reader[at] = new
        lost = self._reader[at] != new
        if lost.any():  # warps of one step read the same granule
            self._reader[at[lost]] = new[lost] | SEVERAL

    def write(
        self,
        places: Places,
        width: int,
        code: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
    ) -> None:
        """Check and carry out a write of `data [threads, width]`."""
        if not self.checks:
            self._put(places, width, data)
            return
        at, mine = self.granules(places, width), code[:, None]
        self._require_free(at, mine)
        writer = self._writer[at]
        other = (writer >> 6 == mine >> 6) & (writer != mine)
        if other.any():
            same = (self._get(places, width) == data).all(1, keepdims=True)
            self._expect(
                ~other | same,
                "a barrier between two writes",
                "another warp's write of another value before it and no barrier",
            )
        self._put(places, width, data)
        wrong = (self._get(places, width) != data).any(1, keepdims=True)
        self._expect(~wrong, "one thread to write a byte", "two values in one step")
        self._known[at] = True
        self._writer[at] = mine
        self.fenced[at] = False

    def _require_free(self, at: Places, code: npt.NDArray[np.int64]) -> None:
        self._expect(
            ~self._landing[at], "no copy under way to these bytes", "one that was not waited for"
        )
        self._expect(
            ~self._busy[at],
            "no matrix product under way that reads these bytes",
            "one that was not waited for",
        )
        reader = self._reader[at]
        self._expect(
            (reader >> 6 != code >> 6) | (reader == code),
            "a barrier between the read and this write",
            "another warp's read before it and no barrier",
        )

    def begin_copy(self, places: Places, width: int, code: npt.NDArray[np.int64]) -> None:
        """Check and begin an asynchronous copy to `places`: it may write at any time until its
        wait."""
        if self.checks:
            at, mine = self.granules(places, width), code[:, None]
            self._require_free(at, mine)
            writer = self._writer[at]
            self._expect(
                (writer >> 6 != mine >> 6) | (writer == mine),
                "a barrier between two writes",
                "another warp's write before it and no barrier",
            )
            self._landing[at] = True

    def land_copy(
        self,
        places: Places,
        width: int,
        code: npt.NDArray[np.int64],
        data: npt.NDArray[np.uint8],
    ) -> None:
        if self.checks:
            self._landing[self.granules(places, width)] = False
        self.write(places, width, code, data)

    def fence(self, block: int, code: npt.NDArray[np.int64]) -> None:
        """Make writes visible to the asynchronous proxy: those of warps `code`, and all writes
        before the last barrier."""
        count = self.stride // self._granule
        part = slice(block * count, (block + 1) * count)
        writer = self._writer[part]
        self.fenced[part] |= (writer >> 6 < code.min() >> 6) | np.isin(writer, code)

    def begin_product(self, at: Places, code: npt.NDArray[np.int64]) -> None:
        """Check the reads of a matrix product; no thread may write there until its wait."""
        self.read_granules(at, code)
        self._expect(
            self.fenced[at],
            "a fence.proxy.async between the write and this read",
            "a write without one",
        )
        self._busy[at] = True

    def read_granules(self, at: Places, code: npt.NDArray[np.int64]) -> None:
        self.read(at * self._granule, self._granule, code)

    def end_product(self, at: Places, others: Places) -> None:
        """End the reads of granules `at`. `others`: granules that running products still read."""
        self._busy[at] = False
        self._busy[others] = True

    def _get(self, places: Places, width: int) -> npt.NDArray[np.uint8]:
        found = self.views[width][places // width]
        return found.view(np.uint8).reshape(len(places), width)

    def _put(self, places: Places, width: int, data: npt.NDArray[np.uint8]) -> None:
        view = self.views[width]
        kind = np.ascontiguousarray(data).view(view.dtype)
        view[places // width] = kind if width == 16 else kind[:, 0]

    @staticmethod
    def _expect(holds: npt.NDArray[np.bool_], expected: str, got: str) -> None:
        if not holds.all():
            bad = (~holds).reshape(len(holds), -1)
            raise RaceError(f"expected {expected}, got {got}", np.logical_or.reduce(bad, axis=1))
