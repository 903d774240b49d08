"""An AsyncEngine whose threads the system refuses: one sentence, and nothing waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraph import CapacityError, Engine
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
