"""Which pages of a file the system has in memory, and files that it has forgotten."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest


def in_memory(path: Path) -> npt.NDArray[np.bool_]:
    """Whether each page of a file that the caller may write to is in memory (mincore(2))."""
    found = np.zeros(-(-path.stat().st_size // mmap.PAGESIZE), np.uint8)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        memory = np.frombuffer(pages, np.uint8)
        arguments = (memory.ctypes.data, memory.nbytes, found.ctypes.data)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mincore(*map(ctypes.c_void_p, arguments)):
            raise OSError(ctypes.get_errno(), "mincore", str(path))
        del memory  # it holds the map open
    return (found & 1).astype(bool)


def forget(path: Path) -> None:
    """Write a file to its disk, and drop it from memory; no process may have touched a map of it.

    Skips on a file system that has files in memory only.
    """
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if in_memory(path).any():
        pytest.skip(f"{path}: its file system keeps it in memory")
