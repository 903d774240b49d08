"""EngineHost: a replica's engine, which serves ingresses and reports to the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from kvgraph.errors import ArtifactError, MissingDependencyError, RequestError, UnsupportedError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.serve.imports import import_for_requests
from kvgraph.serve.replicas.feed import Feed
from kvgraph.serve.replicas.messages import Accepted, Message, Order, Piece, Refused
from kvgraph.serve.replicas.report import DECODE, Report

SETTLE_SECONDS = 10.0
"""Time in which the pages of a prompt must reach the tiers."""

LOOK_SECONDS = 0.002


class ReplicaClosedError(Exception):
    """The replica is shutting down: send the request to another one."""


class EngineHost:
    """Runs the orders of ingresses. `name`: the replica's; `send`: sends a report to the index.

    `leave`: called if the engine ends by itself, so that the index sends no more requests.
    """

    def __init__(
        self,
        name: str,
        send: Callable[[Report], Awaitable[float | None]],
        leave: Callable[[], object],
        role: str = DECODE,
    ) -> None:
        self.name, self.role = name, role
        self._send, self._leave = send, leave
        self._engine: AsyncEngine | None = None
        self._feed: Feed | None = None
        self._feeding: asyncio.Task[None] | None = None

    async def start(self, make: Callable[[], Engine]) -> None:
        await asyncio.to_thread(import_for_requests)
        engine = await asyncio.to_thread(make)
        shared = AsyncEngine(engine)
        self._feed = Feed(self.name, self.role, engine, self._send)
        shared.before_step = self._feed.meter.before_step
        shared.after_step = self._feed.after_step
        shared.after_failure = lambda error: self._leave()
        await shared.start()
        self._feeding = asyncio.create_task(self._feed.run(shared))
        self._engine = shared

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        if self._feeding is not None:
            self._feeding.cancel()

    def require_running(self) -> None:
        """Raise ReplicaClosedError if the engine has ended, such as by a lost rank."""
        if self._engine is None or self._engine.is_closed:
            raise ReplicaClosedError(self.name)

    async def generate(self, order: Order) -> AsyncIterator[Message]:
        """Yield `Accepted` and then tokens as they come, or `Refused`. Leaving early cancels."""
        assert self._engine is not None
        assert self._feed is not None
        prompt = np.frombuffer(order.prompt, "<i4").tolist()
        self._feed.queued(order.request_id)
        stream = None
        try:
            try:
                stream = await self._engine.submit(
                    prompt,
                    order.sampling,
                    request_id=order.request_id,
                    cache_salt=order.cache_salt,
                )
            except (ArtifactError, RequestError, UnsupportedError, MissingDependencyError) as error:
                if self._engine.is_closed:
                    raise ReplicaClosedError(self.name) from error
                yield Refused(str(error))
                return
            yield Accepted()
            async for tokens in stream:
                if tokens[-1].error and self._engine.is_closed:
                    raise ReplicaClosedError(self.name)
                stats = stream.stats
                yield Piece(tokens, stats.cached_tokens, stats.queue_seconds or 0.0)
        finally:
            if stream is not None:
                stream.cancel()
            self._feed.ended(order.request_id)

    async def prefill(self, order: Order) -> AsyncIterator[Message]:
        """Yield `Accepted`; end once the prompt is computed and its pages are in the tiers.

        A prompt that cannot be computed, or a tier that takes nothing, raises nothing: the decode
        replica refuses or computes the prompt. TimeoutError for a slow tier.
        """
        assert self._engine is not None
        only = SamplingParams(max_new_tokens=1, ignore_eos=True)
        async for message in self.generate(order._replace(sampling=only)):
            if isinstance(message, Refused):
                return
            if isinstance(message, Accepted):
                yield message
        prompt = np.frombuffer(order.prompt, "<i4").tolist()
        context = TextContext(order.request_id, prompt, cache_salt=order.cache_salt)
        kv = self._engine.engine.kv
        if not isinstance(kv, PagedKVCacheManager):
            return
        keys = kv.tier_keys(context)
        async with asyncio.timeout(SETTLE_SECONDS):
            while not kv.has_settled(keys):
                await asyncio.sleep(LOOK_SECONDS)

    async def committed(self) -> list[bytes]:
        """Digests of the pages that the pool holds now."""
        assert self._engine is not None
        return await self._engine.call(_committed)


def _committed(engine: Engine) -> list[bytes]:
    kv = engine.kv
    return kv.committed_digests() if isinstance(kv, PagedKVCacheManager) else []
