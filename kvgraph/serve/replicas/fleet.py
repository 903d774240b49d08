"""Fleet: runs requests on several engines. A request goes to a replica that a router chooses, and
to another one if that replica dies."""

from __future__ import annotations

import asyncio
import secrets
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from kvgraph.errors import RequestError
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.runtime.stats import RequestStats
from kvgraph.runtime.token_stream import TokenStream, failed
from kvgraph.serve.replicas.messages import Accepted, Message, Order, Piece, Refused
from kvgraph.serve.replicas.report import packed

TRIES = 8
ACCEPT_SECONDS = 1.0
"""Time in which a prefill replica must accept a prompt."""

CLOSED = "the server was closed"

RETRY_SECONDS = 0.1
"""Pause before the second try; it doubles before each further try."""


@dataclass(eq=False, slots=True)
class _Run:
    """A running request; `answered` is done once a replica has accepted or refused it."""

    stream: TokenStream
    answered: asyncio.Future[None]
    task: asyncio.Task[None] | None = None

    def refuse(self, why: str) -> None:
        """Raise RequestError in `submit`, or end the stream if `submit` has returned."""
        if not self.answered.done():
            self.answered.set_exception(RequestError(why))
        elif not self.stream.has_ended:
            self.stream.give([failed(self.stream.request_id, why)])

    def lose(self, why: str) -> None:
        """End the stream with an error that is no fault of the request."""
        if not self.answered.done():
            self.answered.set_result(None)
        self.stream.was_lost = True
        self.refuse(why)

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class Fleet:
    """Runs requests as an AsyncEngine does.

    `ask`: sends an order to a replica that a router chooses, and yields its messages. `is_gone`:
    whether an error is the loss of a replica. If so, the whole request is sent again, and tokens
    that the stream already had are skipped. If they differ, the stream ends with finish_reason
    "error".
    `prefill`: lets a prefill replica compute the prompt first; its first message says that it does.
    If none comes in ACCEPT_SECONDS (no such replica runs), or it fails, the decode replica computes
    the prompt.
    """

    def __init__(
        self,
        ask: Callable[[Order], AsyncIterator[Message]],
        is_gone: Callable[[Exception], bool],
        settings: PoolSettings | None,
        prefill: Callable[[Order], AsyncIterator[Message]] | None = None,
    ) -> None:
        self._prefill = prefill
        self._ask = ask
        self._is_gone = is_gone
        self._settings = settings
        self._running: dict[str, _Run] = {}
        self.is_closed = False

    async def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        cache_salt: bytes = b"",
        most_unread: int | None = None,
        news: asyncio.Event | None = None,
    ) -> TokenStream:
        """Submit token ids to a replica. RequestError as in `Engine.submit`, at once."""
        if self.is_closed:
            raise RequestError(CLOSED)
        order = self._order(prompt, sampling or SamplingParams(), cache_salt)
        stats = RequestStats(prompt_tokens=len(prompt))
        stream = TokenStream(order.request_id, stats, self._cancel, most_unread, news)
        run = _Run(stream, asyncio.get_running_loop().create_future())
        self._running[order.request_id] = run
        run.task = asyncio.create_task(self._run(order, run))
        try:
            await run.answered
        except BaseException:
            self._cancel(stream)
            raise
        return stream

    def lose(self, why: str) -> None:
        """End all requests with an error, as no replica can answer them."""
        for run in list(self._running.values()):
            run.lose(why)
            run.cancel()

    async def close(self) -> None:
        """End running requests with an error, and cancel them at the replicas."""
        self.is_closed = True
        runs = list(self._running.values())
        for run in runs:
            run.refuse(CLOSED)
            run.cancel()
        await asyncio.gather(*(run.task for run in runs if run.task), return_exceptions=True)

    def _order(self, prompt: Sequence[int], sampling: SamplingParams, salt: bytes) -> Order:
        request_id = uuid.uuid4().hex
        if sampling.temperature > 0 and sampling.seed is None:
            # A fixed seed, so that a retry generates the same tokens.
            sampling = replace(sampling, seed=secrets.randbits(63))
        try:
            tokens = np.array(prompt, "<i4")
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"prompt: expected token ids, got {error}") from error
        chain: list[bytes] = []
        if self._settings is not None and len(tokens) and sampling.prompt_logprobs is None:
            context = TextContext(request_id, tokens.tolist(), cache_salt=salt)
            chain = self._settings.identities(context)[1]
        return Order(request_id, tokens.tobytes(), sampling, salt, packed(chain))

    async def _run(self, order: Order, run: _Run) -> None:
        first = order
        given: list[int] = []
        why = "no replica answered"
        try:
            for tried in range(TRIES):
                if tried:
                    await asyncio.sleep(RETRY_SECONDS * 2 ** (tried - 1))
                    order = first.tried_again(tried)
                try:
                    if self._prefill is not None and not given:
                        await self._try_prefill(order, self._prefill)
                    await self._attempt(order, run, given)
                    return
                except _DiffersError:
                    why = "its replica died, and another one gives other tokens"
                    break
                except RequestError as error:
                    if not run.answered.done():
                        run.answered.set_exception(error)
                        return
                    why = f"its replica died, and another one refused it: {error}"
                    break
                except Exception as error:
                    if not (isinstance(error, _CutError) or self._is_gone(error)):
                        why = f"{type(error).__name__}: {error}".split("\n")[0]
                        break
            run.lose(why)
        finally:
            self._running.pop(first.request_id, None)

    async def _try_prefill(
        self, order: Order, prefill: Callable[[Order], AsyncIterator[Message]]
    ) -> None:
        messages = prefill(order)
        with suppress(Exception):
            async with asyncio.timeout(ACCEPT_SECONDS):
                await anext(messages, None)
            async for _ in messages:
                pass

    async def _attempt(self, order: Order, run: _Run, given: list[int]) -> None:
        """Pass on all tokens of one replica; `given`: those that the stream had before."""
        known, stream = list(given), run.stream
        async for message in self._ask(order):
            if isinstance(message, Refused):
                raise RequestError(message.why)
            if isinstance(message, Accepted):
                if not run.answered.done():
                    run.answered.set_result(None)
                continue
            tokens = [
                token._replace(request_id=stream.request_id)
                for token in _behind(known, message.tokens)
            ]
            _note(stream.stats, message)
            given += [token.token_id for token in tokens]
            if tokens:
                if tokens[-1].finish_reason:
                    stream.stats.ended = perf_counter()
                stream.give(tokens)
        if not stream.has_ended:
            raise _CutError

    def _cancel(self, stream: TokenStream) -> None:
        if (run := self._running.pop(stream.request_id, None)) is not None:
            run.cancel()


class _CutError(Exception):
    """A replica's messages ended before the last token."""


class _DiffersError(Exception):
    """A replica generates other tokens than the replica before it."""


def _behind(known: list[int], tokens: list[Token]) -> list[Token]:
    """The tokens after those in `known`; remove the tokens that match from `known`."""
    count = min(len(known), len(tokens))
    if [token.token_id for token in tokens[:count]] != known[:count]:
        raise _DiffersError
    del known[:count]
    return tokens[count:]


def _note(stats: RequestStats, piece: Piece) -> None:
    """Set the times of a request by this process's clock."""
    if stats.first_token is None:
        stats.cached_tokens = piece.cached_tokens
        stats.started = stats.submitted + piece.queue_seconds
        stats.first_token = perf_counter()
