"""AsyncEngine compiles grammars in threads, one at a time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.request_builder import RequestBuilder

pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

GUIDED = SamplingParams(guided_regex="a", max_new_tokens=2)


def test_the_next_waits_for_one_whose_caller_has_left(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be stopped: it runs on, and the engine's compiled grammars are its."""
    may_go_on, has_begun = threading.Event(), threading.Event()
    running, most = 0, 0

    async def task() -> None:
        async with AsyncEngine(Engine(compiled("tiny-llama"), num_threads=1)) as shared:
            build = RequestBuilder.request

            def slow(*given: Any) -> Any:
                nonlocal running, most
                running += 1
                most = max(most, running)
                has_begun.set()
                try:
                    assert may_go_on.wait(60)
                    return build(*given)
                finally:
                    running -= 1

            monkeypatch.setattr(RequestBuilder, "request", slow)
            left = asyncio.create_task(shared.submit("The", GUIDED))
            assert await asyncio.to_thread(has_begun.wait, 60)
            left.cancel()
            with pytest.raises(asyncio.CancelledError):
                await left
            following = asyncio.create_task(shared.generate("The", GUIDED))
            for _ in range(10):  # it would begin its thread now
                await asyncio.sleep(0)
            may_go_on.set()
            assert (await asyncio.wait_for(following, 60)).text == "a"
            refused = SamplingParams(guided_regex="(", max_new_tokens=2)
            with pytest.raises(RequestError, match="guided_regex"):
                await shared.submit("The", refused)
            assert (await asyncio.wait_for(shared.generate("The", GUIDED), 60)).text == "a"

    asyncio.run(task())
    assert most == 1
