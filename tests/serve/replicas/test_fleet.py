"""Requests on several engines: the tokens of one engine, whatever dies, and a right index."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph import DeviceLostError, Engine, RankError, RequestError, SamplingParams
from kvgraph.runtime.sampling import Token
from kvgraph.serve.replicas import feed
from kvgraph.serve.replicas import fleet as fleet_module
from kvgraph.serve.replicas.fleet import Fleet
from kvgraph.serve.replicas.host import ReplicaClosedError
from kvgraph.serve.replicas.messages import Accepted, Message, Order, Piece, Refused, try_before
from tests.serve.replicas.in_process import DeadError, Local, is_gone, with_replicas

PROMPTS = [[5 + (7 * i + j) % 1000 for j in range(20 + 9 * i)] for i in range(8)]
GREEDY = SamplingParams(max_new_tokens=64, ignore_eos=True)
DRAWN = SamplingParams(max_new_tokens=64, temperature=1.0, seed=3, ignore_eos=True)


async def tokens_of(stream: Any) -> list[Token]:
    return [token async for tokens in stream for token in tokens]


async def ids_of(local: Local, prompts: list[list[int]], sampling: SamplingParams) -> list[Any]:
    fleet = local.fleet()
    streams = [await fleet.submit(prompt, sampling) for prompt in prompts]
    found = await asyncio.gather(*map(tokens_of, streams))
    assert all(not stream.was_lost for stream in streams)
    return [[token.token_id for token in tokens] for tokens in found]


@pytest.fixture(scope="module")
def alone(artifact: Path) -> dict[SamplingParams, list[list[int]]]:
    engine = Engine(artifact, num_threads=1, num_pages=200)
    return {
        sampling: [done.token_ids for done in engine.generate(PROMPTS, sampling)]
        for sampling in (GREEDY, DRAWN)
    }


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_all_replicas_give_the_tokens_of_one_engine(
    artifact: Path, alone: Any, sampling: SamplingParams
) -> None:
    async def task(local: Local) -> None:
        assert await ids_of(local, PROMPTS, sampling) == alone[sampling]
        assert set(local.asked) == {"r0", "r1"}
        await local.until_equal()

    with_replicas(artifact, 2, task, num_pages=100)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_replica_that_dies_is_not_seen(
    artifact: Path, alone: Any, sampling: SamplingParams, at: int
) -> None:
    """Before it accepts, before the first token, and behind tokens that were handed over."""

    async def task(local: Local) -> None:
        died: list[str] = []

        def fault(name: str, order: Order, number: int) -> None:
            if number == at and not died:
                died.append(name)
            if name in died:
                raise DeadError(name)

        def choose(request: str, names: list[str], *rest: Any) -> list[str]:
            return order(request, [name for name in names if name not in died], *rest)

        order, local.index.choose = local.index.choose, choose  # type: ignore[method-assign]
        local.fault = fault
        assert await ids_of(local, PROMPTS, sampling) == alone[sampling]
        assert died

    with_replicas(artifact, 3, task, num_pages=100)


def test_another_replica_that_differs_ends_the_stream(artifact: Path) -> None:
    """What was handed over stays right: the stream says that it cannot go on."""

    async def task(local: Local) -> None:
        asks = 0
        ask = local.ask

        async def differing(order: Order) -> Any:
            nonlocal asks
            asks += 1
            async for message in ask(order):
                if asks > 1 and isinstance(message, Piece):
                    tokens = [token._replace(token_id=3) for token in message.tokens]
                    message = message._replace(tokens=tokens)
                yield message
                if asks == 1 and isinstance(message, Piece):
                    raise DeadError("r0")

        local.ask = differing  # type: ignore[method-assign]
        stream = await local.fleet().submit(PROMPTS[0], GREEDY)
        tokens = await tokens_of(stream)
        assert stream.was_lost
        assert tokens[-1].finish_reason == "error"
        assert tokens[-1].error is not None
        assert "another one gives other tokens" in tokens[-1].error

    with_replicas(artifact, 1, task, num_pages=100)


def test_a_replica_that_refuses_what_another_one_began() -> None:
    """The stream has an end, and says why; an answer that was not streamed is made again."""

    async def task() -> None:
        ids = []

        async def ask(order: Order) -> AsyncIterator[Message]:
            ids.append(order.request_id)
            if len(ids) > 1:
                yield Refused("request: expected less")
                return
            yield Accepted()
            yield Piece([Token(order.request_id, 5, "a", None)], 0, 0.0)
            raise DeadError("r0")

        stream = await Fleet(ask, is_gone, None).submit([5, 6, 7])
        async with asyncio.timeout(30):
            tokens = await tokens_of(stream)
        assert tokens[0].token_id == 5
        assert "another one refused it: request: expected less" in str(tokens[-1].error)
        assert stream.was_lost
        assert ids == [stream.request_id, f"{stream.request_id}-1"]

    asyncio.run(task())


def test_a_connection_that_is_cut_while_the_replica_goes_on(artifact: Path, alone: Any) -> None:
    """The request that it has still is another one to it."""

    async def task(local: Local) -> None:
        left: list[Any] = []

        async def ask(order: Order) -> AsyncIterator[Message]:
            messages, number = local.hosts["r0"].generate(order), 0
            async for message in messages:
                yield message
                number += 1
                if not left and number == 2:
                    left.append(messages)
                    raise DeadError("r0")

        long = SamplingParams(max_new_tokens=1500, ignore_eos=True)
        stream = await Fleet(ask, is_gone, None).submit(PROMPTS[0], long)
        tokens = await tokens_of(stream)
        assert [token.token_id for token in tokens[:64]] == alone[GREEDY][0]
        assert (tokens[-1].finish_reason, len(tokens)) == ("length", 1500)
        assert {token.request_id for token in tokens} == {stream.request_id}
        await left[0].aclose()

    with_replicas(artifact, 1, task, num_pages=100)


def test_what_runs_as_a_fleet_closes_ends_with_an_error() -> None:
    async def task() -> None:
        is_taken = True

        async def ask(order: Order) -> AsyncIterator[Message]:
            if is_taken:
                yield Accepted()
            await asyncio.get_running_loop().create_future()

        fleet = Fleet(ask, is_gone, None)
        stream = await fleet.submit([5, 6, 7])
        is_taken = False
        waiting = asyncio.create_task(fleet.submit([5, 6, 7]))
        await asyncio.sleep(0)
        await fleet.close()
        async with asyncio.timeout(30):
            (last,) = await tokens_of(stream)
            assert last.error == f"request {stream.request_id!r}: the server was closed"
            assert not stream.was_lost, "no replica is there to answer it"
            with pytest.raises(RequestError, match=r"^the server was closed$"):
                await waiting
        with pytest.raises(RequestError, match=r"^the server was closed$"):
            await fleet.submit([5, 6, 7])

    asyncio.run(task())


@pytest.mark.parametrize("kind", [RankError, DeviceLostError])
def test_a_replica_whose_steps_have_ended_says_that_it_is_gone(
    artifact: Path, kind: type[Exception]
) -> None:
    async def task(local: Local) -> None:
        engine = local.hosts["r0"]._engine
        assert engine is not None

        def step() -> None:
            raise kind("rank 1: expected it to take part")

        local.hosts["r0"].require_running()
        engine.engine.step = step  # type: ignore[method-assign, assignment]
        order = Order("own", np.array(PROMPTS[0], "<i4").tobytes(), GREEDY, b"", b"")
        with pytest.raises(ReplicaClosedError):
            async for _ in local.hosts["r0"].generate(order):
                pass
        with pytest.raises(ReplicaClosedError):
            local.hosts["r0"].require_running()
        local.hosts["r1"].require_running()
        assert set(local.index.queued()) == {"r1"}, "nothing is sent to the other any more"

    with_replicas(artifact, 2, task, num_pages=100)


def test_no_replica_at_all(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgraph.serve.replicas.fleet.RETRY_SECONDS", 0.001)

    async def task(local: Local) -> None:
        def fault(*given: Any) -> None:
            raise DeadError

        local.fault = fault
        stream = await local.fleet().submit(PROMPTS[0], GREEDY)
        tokens = await tokens_of(stream)
        assert [token.error for token in tokens] == [
            f"request {stream.request_id!r}: no replica answered"
        ]
        assert stream.was_lost

    with_replicas(artifact, 1, task, num_pages=100)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 10**6], "expected token ids in"),
        ([], "expected a prompt, got an empty one"),
        ([5] * 3000, "at most 2047 tokens"),
        ([2**40], "expected token ids"),
        (["a"], "expected token ids"),
    ],
)
def test_bad_requests_are_refused_at_once(artifact: Path, prompt: list[Any], message: str) -> None:
    async def task(local: Local) -> None:
        with pytest.raises(RequestError, match=message):
            await local.fleet().submit(prompt, GREEDY)
        assert len(await ids_of(local, PROMPTS[:1], GREEDY)) == 1
        assert local.index.queued() == {"r0": 0} or not await _drained(local)

    with_replicas(artifact, 1, task, num_pages=100)


async def _drained(local: Local) -> None:
    while any(local.index.queued().values()):
        await asyncio.sleep(0.01)


def test_a_request_that_is_left_is_cancelled(artifact: Path) -> None:
    async def task(local: Local) -> None:
        fleet = local.fleet()
        long = SamplingParams(max_new_tokens=1500, ignore_eos=True)
        stream = await fleet.submit(PROMPTS[0], long)
        await anext(stream)
        stream.cancel()
        engine = local.hosts["r0"]._engine
        assert engine is not None
        while engine.num_open:
            await asyncio.sleep(0.01)
        free = await engine.call(lambda own: own.kv.num_free_blocks())
        assert free == 100
        await _drained(local)

    with_replicas(artifact, 1, task, num_pages=100)


def test_the_index_follows_pools_that_evict_and_are_reset(artifact: Path) -> None:
    """With reports that are lost, and an index that starts anew."""

    async def task(local: Local) -> None:
        for turn in range(12):
            prompts = [[5 + (31 * turn + 7 * i + j) % 1000 for j in range(90)] for i in range(6)]
            await ids_of(local, prompts, GREEDY)
            if turn % 4 == 1:
                local.loses_reports = True
            if turn % 4 == 2:
                local.loses_reports = False
            if turn == 5:
                local.index = type(local.index)()
            if turn == 8:
                engine = local.hosts["r0"]._engine
                assert engine is not None
                await engine.call(lambda own: own.kv.reset_prefix_cache())
            if not local.loses_reports:
                await local.until_equal()
        await local.until_equal()
        assert all(len(local.index.pages(name)) > 10 for name in local.hosts)

    with_replicas(artifact, 2, task, num_pages=40, max_batch_size=4)


def test_a_report_that_is_never_answered_is_sent_again(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "SEND_SECONDS", 0.05)

    async def task(local: Local) -> None:
        local.hangs_at_reports = True
        await ids_of(local, [list(range(5, 95))], GREEDY)
        await asyncio.sleep(0.1)
        local.hangs_at_reports = False
        await local.until_equal()
        assert local.index.pages("r0")

    with_replicas(artifact, 1, task, num_pages=40)


def test_prompts_computed_elsewhere(artifact: Path, tmp_path: Path) -> None:
    """Pages go through a shared tier; where that fails, who answers computes the prompt."""
    prompt = [5 + 7 * i % 1000 for i in range(300)]
    expected = Engine(artifact, num_threads=1, num_pages=200).generate([prompt], GREEDY)[0]

    async def task(local: Local) -> None:
        prefills = 0

        async def prefill(order: Order) -> AsyncIterator[Message]:
            nonlocal prefills
            prefills += 1
            if prefills > 1:
                raise DeadError("r1")
            async for message in local.hosts["r1"].prefill(order._replace(request_id="elsewhere")):
                yield message

        fleet = local.fleet(prefill, ["r0"])
        stream = await fleet.submit(prompt, GREEDY)
        assert [token.token_id for token in await tokens_of(stream)] == expected.token_ids
        assert stream.stats.cached_tokens == 288, "18 of 18 full pages"
        other = await fleet.submit(prompt[::-1], GREEDY)
        assert (await tokens_of(other))[-1].error is None
        assert (other.stats.cached_tokens, prefills) == (0, 2)

    with_replicas(artifact, 2, task, num_pages=100, disk=tmp_path / "pages")


def test_no_replica_takes_a_prompt(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of those that compute for others are being restarted: who answers computes the prompt."""
    monkeypatch.setattr(fleet_module, "ACCEPT_SECONDS", 0.05)
    left = []

    async def prefill(order: Order) -> AsyncIterator[Message]:
        try:
            await asyncio.get_running_loop().create_future()
            yield Accepted()
        finally:
            left.append(order.request_id)

    async def task(local: Local) -> None:
        stream = await local.fleet(prefill).submit([5, 6, 7], GREEDY)
        assert len(await tokens_of(stream)) == GREEDY.max_new_tokens
        assert left == [stream.request_id]

    with_replicas(artifact, 1, task, num_pages=100)


def test_a_prompt_that_cannot_be_computed_elsewhere(artifact: Path, tmp_path: Path) -> None:
    async def task(local: Local) -> None:
        fleet = local.fleet(lambda order: local.hosts["r0"].prefill(order))
        with pytest.raises(RequestError, match="expected token ids in"):
            await fleet.submit([5, 10**6], GREEDY)

    with_replicas(artifact, 1, task, num_pages=100, disk=tmp_path / "pages")


def test_tries_of_a_request() -> None:
    first = Order("a1b2", b"", GREEDY, b"", b"")
    assert try_before(first.request_id) == "a1b2"
    assert try_before(first.tried_again(1).request_id) == "a1b2"
    assert try_before(first.tried_again(10).request_id) == "a1b2-9"
    assert try_before("prefill-a1b2-1") == "prefill-a1b2"
