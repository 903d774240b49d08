"""Threads in which an AsyncEngine builds slow requests: grammars and long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class RequestThreads:
    """Own threads, not the event loop's default executor: its threads may all be waiting for
    this engine."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "kvgraph-requests")
        self._compiling = asyncio.Lock()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def run_alone(self, compile_grammar: Callable[[], T]) -> T:
        """Run one compilation at a time, since an engine caches the grammars that it compiles.

        A compilation whose caller was cancelled runs to its end and keeps the lock until then.
        """
        await self._compiling.acquire()
        running = self.run(compile_grammar)

        def release(done: asyncio.Future[T]) -> None:
            self._compiling.release()
            if not done.cancelled():
                done.exception()  # mark it as read: the caller may be gone

        running.add_done_callback(release)
        return await asyncio.shield(running)

    def close(self) -> None:
        """Accept no more work; do not wait for running work."""
        self._threads.shutdown(wait=False)
