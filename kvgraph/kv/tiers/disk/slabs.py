"""Slots in files: slab `stride` is one file of slots of `stride` bytes, reused and never moved."""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

from kvgraph.kv.tiers.disk.folder import PrivateFolder
from kvgraph.signal_handlers import ignoring

BLOCK = 4096
"""Slots start at a block of the file system, so that an evicted slot can free its blocks."""

SLAB = re.compile(r"[1-9]\d*\.pages")

KEEP_SIZE_AND_PUNCH_HOLE = 1 | 2  # fallocate(2)


class Slot(NamedTuple):
    """Bytes `[slot * stride, (slot + 1) * stride)` of slab `stride`."""

    stride: int
    slot: int


def stride_of(size: int) -> int:
    """Bytes of a slot that holds a record of `size` bytes: `size` rounded up to blocks."""
    return max(1, -(-size // BLOCK)) * BLOCK


class Slabs:
    """Slab files of one folder. All calls may raise OSError, or DamagedError if it is no file."""

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._files: dict[int, int] = {}
        self._libc = ctypes.CDLL(None)

    def write(self, at: Slot, parts: Sequence[memoryview]) -> None:
        """Write a record without syncing it to disk: a checksum detects lost bytes."""
        file, offset, rest = self._file(at.stride), at.slot * at.stride, list(parts)
        while rest:  # a call moves at most 2 GiB on Linux
            count = os.pwritev(file, rest, offset)
            if not count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            offset += count
            while rest and count >= rest[0].nbytes:
                count -= rest.pop(0).nbytes
            if count:
                rest[0] = rest[0][count:]

    def read(self, at: Slot, out: memoryview) -> bool:
        """Fill `out` from a slot; False if the file is too short."""
        file, offset, rest = self._file(at.stride), at.slot * at.stride, out
        while rest:
            count = os.preadv(file, [rest], offset)
            if not count:
                return False
            offset, rest = offset + count, rest[count:]
        return True

    def free(self, at: Slot) -> None:
        """Give a slot's blocks back to the file system, if it supports that (ext4, XFS, tmpfs...).

        Otherwise the blocks stay in use until the slot is reused.
        """
        span = (ctypes.c_int64(at.slot * at.stride), ctypes.c_int64(at.stride))
        self._libc.fallocate(self._file(at.stride), KEEP_SIZE_AND_PUNCH_HOLE, *span)

    def close(self) -> None:
        with ExitStack() as files:
            while self._files:
                files.enter_context(ignoring(OSError))
                files.callback(os.close, self._files.popitem()[1])

    def _file(self, stride: int) -> int:
        file = self._files.get(stride)
        if file is None:
            file = self._folder.open(f"{stride}.pages", os.O_RDWR | os.O_CREAT)
            self._files[stride] = file
        return file
