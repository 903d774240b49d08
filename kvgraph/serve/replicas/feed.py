"""Feed: reports an engine's pages and load to the index after its steps.

    engine's thread: after_step -> changes of pages, first tokens --.
    event loop:      send one report at a time <--------------------'

While one report is being sent, the next one collects changes, so that a slow index costs the engine
nothing. A page that is added and removed meanwhile is never reported.
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
from kvgraph.kv.pool.journal import PageRemoved, PagesCleared
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import Token
from kvgraph.serve.facts import facts_of
from kvgraph.serve.load import LoadMeter
from kvgraph.serve.replicas.report import Report, packed

BEAT_SECONDS = 5.0
"""Interval of an idle engine's reports, so that a restarted index learns of it."""

LOAD_SECONDS = 0.25
"""Interval of reports on load alone, without changes of pages or requests."""

SEND_SECONDS = 10.0
"""Time in which a report must be answered; then its answer may be lost, and all pages are sent."""

RETRY_SECONDS = 0.2
"""Pause after a report that did not arrive."""


class Feed:
    """Reports on one engine. `send`: returns the result of `RoutingIndex.report`."""

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
        self._lock = Lock()  # guards the changes
        self._changes: dict[bytes, bool] = {}  # digest -> whether the page is held now
        self._started: list[str] = []
        self._is_lost = True  # the index is out of date: report all pages
        self._queued: set[str] = set()
        self._has_stepped = False
        self._news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._kv is not None:
            self._kv.follow()

    def queued(self, request: str) -> None:
        """Register a request, so that its first token or its end is reported."""
        self._queued.add(request)

    def ended(self, request: str) -> None:
        """Report the end of a request, if its first token was not reported."""
        with self._lock:
            if request in self._queued:
                self._queued.discard(request)
                self._started.append(request)
        self._news.set()

    def after_step(self, tokens: Sequence[Token]) -> None:
        """Collect the changes of a step. Call it in the engine's thread."""
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
                if isinstance(event, PagesCleared):
                    self._is_lost = True
                else:
                    self._changes[event.digest] = not isinstance(event, PageRemoved)
        if len(self._changes) > 2 * self._facts.routed_pages:
            self._is_lost = True  # a whole report is shorter
        if self._is_lost:
            self._changes.clear()

    async def run(self, engine: AsyncEngine) -> None:
        """Send reports until the task is cancelled, or the engine is closed."""
        while True:
            if not self._is_lost and not await self._has_news():
                with suppress(RequestError):  # collects changes since the last step
                    await engine.call(lambda own: self.after_step([]))
            try:
                report = await engine.call(self._whole) if self._is_lost else self._next()
            except RequestError:
                return
            pause: float | None
            try:
                async with asyncio.timeout(SEND_SECONDS):
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
        """Wait for changes to report; False if none come in time."""
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
        """Build a report of all pages. Call it in the engine's thread, between two steps."""
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
