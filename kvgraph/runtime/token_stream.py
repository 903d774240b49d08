"""TokenStream: the tokens of one request, for the tasks of an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvgraph.runtime.sampling import NO_TOKEN, Token
from kvgraph.runtime.stats import RequestStats

STOPPED = "expected a running engine, got a stopped one"
ENDED = "the engine's thread has ended"
"""First words of the error of a request whose engine has ended; the reason follows."""


class TokenStream:
    """The tokens of one request: `async for tokens in stream` yields all since the last time.

    Each list has at least one token; the last token has a `finish_reason`. Only one task may read
    a stream. A task that reads several passes them one common event, `news`, which each sets.
    """

    def __init__(
        self,
        request_id: str,
        stats: RequestStats,
        cancel: Callable[[TokenStream], None],
        most_unread: int | None,
        news: asyncio.Event | None,
    ) -> None:
        self.request_id = request_id
        self.stats = stats
        self.has_ended = False
        """Whether the last token has come; it may be unread."""
        self.was_lost = False
        """Whether the stream ended because its replica failed: a retry may succeed."""
        self.watch: Callable[[], None] | None = None
        """Called when tokens have come, even if no task reads them."""
        self.interval = 1
        """Unread tokens that wake its reader; its first and its last ones wake it at once."""
        self._cancel = cancel
        self._most_unread = most_unread
        self._is_begun = False  # whether tokens were taken
        self._unread: list[Token] = []
        self._most_at_once = 0  # most unread tokens that came in one call
        self._news = news or asyncio.Event()

    def __repr__(self) -> str:
        state = "ended" if self.has_ended else "open"
        return f"<TokenStream {self.request_id!r}: {state}, {len(self._unread)} unread tokens>"

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[Token]:
        while not self.has_news:
            if self.has_ended:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self.take()

    @property
    def has_news(self) -> bool:
        """Whether enough unread tokens have come to wake the reader."""
        least = self.interval if self._is_begun and not self.has_ended else 1
        return len(self._unread) >= least

    def take(self) -> list[Token]:
        """All tokens since the last time, without waiting."""
        tokens, self._unread, self._most_at_once = self._unread, [], 0
        self._is_begun = True
        return tokens

    def cancel(self) -> None:
        """Cancel the request, unless it has ended."""
        self.has_ended = True
        self._news.set()
        self._cancel(self)

    def give(self, tokens: list[Token]) -> None:
        """Add tokens that have come; the last one may end the stream.

        The largest unread group of one call does not count as unread: a grammar may force many
        tokens at once, which no reader could have read earlier.
        """
        self._unread += tokens
        self._most_at_once = max(self._most_at_once, len(tokens))
        self.has_ended = bool(tokens[-1].finish_reason)
        if self.has_news:
            self._news.set()
        late, most = len(self._unread) - self._most_at_once, self._most_unread
        if most is not None and late > most and not self.has_ended:
            self.cancel()
            why = f"expected its reader to keep up, got more than {most} unread tokens"
            self._unread = [failed(self.request_id, f"{why}; it is cancelled")]
        if self.watch is not None:
            self.watch()


def failed(request_id: str, why: str) -> Token:
    """A last token with finish_reason "error"; its error names the request and the reason `why`."""
    return Token(request_id, NO_TOKEN, "", "error", f"request {request_id!r}: {why}")
