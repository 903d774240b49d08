"""A replica: one engine, asked by ingresses and followed by the index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from kvgraph.errors import ArtifactError, MissingDependencyError, RequestError, UnsupportedError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.engine import Engine
from kvgraph.serve.replicas.feed import Feed
from kvgraph.serve.replicas.messages import Accepted, Message, Order, Piece, Refused
from kvgraph.serve.replicas.report import Report


class ReplicaClosedError(Exception):
    """The replica ends: another one is to be asked."""


class EngineHost:
    """Runs what ingresses ask; `name` is the replica's, `send` hands a report to the index."""

    def __init__(self, name: str, send: Callable[[Report], Awaitable[float | None]]) -> None:
        self.name = name
        self._send = send
        self._engine: AsyncEngine | None = None
        self._feed: Feed | None = None
        self._feeding: asyncio.Task[None] | None = None

    async def start(self, make: Callable[[], Engine]) -> None:
        engine = await asyncio.to_thread(make)
        shared = AsyncEngine(engine)
        self._feed = Feed(self.name, engine, self._send)
        shared.after_step = self._feed.after_step
        await shared.start()
        self._feeding = asyncio.create_task(self._feed.run(shared))
        self._engine = shared

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        if self._feeding is not None:
            self._feeding.cancel()

    async def generate(self, order: Order) -> AsyncIterator[Message]:
        """`Accepted` and then the tokens as they come, or `Refused`. Leaving it cancels."""
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

    async def committed(self) -> list[bytes]:
        """Digests of the pages that the pool holds now."""
        assert self._engine is not None
        return await self._engine.call(_committed)


def _committed(engine: Engine) -> list[bytes]:
    kv = engine.kv
    return kv.committed_digests() if isinstance(kv, PagedKVCacheManager) else []
