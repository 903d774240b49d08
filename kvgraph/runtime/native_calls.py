"""Native calls of threads that still run when Python ends.

Python does not wait for daemon threads, nor for a thread whose `join` was interrupted: such a
thread stops where it next needs Python's lock. If that is in C++ or Rust code, the process aborts.
So the end of Python waits for the native calls of other threads, and refuses their next ones.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident

from kvgraph.errors import RequestError

Call = tuple[str, int]
"""A call's name, and the thread that makes it."""

LOOK_SECONDS = 0.001
"""Interval at which the end of Python looks for calls that run."""

HOLD_SECONDS = 1.0
"""Time for which a refused thread waits for the end of the process. A thread that prints its error
while Python closes stderr would abort the process too."""

RUNNING: set[Call] = set()
"""Calls that run now. Usage, where a context manager would cost too much:

try:
    RUNNING.add(call)
    if Ending.thread is not None:
        refuse(call)
    ...
finally:
    RUNNING.discard(call)
"""


class Ending:
    thread: int | None = None
    """The thread that ends Python; None before that."""


@contextmanager
def native_call(name: str) -> Iterator[None]:
    """Make the end of Python wait for this scope. RequestError once Python ends."""
    call = (name, get_ident())
    try:
        RUNNING.add(call)
        if Ending.thread is not None:
            refuse(call)
        yield
    finally:
        RUNNING.discard(call)


def refuse(call: Call) -> None:
    """Raise RequestError, except in the thread that ends Python."""
    if call[1] != Ending.thread:
        RUNNING.discard(call)
        time.sleep(HOLD_SECONDS)
        raise RequestError(f"{call[0]}: expected no call while Python ends, got one")


def _end() -> None:
    """Wait for the calls of other threads, also if interrupts come: each call ends by itself."""
    Ending.thread = own = get_ident()
    while True:
        try:
            while any(thread != own for _, thread in tuple(RUNNING)):
                time.sleep(LOOK_SECONDS)
            return
        except BaseException:
            continue


# The hooks of `weakref` come with its first finalizer. They close tiers and end other ranks, so
# they must run after this one: hooks that are registered first run last.
weakref.finalize(_end, int)
atexit.register(_end)
os.register_at_fork(after_in_child=RUNNING.clear)  # a fork has no other threads
