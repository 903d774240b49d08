"""What one caller of an AsyncEngine does costs no other one, and no direct call gets between."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph import AsyncEngine, Engine, RequestError, SamplingParams

PROMPT = list(range(100, 120))
MANY = SamplingParams(max_new_tokens=60, ignore_eos=True)


@pytest.fixture
def engine(compiled: Callable[..., Path]) -> Engine:
    return Engine(kvgraph.load(compiled("tiny-llama")), num_pages=40, num_threads=1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"most_unread": "x"}, r"most_unread: expected an integer >= 0 or None, got str 'x'"),
        ({"most_unread": -1}, r"most_unread: expected >= 0 or None, got -1"),
        ({"news": 5}, r"news: expected an asyncio.Event, got int 5"),
    ],
)
def test_arguments_are_checked_at_once(engine: Engine, given: Any, message: str) -> None:
    async def task() -> None:
        async with AsyncEngine(engine) as shared:
            with pytest.raises(RequestError, match=message):
                await shared.submit(PROMPT, MANY, **given)
            assert shared.num_open == 0

    asyncio.run(task())


def test_reprs_say_what_runs(engine: Engine) -> None:
    shared, name = AsyncEngine(engine), engine.artifact.folder.name

    async def task() -> None:
        async with shared:
            stream = await shared.submit(PROMPT, MANY, request_id="a")
            assert repr(stream) == "<TokenStream 'a': open, 0 unread tokens>"
            assert repr(shared) == f"<AsyncEngine {name}: running, 1 open>"
            async for _ in stream:
                pass
            assert repr(stream) == "<TokenStream 'a': ended, 0 unread tokens>"

    assert repr(shared) == f"<AsyncEngine {name}: not started, 0 open>"
    asyncio.run(task())
    assert repr(shared) == f"<AsyncEngine {name}: closed, 0 open>"


def test_a_watch_that_raises_costs_no_other_stream_a_token(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    def watch() -> None:
        raise ValueError("mine")

    async def task() -> None:
        async with AsyncEngine(engine) as shared:
            expected = await shared.generate(PROMPT, MANY)
            watched = await shared.submit(PROMPT, MANY)
            watched.watch = watch
            found = await shared.generate(PROMPT, MANY)
            assert (found.token_ids, found.error) == (expected.token_ids, None)

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(task())
    assert "its watch failed" in caplog.text


def test_direct_calls_are_refused_while_it_runs(engine: Engine) -> None:
    message = "expected no call while an AsyncEngine runs the engine, got one; use its own methods"

    async def task() -> None:
        async with AsyncEngine(engine) as shared:
            expected = await shared.generate(PROMPT, MANY)
            running = asyncio.create_task(shared.generate(PROMPT, MANY))
            await asyncio.sleep(0)
            for call in (
                engine.step,
                engine.close,
                lambda: engine.submit(PROMPT, MANY),
                lambda: engine.generate([PROMPT], MANY),
            ):
                with pytest.raises(RequestError, match=message):
                    call()
            assert (await running).token_ids == expected.token_ids

    asyncio.run(task())
    engine.close()  # the engine is its caller's again


def test_work_of_its_own_needs_no_thread_of_the_loop(engine: Engine) -> None:
    """All of them wait: for a grammar, for a long text, and at the end."""
    pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")
    guided = SamplingParams(guided_regex="[a-f]{3}", max_new_tokens=4)
    may_end = threading.Event()

    async def task() -> None:
        loop = asyncio.get_running_loop()
        shared = AsyncEngine(engine)
        await shared.start()
        busy = [loop.run_in_executor(None, may_end.wait, 120) for _ in range(64)]
        try:
            assert len((await asyncio.wait_for(shared.generate("A", guided), 60)).text) == 3
            with pytest.raises(RequestError, match=r"max_seq_len|tokens"):
                await asyncio.wait_for(shared.generate("a b " * 5000, MANY), 60)
            await asyncio.wait_for(shared.close(), 60)
        finally:
            may_end.set()
        await asyncio.gather(*busy)

    asyncio.run(task())


def test_a_refusal_that_nobody_waits_for_says_nothing(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

    async def task() -> None:
        async with AsyncEngine(engine) as shared:
            refused = SamplingParams(guided_regex="(b")
            asking = asyncio.create_task(shared.generate("A", refused))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            asking.cancel()
            with pytest.raises((asyncio.CancelledError, RequestError)):
                await asking
            await shared.generate("A", SamplingParams(guided_regex="a", max_new_tokens=2))

    with caplog.at_level(logging.ERROR, "asyncio"):
        asyncio.run(task())
    assert caplog.text == ""


@pytest.mark.parametrize("by", ["AsyncEngine", "Engine"])
def test_an_engine_that_was_closed_is_not_started(engine: Engine, by: str) -> None:
    async def task() -> None:
        shared = AsyncEngine(engine)
        if by == "Engine":
            engine.close()
        else:
            await shared.close()
        with pytest.raises(
            RequestError, match=r"start: expected an engine that is open, got a clo"
        ):
            await shared.start()

    asyncio.run(task())
