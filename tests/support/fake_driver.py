"""Builds the fake NVIDIA driver, found as libcuda.so.1 by a process of its own, and its images."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("fake_driver.c")


def build(folder: Path, *options: str) -> Path:
    """`folder/libcuda.so.1`; put the folder on LD_LIBRARY_PATH. Skips without a C compiler."""
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C compiler to build the fake driver with")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "libcuda.so.1"
    flags = ["-shared", "-fPIC", "-pthread", "-Wl,-soname,libcuda.so.1", *options]
    subprocess.run([compiler, *flags, "-o", str(target), str(SOURCE)], check=True)
    return folder


def cubin(flags: int, *, abi: int = 8, tag: bytes = b"tag0", machine: int = 190) -> bytes:
    """An image with one section and no code; `tag` is what the fake driver knows it by."""
    ident = b"\x7fELF\x02\x01\x01\x41" + bytes([abi]) + bytes(7)
    fields = (2, machine, 1, 0, 0, 68, flags, 64, 0, 0, 64, 1, 0)
    section = struct.pack("<IIQQQQIIQQ", 0, 1, 0, 0, 64, 4, 0, 0, 1, 0)
    return ident + struct.pack("<HHIQQQIHHHHHH", *fields) + tag + section
