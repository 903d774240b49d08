"""Replicas without Ray: engines of this process, asked as Ray's router would."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

from kvgraph import Engine
from kvgraph.serve.facts import facts_of
from kvgraph.serve.replicas.fleet import Fleet
from kvgraph.serve.replicas.host import EngineHost, ReplicaClosedError
from kvgraph.serve.replicas.index import RoutingIndex
from kvgraph.serve.replicas.messages import Message, Order
from kvgraph.serve.replicas.report import Report, packed, unpacked


class DeadError(Exception):
    """What a caller gets of a replica that has died."""


class Local:
    """Replicas and their index. `fault(replica, order, number)` may raise before each message."""

    def __init__(self) -> None:
        self.index = RoutingIndex()
        self.hosts: dict[str, EngineHost] = {}
        self.asked: list[str] = []
        self.loses_reports = self.hangs_at_reports = False
        self.fault: Callable[[str, Order, int], None] = lambda *given: None

    async def start(self, name: str, make: Callable[[], Engine]) -> EngineHost:
        host = self.hosts[name] = EngineHost(name, self._report, lambda: self.index.forget(name))
        await host.start(make)
        return host

    async def _report(self, report: Report) -> float | None:
        await asyncio.sleep(0)
        if self.hangs_at_reports:
            await asyncio.sleep(3600)
        if self.loses_reports:
            raise DeadError("the index is not there")
        return self.index.report(report)

    async def ask(self, order: Order, among: list[str] | None = None) -> AsyncIterator[Message]:
        names = among or list(self.hosts)
        name = self.index.choose(order.request_id, names, order.chain, order.num_tokens)[0]
        self.asked.append(name)
        number = 0
        async for message in self.hosts[name].generate(order):
            self.fault(name, order, number)
            number += 1
            yield message

    def fleet(self, prefill: Any = None, among: list[str] | None = None) -> Fleet:
        engine = next(iter(self.hosts.values()))._engine
        assert engine is not None
        settings = facts_of(engine.engine).settings

        def ask(order: Order) -> AsyncIterator[Message]:
            return self.ask(order, among) if among else self.ask(order)

        return Fleet(ask, is_gone, settings, prefill)

    async def is_equal(self, name: str) -> bool:
        """Whether the index knows exactly what the replica's pool holds."""
        held = await self.hosts[name].committed()
        pages = sorted(self.index.pages(name))
        return name in self.index.queued() and pages == sorted(unpacked(packed(held)))

    async def until_equal(self) -> None:
        for name in self.hosts:
            while not await self.is_equal(name):
                await asyncio.sleep(0.01)


def is_gone(error: Exception) -> bool:
    return isinstance(error, DeadError | ReplicaClosedError)


def with_replicas(
    artifact: Path, count: int, task: Callable[[Local], Awaitable[Any]], **settings: Any
) -> Any:
    """What `task` gives, which must not take a minute."""

    def make() -> Engine:
        return Engine(artifact, num_threads=1, **settings)

    async def main() -> Any:
        local = Local()
        for number in range(count):
            await local.start(f"r{number}", make)
        try:
            async with asyncio.timeout(60):
                await local.until_equal()
                return await task(local)
        finally:
            for host in local.hosts.values():
                await host.close()

    return asyncio.run(main())
