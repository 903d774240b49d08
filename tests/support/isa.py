"""The native kernels of one instruction set, in this process."""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

import pytest

from kvgraph.ops import native


@contextmanager
def forced_isa(name: str) -> Iterator[native.Library]:
    """`native` calls the kernels of `name`; skips where this processor has none of them."""
    library = load(name)
    if isa_of(library) != name:
        pytest.skip(f"this processor has no {name}")
    with mock.patch.object(native, "library", return_value=library):
        yield library


@cache
def load(name: str) -> native.Library:
    """A second copy of the installed library, which has chosen under KVGRAPH_CPU_ISA=`name`."""
    return load_copy(native.library_path("cpu"), name)


def load_copy(built: Path, name: str) -> native.Library:
    """A copy of the library in `built`, which has chosen under KVGRAPH_CPU_ISA=`name`.

    A library chooses once in a process: the copy is another file, so the loader takes it for
    another library. Its file is not needed once it is mapped.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = native.Library(Path(shutil.copy(built, Path(folder, f"{name or 'best'}.so"))))
        with mock.patch.dict(os.environ, KVGRAPH_CPU_ISA=name):
            isa_of(library)
    return library


def isa_of(library: native.Library) -> str:
    """What it has chosen; "": nothing, as it may not."""
    library.dll.kvg_cpu_isa.restype = ctypes.c_char_p
    return str(library.dll.kvg_cpu_isa().decode())
