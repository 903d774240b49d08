"""Threads in which an AsyncEngine compiles grammars and tokenizes texts, and its event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from kvgraph.contract.threads import executor, threads_needed
from kvgraph.errors import RequestError

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

T = TypeVar("T")


class RequestThreads:
    """Own threads, not the event loop's default executor: its threads may all be waiting for
    this engine.

    One thread compiles grammars, since an engine caches those that it compiles. A compilation whose
    caller has left runs to its end.
    """

    def __init__(self) -> None:
        self._texts = executor(2, "kvgraph-texts")
        self._grammars = executor(1, "kvgraph-grammars")
        self._closed = asyncio.Event()

    async def tokenize(self, work: Callable[[], T]) -> T:
        return await self._run(self._texts, work)

    async def compile(self, work: Callable[[], T]) -> T:
        return await self._run(self._grammars, work)

    async def _run(self, threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """The result of `work`. RequestError as soon as `close` is called."""
        if self._closed.is_set():
            raise _stopped()
        with threads_needed():
            working = asyncio.get_running_loop().run_in_executor(threads, work)
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((working, closing), return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise _stopped()
            return working.result()
        finally:
            working.cancel()
            closing.cancel()

    def close(self) -> None:
        """Accept no more work; do not wait for running work."""
        self._closed.set()
        for threads in (self._texts, self._grammars):
            threads.shutdown(wait=False)


def _stopped() -> RequestError:
    return RequestError("AsyncEngine.submit: expected a running engine, got a stopped one")
