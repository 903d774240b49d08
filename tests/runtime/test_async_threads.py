"""An AsyncEngine whose threads the system refuses: one sentence, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraph import CapacityError, Engine, RequestError
from kvgraph.contract.tokenizer import LONG_TEXT
from kvgraph.runtime.async_engine import AsyncEngine
from tests.runtime.scripted import greedy
from tests.support.refused_threads import SENTENCE, refused_threads


def test_an_engine_whose_thread_cannot_start(compiled: Callable[..., Path]) -> None:
    """It can be closed, or started again."""

    async def task() -> None:
        refused = AsyncEngine(Engine(compiled("tiny-llama"), num_threads=1))
        with refused_threads("kvgraph-engine"), pytest.raises(CapacityError, match=SENTENCE):
            await refused.start()
        await asyncio.wait_for(refused.close(), 60)
        shared = AsyncEngine(Engine(compiled("tiny-llama"), num_threads=1))
        with refused_threads("kvgraph-engine"), pytest.raises(CapacityError, match=SENTENCE):
            await shared.start()
        async with shared:
            completion = await asyncio.wait_for(shared.generate("The", greedy(2)), 60)
            assert len(completion.token_ids) == 2

    asyncio.run(task())


def test_a_long_text_whose_thread_cannot_start(compiled: Callable[..., Path]) -> None:
    async def task() -> None:
        async with AsyncEngine(Engine(compiled("tiny-llama"), num_threads=1)) as shared:
            with refused_threads("kvgraph-texts"), pytest.raises(CapacityError, match=SENTENCE):
                await shared.generate("a" * (LONG_TEXT + 1))
            completion = await asyncio.wait_for(shared.generate("The", greedy(2)), 60)
            assert len(completion.token_ids) == 2

    asyncio.run(task())


def fails(*_: object) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_start_that_fails_spoils_no_engine(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of Trio's tasks, which have no loop of asyncio's."""
    engine = Engine(compiled("tiny-llama"), num_threads=1)
    shared = AsyncEngine(engine)
    message = r"^AsyncEngine\.start: expected a running event loop of asyncio, got none"
    with pytest.raises(RequestError, match=message):
        shared.start().send(None)

    async def task() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", fails)
            with pytest.raises(CapacityError, match=r"^threads: .* got the end of Python"):
                await shared.start()
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                await shared.start()
        assert len(engine.generate(["The"], greedy(2))[0].token_ids) == 2
        async with AsyncEngine(engine) as other:
            assert len((await other.generate("The", greedy(2))).token_ids) == 2

    asyncio.run(task())


def test_an_interrupt_once_the_thread_runs_leaves_it_the_engine(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        begin(thread)
        raise KeyboardInterrupt

    async def task() -> None:
        shared = AsyncEngine(Engine(compiled("tiny-llama"), num_threads=1))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                await shared.start()
        with pytest.raises(RequestError, match="was started already"):
            await shared.start()
        await asyncio.wait_for(shared.close(), 60)
        assert not any(thread.name == "kvgraph-engine" for thread in threading.enumerate())

    asyncio.run(task())
