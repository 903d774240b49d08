"""Threads in which an AsyncEngine makes requests of what takes long: grammars and long texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Building:
    """Of its own: those of the event loop may all wait for this engine."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, "kvgraph-requests")
        self._compiling = asyncio.Lock()

    def run(self, work: Callable[[], T]) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def run_alone(self, compile_grammar: Callable[[], T]) -> T:
        """One at a time, as an engine keeps what it has compiled: the thread of one whose caller
        has left runs on."""
        await self._compiling.acquire()
        running = self.run(compile_grammar)

        def release(done: asyncio.Future[T]) -> None:
            self._compiling.release()
            if not done.cancelled():
                done.exception()  # its caller may have left, and would not read it

        running.add_done_callback(release)
        return await asyncio.shield(running)

    def close(self) -> None:
        """No more work; what runs is not waited for."""
        self._threads.shutdown(wait=False)
