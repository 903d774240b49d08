"""Threads that read, round and pack weights ahead of the thread that writes them."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from kvgraph.contract.devices import processors
from kvgraph.contract.threads import executor, threads_needed

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

MOST = 8
"""Most threads: more would pack faster than one thread can write."""

Result = TypeVar("Result")


def in_order(calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Yield the results of `calls` in order, with calls run ahead on threads.

    At most one more call than there are threads is pending. A call must not use this function.
    """
    threads, ahead = _threads()
    begun: deque[Future[Result]] = deque()
    for call in calls:
        with threads_needed():
            begun.append(threads.submit(call))
        if len(begun) > ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


@cache
def _threads() -> tuple[ThreadPoolExecutor, int]:
    count = min(MOST, len(processors()))
    return executor(count, "kvgraph-pack"), count


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not survive a fork
