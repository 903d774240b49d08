"""AsyncEngine compiles grammars in threads, one at a time, and a grammar may force many tokens."""

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
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.stats import RequestStats
from kvgraph.runtime.token_stream import TokenStream

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


def test_closing_ends_all_that_wait_for_a_compilation(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: the one that runs too, which nothing can stop."""
    may_go_on, has_begun = threading.Event(), threading.Event()

    def slow(*given: Any) -> Any:
        has_begun.set()
        assert may_go_on.wait(60)

    async def task() -> None:
        shared = AsyncEngine(Engine(compiled("tiny-llama"), num_threads=1))
        await shared.start()
        monkeypatch.setattr(RequestBuilder, "request", slow)
        waiting = [asyncio.create_task(shared.generate("The", GUIDED)) for _ in range(4)]
        assert await asyncio.to_thread(has_begun.wait, 60)
        await shared.close()
        ended, late = await asyncio.wait(waiting, timeout=30)
        may_go_on.set()
        assert not late
        for each in ended:
            with pytest.raises(RequestError, match="expected a running engine, got a stopped one"):
                each.result()

    asyncio.run(task())


@pytest.mark.parametrize("most", [0, 20])
def test_tokens_that_a_grammar_forces_cancel_no_stream(
    compiled: Callable[..., Path], most: int
) -> None:
    """They come in one step; the reader keeps up."""
    text = "qzxj" * 60
    forcing = SamplingParams(guided_json={"const": text}, max_new_tokens=400)

    async def task() -> tuple[int, str]:
        async with AsyncEngine(Engine(compiled("tiny-llama"), num_threads=1)) as shared:
            stream = await shared.submit("The", forcing, most_unread=most)
            given = [tokens async for tokens in stream]
            assert given[-1][-1].finish_reason == "stop"
            said = "".join([token.text for tokens in given for token in tokens])
            return max(map(len, given)), said

    longest, said = asyncio.run(asyncio.wait_for(task(), 60))
    assert longest > 20
    assert said == f'"{text}"'


def given(stream: TokenStream, *counts: int, ends: bool = False) -> bool:
    """Whether it is cancelled where so many tokens come in each call, and are not read."""
    for at, count in enumerate(counts, 1):
        last = "stop" if ends and at == len(counts) else None
        stream.give([*[Token("a", 5, "a", None)] * (count - 1), Token("a", 5, "a", last)])
    return stream.take()[-1].finish_reason == "error"


@pytest.mark.parametrize("most", [0, 3])
def test_unread_tokens(most: int) -> None:
    """Those of the largest step do not count, and a stream that has ended is not cancelled."""
    left: list[TokenStream] = []
    stream = TokenStream("a", RequestStats(prompt_tokens=1), left.append, most, None)
    ones = [1] * most
    for counts in ([1], [100], [1, *ones], [100, *ones], [*ones, 100]):
        assert not given(stream, *counts)
    assert not given(stream, 100, *ones, 1, ends=True)
    assert not left
    assert given(stream, 100, *ones, 1)
    assert left == [stream]
