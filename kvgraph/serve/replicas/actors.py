"""The actors in Ray's processes: the routing index, the replicas, the ingress."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from contextvars import Context
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette

from kvgraph.runtime.chat import prompts_of
from kvgraph.runtime.engine import Engine
from kvgraph.serve.app import make_app
from kvgraph.serve.errors import ServeError
from kvgraph.serve.facts import EngineFacts
from kvgraph.serve.held_lines import HeldLines
from kvgraph.serve.imports import import_for_requests
from kvgraph.serve.latency import keep_heap, share_python
from kvgraph.serve.load import Load
from kvgraph.serve.log import send_lines
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.replicas.feed import LOAD_SECONDS
from kvgraph.serve.replicas.fleet import Fleet
from kvgraph.serve.replicas.host import EngineHost, ReplicaClosedError
from kvgraph.serve.replicas.index import RoutingIndex
from kvgraph.serve.replicas.index_calls import answer_of
from kvgraph.serve.replicas.messages import Message, Order
from kvgraph.serve.replicas.report import DECODE, PREFILL, Report
from kvgraph.serve.service import Served, Service
from kvgraph.serve.state import counts_of

PREFILL_TOKENS = 256
"""Prompt tokens left to compute below which the answering replica computes the prompt itself."""

LOOK_SECONDS = 0.5
"""Interval at which an ingress updates its data on the replicas, and sends lines of its log."""

LOST = "no replica runs, and none has started again; the server's log has the reason"

LAST_LINES_SECONDS = 1.0
"""Time in which an ingress that ends must send the last lines of its log."""


class EngineReplica:
    """Serve's deployment of an engine; an actor for each. `make` gives the engine."""

    async def __init__(  # type: ignore[misc]
        self, index: ActorHandle, make: Callable[[], Engine], role: str
    ) -> None:
        share_python()

        async def send(report: Report) -> float | None:
            pause: float | None = await index.report.remote(report)
            return pause

        name = str(serve.get_replica_context().replica_id.unique_id)
        self._host = EngineHost(name, send, lambda: index.forget.remote(name), role)
        await self._host.start(make)
        keep_heap()

    async def generate(self, order: Order) -> AsyncIterator[Message]:
        async for message in self._host.generate(order):
            yield message

    async def prefill(self, order: Order) -> AsyncIterator[Message]:
        async for message in self._host.prefill(order):
            yield message

    def check_health(self) -> None:
        """Raise if the engine has ended. Ray asks every 2 s, and replaces it after 3 errors."""
        self._host.require_running()

    async def committed(self) -> tuple[str, list[bytes]]:
        """Name of the replica, and digests of the pages that it holds."""
        return self._host.name, await self._host.committed()

    async def __del__(self) -> None:
        await self._host.close()


