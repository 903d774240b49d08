"""Threads that the system may refuse to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

from kvgraph.errors import CapacityError

REFUSED = "can't start new thread"
"""Python's message about a thread that the system refused."""


@contextmanager
def threads_needed() -> Iterator[None]:
    """Raise CapacityError if a thread cannot start in this scope."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != REFUSED:
            raise
        raise CapacityError(
            "threads: expected that one more can start, which the system refused; raise its limit "
            "of processes and threads (`ulimit -u`, or the pids limit of a container) or of memory "
            "(`ulimit -v`)"
        ) from error


def start_all(threads: list[Thread]) -> None:
    """Start `threads`. CapacityError if one cannot start. After an error or an interrupt the list
    has those that run."""
    for number, thread in enumerate(threads):
        try:
            with threads_needed():
                thread.start()
        except BaseException:  # an interrupt may come once the thread runs
            del threads[number if thread.ident is None else number + 1 :]
            raise
