"""The service of an ingress, whose index Ray restarts, and which is told to end."""

from __future__ import annotations

import asyncio
import shutil
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette

pytest.importorskip("ray", reason="pip install 'kvgraph[ray]'")

from kvgraph import ArtifactError, SamplingParams
from kvgraph.serve.errors import ServeError
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.replicas.messages import Accepted, Message, Order
from tests.serve.replicas.in_process import Local, with_replicas

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, of pydantic
    from ray.exceptions import GetTimeoutError, RayActorError

    from kvgraph.serve.replicas import actors, application, index_calls


class Handle:
    """An actor's methods, asked as Ray's are; `before(name)` may raise."""

    def __init__(self, actor: Any, before: Callable[[str], None] = lambda name: None) -> None:
        self._actor, self._before = actor, before
        self.hangs = False

    def __getattr__(self, name: str) -> Any:
        return Method(lambda *given: self._ask(name, given))

    async def _ask(self, name: str, given: Any) -> Any:
        await asyncio.sleep(0)
        self._before(name)
        while self.hangs:
            await asyncio.sleep(0.01)
        return getattr(self._actor, name)(*given)


class Method:
    def __init__(self, ask: Callable[..., Any]) -> None:
        self.remote = ask

    def options(self, **given: Any) -> Method:
        return self


class Answer:
    def __init__(self, messages: AsyncIterator[Message]) -> None:
        self._messages = messages

    def __aiter__(self) -> AsyncIterator[Message]:
        return self._messages

    def cancel(self) -> None:
        pass


class Replicas:
    def __init__(self, local: Local) -> None:
        self.generate = Method(lambda order: Answer(local.ask(order)))


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "LOOK_SECONDS", 0.01)


def service(folder: Path, local: Local, index: Handle, **options: Any) -> Any:
    handle: Any = index
    replicas: Any = Replicas(local)
    return actors.FleetService("m", folder, ServeOptions(**options), handle, replicas, None)


def test_an_index_that_is_restarted_as_an_ingress_starts(artifact: Path) -> None:
    """It dies at each of its questions, and knows no replica for a while."""

    async def task(local: Local) -> None:
        asked: list[str] = []
        facts, local.index.facts = local.index.facts, lambda: None  # type: ignore[method-assign]

        def before(name: str) -> None:
            asked.append(name)
            if len(asked) in (1, 3):
                raise RayActorError
            if len(asked) > 6:
                local.index.facts = facts  # type: ignore[method-assign]

        own = service(artifact, local, Handle(local.index, before))
        own.start()
        while own.served is None:
            own.require_running()
            await asyncio.sleep(0.01)
        assert asked[:4] == ["load", "load", "facts", "load"]
        assert len(asked) > 6
        await own.close()
        own.require_running()

    with_replicas(artifact, 1, task, num_pages=100)


def test_an_ingress_that_cannot_be_ready_is_unhealthy(artifact: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(artifact, tmp_path / "damaged"))
    (folder / "tokenizer.json").write_text("damaged")

    async def task(local: Local) -> None:
        own = service(folder, local, Handle(local.index))
        ingress = application._Ingress([])
        ingress.app = Starlette()
        ingress.app.state.service = own
        own.start()
        ingress.check_health()
        await asyncio.wait(own._tasks.values())
        with pytest.raises(ArtifactError, match=r"tokenizer\.json"):
            ingress.check_health()
        await own.close()

    with_replicas(artifact, 1, task, num_pages=100)


def test_what_runs_longer_than_a_drain_ends_with_an_error(artifact: Path) -> None:
    async def task(local: Local) -> None:
        own = service(artifact, local, Handle(local.index), drain_seconds=0.1)
        await own.load()
        served = own.require_ready()
        served.admission.enter([5, 6, 7])

        async def ask(order: Order) -> AsyncIterator[Message]:
            async for message in local.hosts["r0"].generate(order):
                yield message
                await asyncio.sleep(0.01)  # it takes seconds

        local.ask = ask  # type: ignore[method-assign, assignment]
        long = SamplingParams(max_new_tokens=1500, ignore_eos=True)
        stream = await served.runner.submit([5, 6, 7], long)
        local.index.drain()
        tokens = [token async for tokens in stream for token in tokens]
        assert "the server was closed" in str(tokens[-1].error)
        assert own.is_draining
        own.require_running()
        await own.close()

    with_replicas(artifact, 1, task, num_pages=100)


def test_a_drain_ends_with_the_last_request(artifact: Path) -> None:
    """The command is told, also by way of an index that was restarted meanwhile."""

    async def task(local: Local) -> None:
        handle = Handle(local.index)
        own = service(artifact, local, handle, drain_seconds=100)
        await own.load()
        served = own.require_ready()
        place = served.admission.enter([5, 6, 7])
        assert not local.index.drain()
        while not own.is_draining:
            await asyncio.sleep(0.01)
        with pytest.raises(ServeError, match="the server takes no more requests"):
            own.require_ready()
        stream = await served.runner.submit([5, 6, 7], SamplingParams(max_new_tokens=4))
        tokens = [token async for tokens in stream for token in tokens]
        assert tokens[-1].error is None, "what runs goes on, at replicas that are there"
        assert not local.index.drain()
        served.admission.start(place)
        served.admission.leave(place)
        while not local.index.drain():
            await asyncio.sleep(0.01)
        handle._actor = local.index = type(local.index)()
        while not local.index.drain():
            await asyncio.sleep(0.01)
        await own.close()

    with_replicas(artifact, 1, task, num_pages=100)