class FleetService(Service):
    """The service of an ingress: requests run on the replicas of this application."""

    def __init__(
        self,
        name: str,
        folder: Path,
        options: ServeOptions,
        index: ActorHandle,
        replicas: DeploymentHandle,
        prefill: DeploymentHandle | None,
    ) -> None:
        super().__init__(name, options)
        self._folder = folder
        self._index = index
        # Messages over gRPC, not through Ray's object store: half the time of each.
        self._generate = replicas.generate.options(stream=True, _by_reference=False)
        self._prefill = prefill and prefill.prefill.options(stream=True, _by_reference=False)
        self._fleet: Fleet | None = None
        self._load: Load | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.has_lost_replicas = False
        """No replica has run for longer than one takes to start."""
        self.lines = HeldLines()
        """Lines of the log that are not sent yet."""

    def start(self) -> None:
        """Start `load` as a task, so that the server answers meanwhile."""
        self._tasks["load"] = asyncio.create_task(self.load())

    def require_running(self) -> None:
        """Raise the error of a task that has ended."""
        for task in self._tasks.values():
            if task.done() and not task.cancelled():
                task.result()

    async def load(self) -> None:
        """Load the tokenizer, and wait for the first replica."""
        prompts = await asyncio.to_thread(prompts_of, self._folder)
        await asyncio.to_thread(import_for_requests)
        while (facts := await self._facts()) is None:
            await asyncio.sleep(LOOK_SECONDS)
        prefill = None if self._prefill is None else self._compute
        self._fleet = Fleet(self._ask, _is_gone, facts.settings, prefill)
        self.serve(prompts, self._fleet, facts, self._last_load, self._state)
        self._tasks["look"] = asyncio.create_task(self._keep_looking())

    async def _facts(self) -> EngineFacts | None:
        """Facts of an engine; None before a report, or while the index restarts."""
        with suppress(RayError):
            if await self._look():
                facts: EngineFacts | None = await answer_of(self._index.facts.remote())
                return facts
        return None

    def hurry(self) -> None:
        """Do nothing: Ray ends the replicas."""

    async def close(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        if self._fleet is not None:
            await self._fleet.close()
        with suppress(RayError, TimeoutError):
            async with asyncio.timeout(LAST_LINES_SECONDS):
                await self._send_lines()

    def _ask(self, order: Order) -> AsyncIterator[Message]:
        return _messages(self._generate, order)

    async def _compute(self, order: Order) -> AsyncIterator[Message]:
        """Let a prefill replica compute a long prompt, unless a decode replica has its pages."""
        if order.num_tokens < PREFILL_TOKENS or not order.chain:
            return
        assert self._prefill is not None
        pages = await answer_of(self._index.cached.remote(order.chain))
        if pages is None:  # the order would wait for a replica that may never start
            return
        cached = self.require_loaded().facts.page_size * pages
        if order.num_tokens - cached >= PREFILL_TOKENS:
            own = order._replace(request_id=f"prefill-{order.request_id}")
            async for message in _messages(self._prefill, own):
                yield message

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            with suppress(RayError):
                await self._look()
                await self._send_lines()
                await self._follow_drain()

    async def _send_lines(self) -> None:
        """Send lines of the log to the index, where the command takes them."""
        if lines := self.lines.take():
            try:
                await answer_of(self._index.log.remote(lines))
            except GetTimeoutError:  # it has them when it goes on
                raise
            except RayError:
                self.lines.add(lines)
                raise

    async def _follow_drain(self) -> None:
        """Start the drain when the index asks for it, and report its end at each look.

        The end is repeated, since a restarted index has forgotten it."""
        if self.is_draining:
            if self._tasks["drain"].done():
                await answer_of(self._index.end_drain.remote())
        elif await answer_of(self._index.is_draining.remote()):
            self.is_draining = True
            self._tasks["drain"] = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        """Let running requests continue for `drain_seconds`; then end them with an error."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.options.drain_seconds
        while self.num_open and loop.time() < end:
            await asyncio.sleep(0.05)
        assert self._fleet is not None, "it looks once it has loaded"
        await self._fleet.close()

    async def _look(self) -> bool:
        asked = perf_counter()
        count, found = await answer_of(self._index.load.remote())
        if found is not None:  # reports have no time of this machine's clock
            self._load = replace(found, measured=asked - LOAD_SECONDS)
            if self.served is not None:
                self.served.admission.num_engines = count
        await self._follow_loss(found is not None)
        return found is not None

    async def _follow_loss(self, has_replicas: bool) -> None:
        """Refuse requests, and end those that wait, while the index has lost all replicas."""
        is_lost = not has_replicas and await answer_of(self._index.is_lost.remote())
        self.has_lost_replicas = is_lost  # before requests that end are asked for again
        if is_lost and self._fleet is not None:
            self._fleet.lose(LOST)  # at each look: choices of a request are submitted in turn

    def require_ready(self) -> Served:
        """Return `served`; ServeError (503) also while all replicas are lost."""
        served = super().require_ready()
        if self.has_lost_replicas:
            raise ServeError(503, LOST)
        return served

    def _last_load(self) -> Load:
        assert self._load is not None
        return self._load

    async def _state(self) -> dict[str, object]:
        with suppress(RayError):  # the index restarts: show the last data
            await self._look()
        load = self._last_load()
        return {**counts_of(load.stats, load), "num_shared_pages": None, "rows": None}


async def _messages(method: DeploymentHandle, order: Order) -> AsyncIterator[Message]:
    """Yield the messages of a replica; leaving early cancels the call.

    The call runs in a new context: Ray's router identifies calls by the HTTP request's id in the
    context, and loses the second call of a request that makes several.
    """
    answer = Context().run(method.remote, order)
    try:
        async for message in answer:
            yield message
    finally:
        answer.cancel()


def _is_gone(error: Exception) -> bool:
    """Whether the error is the loss of a replica or its node, and not the request's fault."""
    if isinstance(error, RayTaskError):
        return isinstance(error.cause, ReplicaClosedError)
    return isinstance(error, RayError | RayServeException | ReplicaClosedError)


def ingress_app(
    name: str,
    folder: Path,
    options: ServeOptions,
    index: ActorHandle,
    application: str,
    roles: list[str],
) -> Starlette:
    """The application of an ingress, made in its process. Deployments are named by their role.

    gRPC there connects to replicas, so it ignores http_proxy, unless grpc_proxy is set.
    """
    os.environ.setdefault("grpc_proxy", "")
    handles = {role: serve.get_deployment_handle(role, application) for role in roles}
    service = FleetService(name, folder, options, index, handles[DECODE], handles.get(PREFILL))
    send_lines(lambda line: service.lines.add([line]))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        service.start()
        yield
        await service.close()

    app = make_app(service, lifespan)
    app.state.service = service
    return app


def start_index(name: str, namespace: str) -> ActorHandle:
    """Start the actor of the index; Ray restarts it if it dies."""
    return (
        ray.remote(RoutingIndex)
        .options(name=name, namespace=namespace, lifetime="detached", num_cpus=0, max_restarts=-1)
        .remote()
    )


class CommandLock:
    """Actor that holds the lock's name while the command that started it runs."""


def start_lock(name: str, namespace: str) -> ActorHandle:
    """Take the lock until its last handle is freed. ActorAlreadyExistsError if it is taken."""
    return (
        ray.remote(CommandLock)
        .options(name=name, namespace=namespace, num_cpus=0, max_restarts=-1)
        .remote()
    )
