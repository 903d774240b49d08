"""A process that serves answers while its engine computes: what that asks of Python and Linux."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import TypeVar

from kvgraph.runtime.async_engine import AsyncEngine

T = TypeVar("T")

MAKING = "kvgraph-make"
"""Name of a thread."""

SWITCH_SECONDS = 0.0005
"""How long a thread keeps Python's lock while another waits for it. At Python's own 5 ms a busy
event loop would add a tenth to a step of 50 ms, as the engine's thread needs it between steps."""


def share_python() -> None:
    """The event loop and the engine's thread take short turns at Python's lock."""
    sys.setswitchinterval(SWITCH_SECONDS)


def keep_heap() -> None:
    """What lives until the process ends is not searched for garbage again: each search of all of
    it stops the event loop and the engine for 45 ms."""
    gc.collect()
    gc.freeze()


def free_heap() -> None:
    """Before the process ends: libraries tell on stderr of what Python's own end does not free."""
    gc.unfreeze()


async def make_behind(
    make: Callable[[], T], nice: int, drop: Callable[[T], object] = lambda made: None
) -> T:
    """What `make` returns. It runs in a thread of its own with this niceness, which threads that it
    starts (those that compute) inherit.

    The end of the process does not wait for that thread. `drop` takes what is made when the caller
    has left.
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

    Thread(target=run, name=MAKING, daemon=True).start()
    return await made


def is_making() -> bool:
    """Whether a `make` of `make_behind` runs, its caller there or not."""
    return any(thread.name == MAKING for thread in threading.enumerate())


async def step_behind(engine: AsyncEngine, nice: int) -> None:
    """The engine's thread goes behind the event loop's, but before those that only compute: it
    holds Python's lock between two steps, and none of them may keep the processor from it then."""
    await engine.call(lambda _: _add_niceness(nice // 2))


def _add_niceness(nice: int) -> None:
    """To the calling thread, and to those that it starts from now on. See sched(7): niceness is a
    thread's on Linux alone, elsewhere the whole process's."""
    if nice and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, 0, min(19, os.getpriority(os.PRIO_PROCESS, 0) + nice))
