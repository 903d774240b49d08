"""Threads that read, round and pack weights, while those before them are written."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from kvgraph.contract.devices import processors

MOST = 8
"""One thread writes, and takes no more than so many make."""

Result = TypeVar("Result")


def in_order(calls: Iterable[Callable[[], Result]]) -> Iterator[Result]:
    """Results of `calls`, in their order; a call for each thread runs before its result is taken.

    A call makes no calls of its own.
    """
    threads, ahead = _threads()
    begun: deque[Future[Result]] = deque()
    for call in calls:
        begun.append(threads.submit(call))
        if len(begun) > ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


@cache
def _threads() -> tuple[ThreadPoolExecutor, int]:
    count = min(MOST, len(processors()))
    return ThreadPoolExecutor(count, "kvgraph-pack"), count


os.register_at_fork(after_in_child=_threads.cache_clear)  # a fork has none of them
