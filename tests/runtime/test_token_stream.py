"""What a task reads of one request, whose tokens come by hand."""

from __future__ import annotations

import asyncio

from kvgraph.runtime.sampling import Token
from kvgraph.runtime.stats import RequestStats
from kvgraph.runtime.token_stream import TokenStream


def stream_of(most_unread: int | None = None) -> TokenStream:
    return TokenStream("a", RequestStats(), lambda stream: None, most_unread, None)


def test_a_reader_that_waits_ends_with_a_cancellation() -> None:
    async def main() -> list[list[Token]]:
        stream = stream_of()

        async def read() -> list[list[Token]]:
            return [tokens async for tokens in stream]

        reading = asyncio.create_task(read())
        await asyncio.sleep(0)
        stream.cancel()
        return await asyncio.wait_for(reading, 60)

    assert asyncio.run(main()) == []


def test_a_reader_is_woken_for_an_interval_of_tokens() -> None:
    async def main() -> list[list[int]]:
        stream = stream_of()
        stream.interval = 3
        found: list[list[int]] = []

        async def read() -> None:
            async for tokens in stream:
                found.append([token.token_id for token in tokens])

        reading = asyncio.create_task(read())
        for token in range(9):
            stream.give([Token("a", token, "x", "length" if token == 8 else None)])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await asyncio.wait_for(reading, 60)
        return found

    assert asyncio.run(main()) == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]


def test_what_a_slow_reader_left_is_dropped() -> None:
    async def main() -> list[Token]:
        stream = stream_of(most_unread=2)
        for token in range(4):
            stream.give([Token("a", token, "x", None)])
        return stream.take()

    (token,) = asyncio.run(main())
    assert token.finish_reason == "error"
    assert "got more than 2 unread tokens" in str(token.error)