def test_lines_of_the_log_reach_the_command(artifact: Path) -> None:
    """All of them before the drain ends, also by way of an index that is restarted meanwhile."""

    async def task(local: Local) -> None:
        asked: list[str] = []

        def before(name: str) -> None:
            if name == "log":
                asked.append(name)
                if len(asked) == 1:
                    raise RayActorError

        own = service(artifact, local, Handle(local.index, before))
        await own.load()
        own.lines.add(["a", "b"])
        while len(asked) < 2:
            await asyncio.sleep(0.01)
        assert local.index.lines() == ["a", "b"]
        own.lines.add(["c"])
        while not local.index.drain():
            await asyncio.sleep(0.01)
        assert local.index.lines() == ["c"]
        own.lines.add(["d"])  # of a request that the end of the ingress cuts
        await own.close()
        assert local.index.lines() == ["d"]

    with_replicas(artifact, 1, task, num_pages=100)


def test_the_page_shows_the_last_numbers_while_the_index_is_restarted(artifact: Path) -> None:
    async def task(local: Local) -> None:
        gone: list[str] = []

        def before(name: str) -> None:
            if gone:
                raise RayActorError

        own = service(artifact, local, Handle(local.index, before))
        await own.load()
        gone.append("index")
        state = await own.require_ready().state()
        assert state["num_pages"] == 100
        assert (state["rows"], state["num_shared_pages"]) == (None, None)  # unknown, not 0
        await own.close()

    with_replicas(artifact, 1, task, num_pages=100)


def test_an_index_that_hangs_counts_as_one_that_restarts(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines of the log that it has are not sent again."""
    monkeypatch.setattr(index_calls, "ANSWER_SECONDS", 0.05)

    async def task(local: Local) -> None:
        handle = Handle(local.index)
        handle.hangs = True
        own = service(artifact, local, handle)
        own.start()
        await asyncio.sleep(0.2)
        own.require_running()
        handle.hangs = False
        while own.served is None:
            await asyncio.sleep(0.01)
        handle.hangs = True
        assert (await own.require_ready().state())["num_pages"] == 100
        await own.close()
        own.require_running()
        own.lines.add(["a"])
        with pytest.raises(GetTimeoutError):
            await own._send_lines()
        assert own.lines.take() == []

    with_replicas(artifact, 1, task, num_pages=100)


def test_a_prompt_is_computed_by_its_own_replica_while_the_index_hangs(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index_calls, "ANSWER_SECONDS", 0.05)

    async def task(local: Local) -> None:
        handle = Handle(local.index)
        own = service(artifact, local, handle)
        own._prefill = Method(lambda order: pytest.fail("no prefill replica is asked"))
        await own.load()
        handle.hangs = True
        prompt = [5] * (actors.PREFILL_TOKENS + 1)
        few = SamplingParams(max_new_tokens=4, ignore_eos=True)
        stream = await own.require_ready().runner.submit(prompt, few)
        tokens = [token async for tokens in stream for token in tokens]
        assert (len(tokens), tokens[-1].error) == (4, None)
        await own.close()

    with_replicas(artifact, 1, task, num_pages=100)


def test_no_prompt_waits_for_a_prefill_replica_that_never_started(artifact: Path) -> None:
    async def task(local: Local) -> None:
        own = service(artifact, local, Handle(local.index))
        own._prefill = Method(lambda order: pytest.fail("no prefill replica is asked"))
        await own.load()
        prompt = [5] * (actors.PREFILL_TOKENS + 1)
        few = SamplingParams(max_new_tokens=4, ignore_eos=True)
        stream = await own.require_ready().runner.submit(prompt, few)
        assert [token.error async for tokens in stream for token in tokens] == [None] * 4
        await own.close()

    with_replicas(artifact, 1, task, num_pages=100)


def test_requests_are_refused_while_all_replicas_are_lost(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for a replica ends."""

    async def task(local: Local) -> None:
        async def never(order: Order) -> AsyncIterator[Message]:
            await asyncio.sleep(3600)
            yield Accepted()

        ask, local.ask = local.ask, never  # type: ignore[method-assign, assignment]
        own = service(artifact, local, Handle(local.index))
        await own.load()
        runner = own.require_ready().runner
        waiting = asyncio.create_task(runner.submit([5, 6, 7], SamplingParams(max_new_tokens=4)))
        await asyncio.sleep(0.05)
        own.require_ready()
        with monkeypatch.context() as lost:
            lost.setattr(local.index, "load", lambda: (0, None))
            lost.setattr(local.index, "is_lost", lambda: True)
            stream = await waiting
            (failed,) = [token async for tokens in stream for token in tokens]
            assert (stream.was_lost, actors.LOST in failed.error) == (True, True)
            with pytest.raises(ServeError, match="no replica runs") as refused:
                own.require_ready()
            assert refused.value.status == 503
        local.ask = ask  # type: ignore[method-assign]
        while own.has_lost_replicas:
            await asyncio.sleep(0.01)
        stream = await own.require_ready().runner.submit([5], SamplingParams(max_new_tokens=4))
        assert [token.error async for tokens in stream for token in tokens][-1] is None
        await own.close()

    with_replicas(artifact, 1, task, num_pages=100)
