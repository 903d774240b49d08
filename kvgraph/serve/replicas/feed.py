"""Tells the index what an engine holds and does, after its steps.

    engine's thread: after_step -> changes of pages, first tokens --.
    event loop:      send one report at a time <--------------------'

While one report is on its way the next gathers what happens, so that a slow index costs the engine
nothing; what comes and goes meanwhile is never sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from secrets import token_bytes
from threading import Lock
from typing import cast

from kvgraph.errors import RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.journal import Cleared, Removed
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import Token
from kvgraph.serve.facts import facts_of
from kvgraph.serve.load import LoadMeter
from kvgraph.serve.replicas.report import Report, packed

BEAT_SECONDS = 5.0
"""An idle engine reports as often: an index that has been restarted hears of it."""

LOAD_SECONDS = 0.25
"""Between two reports that tell of no page and no request."""

RETRY_SECONDS = 0.2
"""After a report that did not arrive."""


class Feed:
    """Of one engine. `send` gives what `RoutingIndex.report` does."""

    def __init__(
        self,
        replica: str,
        role: str,
        engine: Engine,
        send: Callable[[Report], Awaitable[float | None]],
    ) -> None:
        self._replica = replica
        self._role = role
        self._send = send
        self._facts = facts_of(engine)
        self._epoch = token_bytes(8)
        self._sequence = 0
        self.meter = LoadMeter(engine)
        shares = isinstance(engine.kv, PagedKVCacheManager) and self._facts.prefix_caching
        self._kv = cast(PagedKVCacheManager, engine.kv) if shares else None
        self._lock = Lock()  # of the changes
        self._changes: dict[bytes, bool] = {}  # digest -> whether it is held now
        self._started: list[str] = []
        self._is_lost = True  # the index does not follow: all is to be told
        self._queued: set[str] = set()
        self._has_stepped = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._kv is not None:
            self._kv.follow()

    def queued(self, request: str) -> None:
        """Its first token, or its end, is told of."""
        self._queued.add(request)

    def ended(self, request: str) -> None:
        """Also where it had no token."""
        with self._lock:
            if request in self._queued:
                self._queued.discard(request)
                self._started.append(request)
        self._news.set()

    def after_step(self, tokens: Sequence[Token]) -> None:
        """In the engine's thread."""
        self.meter.after_step(tokens)
        with self._lock:
            self._gather()
            for token in tokens:
                if token.request_id in self._queued:
                    self._queued.discard(token.request_id)
                    self._started.append(token.request_id)
        self._has_stepped = True
        if self._changes or self._started or self._is_lost:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._news.set)

    def _gather(self) -> None:
        if self._kv is not None:
            for event in self._kv.events():
                if isinstance(event, Cleared):
                    self._is_lost = True
                else:
                    self._changes[event.digest] = not isinstance(event, Removed)
        if len(self._changes) > 2 * self._facts.routed_pages:
            self._is_lost = True  # all that is held is shorter
        if self._is_lost:
            self._changes.clear()

    async def run(self, engine: AsyncEngine) -> None:
        """Until it is cancelled, or the engine is closed."""
        while True:
            if not self._is_lost and not await self._has_news():
                with suppress(RequestError):  # what happened behind the last step
                    await engine.call(lambda own: self.after_step([]))
            try:
                report = await engine.call(self._whole) if self._is_lost else self._next()
            except RequestError:
                return
            pause: float | None
            try:
                pause = await self._send(report)
            except Exception:
                pause = None
                await asyncio.sleep(RETRY_SECONDS)
            if pause is None:
                with self._lock:
                    self._started += report.started
                    self._is_lost = True
            else:
                await asyncio.sleep(pause)

    async def _has_news(self) -> bool:
        """Whether there is something to tell of; False after a while without."""
        longest = LOAD_SECONDS if self._has_stepped else BEAT_SECONDS
        self._has_stepped = False
        try:
            await asyncio.wait_for(self._news.wait(), longest)
        except TimeoutError:
            return False
        self._news.clear()
        return True

    def _next(self) -> Report:
        with self._lock:
            changes, self._changes = self._changes, {}
            return self._report(
                False,
                packed([digest for digest, is_held in changes.items() if is_held]),
                packed([digest for digest, is_held in changes.items() if not is_held]),
            )

    def _whole(self, engine: Engine) -> Report:
        """In the engine's thread, between two steps."""
        with self._lock:
            self._is_lost = False
            held: list[bytes] = []
            if self._kv is not None:
                self._kv.events()
                held = self._kv.committed_digests()
            self._changes.clear()
            return self._report(True, packed(held), b"")

    def _report(self, is_whole: bool, added: bytes, removed: bytes) -> Report:
        self._sequence += 1
        started, self._started = tuple(self._started), []
        return Report(
            self._replica,
            self._epoch,
            self._sequence,
            is_whole,
            added,
            removed,
            started,
            self.meter.load,
            self._facts if is_whole else None,
            self._role,
        )
