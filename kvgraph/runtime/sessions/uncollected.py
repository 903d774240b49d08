"""Python's collector, which must not run while a thread captures CUDA work."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """No cycles are collected in the meantime, in any thread: an object in one may free memory of
    the device, which ends a capture of the thread that does so."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
