"""Threads that the system may refuse to start, and that Python refuses while it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import Thread
from typing import TYPE_CHECKING, TypeVar

from kvgraph.errors import CapacityError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Job = TypeVar("Job")
Result = TypeVar("Result")

REFUSED = "can't start new thread"
"""Python's message about a thread that the system refused."""

ENDING = "shutdown"
"""Part of Python's messages about threads that it refuses once the main thread has ended: of
`Thread.start`, of an executor, and of the import of executors."""


class EndingError(CapacityError):
    """Python ends, and starts no thread any more."""


@contextmanager
def threads_needed() -> Iterator[None]:
    """Raise CapacityError if a thread cannot start in this scope; EndingError if Python ends."""
    try:
        yield
    except RuntimeError as error:
        if ENDING in str(error):
            raise EndingError(
                "threads: expected that one more can start, got the end of Python, which starts "
                "none; do this before the main thread ends"
            ) from error
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


def executor(count: int | None, name: str) -> ThreadPoolExecutor:
    """Make an executor. EndingError if Python ends: it then refuses the import too."""
    with threads_needed():
        from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(count, name)


@contextmanager
def mapped(
    call: Callable[[Job], Result], jobs: Iterable[Job], name: str
) -> Iterator[Iterator[Result]]:
    """Yield the results of `call` in the order of `jobs`, computed on threads named `name`.

    If Python ends, the calling thread computes them.
    """
    jobs = list(jobs)
    with ExitStack() as ending:
        try:
            with threads_needed():
                threads = executor(None, name)
                ending.callback(threads.shutdown, cancel_futures=True)
                results = threads.map(call, jobs)
        except EndingError:
            results = map(call, jobs)
        yield results
