"""Settings of Python and Linux that keep the event loop responsive while the engine computes."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from threading import Thread
from typing import TypeVar

from kvgraph.contract.threads import threads_needed
from kvgraph.runtime.async_engine import AsyncEngine

T = TypeVar("T")

MAKING = "kvgraph-make"
"""Name of the threads of `make_behind`."""

SWITCH_SECONDS = 0.0005
"""Time after which a thread must release Python's lock if another waits for it. With Python's 5 ms
a busy event loop would add a tenth to a step of 50 ms, as the engine needs the lock between steps.
"""


def share_python() -> None:
    """Make the event loop and the engine's thread alternate at Python's lock in short turns."""
    sys.setswitchinterval(SWITCH_SECONDS)


def keep_heap() -> None:
    """Exclude all objects that live now from garbage collection: a full collection of them stops
    the event loop and the engine for 45 ms."""
    gc.collect()
    gc.freeze()


def free_heap() -> None:
    """Undo `keep_heap` before the process ends: libraries report unfreed objects on stderr."""
    gc.unfreeze()


async def make_behind(
    make: Callable[[], T], nice: int, drop: Callable[[T], object] = lambda made: None
) -> T:
    """Run `make` in a new thread with a higher niceness, in this context; return its result.

    `nice`: added niceness, which threads that `make` starts (those that compute) inherit.
    `drop`: called with the result if the caller has left. The process ends without waiting for the
    thread. CapacityError if the system refuses a thread.
    """
    loop = asyncio.get_running_loop()
    made: asyncio.Future[T] = loop.create_future()

    def give(value: T) -> None:
        if made.cancelled():
            drop(value)
        else:
            made.set_result(value)

    def fail(error: BaseException) -> None:
        if not made.cancelled():
            made.set_exception(error)

    def run() -> None:
        try:
            _add_niceness(nice)
            value = make()
        except BaseException as error:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(fail, error)
            return
        try:
            loop.call_soon_threadsafe(give, value)
        except RuntimeError:  # the loop is closed
            drop(value)

    with threads_needed():
        Thread(target=copy_context().run, args=(run,), name=MAKING, daemon=True).start()
    return await made


def is_making() -> bool:
    """Whether a thread of `make_behind` runs, even if its caller has left."""
    return any(thread.name == MAKING for thread in threading.enumerate())


async def step_behind(engine: AsyncEngine, nice: int) -> None:
    """Give the engine's thread a niceness between the event loop's and the compute threads'.

    It holds Python's lock between two steps; compute threads must not preempt it then."""
    await engine.call(lambda _: _add_niceness(nice // 2))


def _add_niceness(nice: int) -> None:
    """Add niceness to the calling thread, and to threads that it starts later.

    See sched(7): niceness is per thread only on Linux, so other systems are left unchanged. If the
    system refuses the call, as a filter of system calls does, the niceness stays, with a warning.
    """
    if nice and sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice))
        except OSError as error:
            warnings.warn(
                "niceness: expected setpriority to change it for threads that compute, got "
                f"{error.strerror!r}; answers may be later; allow the call, or give --nice 0",
                stacklevel=1,
            )
