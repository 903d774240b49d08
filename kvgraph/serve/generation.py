"""Generation: all prompts of one request, `n` times each, as one stream of events."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Protocol

from kvgraph.errors import MissingDependencyError, RequestError, UnsupportedError
from kvgraph.runtime.guide import NOT_FOLLOWED, NOT_TAKEN
from kvgraph.runtime.logprobs import TokenLogprobs
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.runtime.token_stream import TokenStream
from kvgraph.runtime.tools import refused_part
from kvgraph.serve.errors import ServeError, for_client
from kvgraph.serve.load import Admission, Place
from kvgraph.serve.metrics import Metrics
from kvgraph.serve.sampling import ShapedParams, refusal


class Submits(Protocol):
    """Runs requests: an AsyncEngine, or several."""

    @property
    def is_closed(self) -> bool:
        """Whether it accepts no more requests."""

    async def submit(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        cache_salt: bytes = b"",
        most_unread: int | None = None,
        news: asyncio.Event | None = None,
    ) -> TokenStream:
        """Submit as `AsyncEngine.submit` does."""


@dataclass(slots=True)
class Choice:
    """One of a request's generations."""

    index: int
    prompt: list[int]
    stream: TokenStream
    place: Place
    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_generated: int = 0
    is_queued: bool = True
    """Whether the choice has no token yet, and has not ended."""
    is_open: bool = True
    """Whether the choice runs or waits in the engine."""
    has_started: bool = False
    """Whether tokens of the choice were taken."""
    is_over: bool = False
    """Whether the last token was taken, or the choice was cancelled."""
    last_news: float = 0.0
    """Time of the latest tokens, in seconds of `time.perf_counter`."""
    last_counted: float = 0.0
    """Time of the latest tokens that were counted; initially that of the first tokens."""
    finish_reason: str | None = None
    """Reason why the choice ended, as its answer says."""


class Generation:
    """Runs choices; `async for` yields those with news: `tokens` since the last time.

    `interval`: fewest tokens of a choice that count as news, except its first and last ones.
    `drops_output`: tokens serve the prompts' log-probabilities alone, and are not counted. Call
    `close` at the end: it cancels choices that have not ended.
    """

    def __init__(
        self,
        runner: Submits,
        admission: Admission,
        metrics: Metrics,
        interval: int = 1,
        drops_output: bool = False,
    ) -> None:
        self._runner = runner
        self._admission = admission
        self._metrics = metrics
        self._interval = interval
        self._drops_output = drops_output
        self._news = asyncio.Event()
        self.choices: list[Choice] = []
        self._places: list[Place] = []

    async def start(
        self, prompts: Sequence[list[int]], params: Sequence[SamplingParams], salt: bytes, most: int
    ) -> None:
        """Submit each prompt with each of `params`: all of them, or none with a ServeError.

        A prompt gets at most the tokens that fit after it; a client's own limit was checked before.
        `most`: unread tokens at which a choice is cancelled.
        """
        each = [prompt for prompt in prompts for _ in params]
        # They count as queued while they are submitted, which may take long.
        self._places = self._admission.admit(each, salt)
        parts = [
            self._place(number * len(params), prompt, params, salt, most)
            for number, prompt in enumerate(prompts)
        ]
        placing = [asyncio.create_task(part) for part in parts] if len(parts) > 1 else []
        try:
            await (asyncio.gather(*placing) if placing else parts[0])
        except BaseException as error:
            for task in placing:
                task.cancel()
            self._give_up()
            await asyncio.gather(*placing, return_exceptions=True)
            if not isinstance(error, RequestError | UnsupportedError | MissingDependencyError):
                raise
            if self._runner.is_closed:
                raise ServeError(503, "the server ends") from error
            raise await _refusal(error, params[0]) from error
        self.choices.sort(key=lambda choice: choice.index)

    async def _place(
        self,
        index: int,
        prompt: list[int],
        params: Sequence[SamplingParams],
        salt: bytes,
        most: int,
    ) -> None:
        """Submit a prompt's choices in turn: the later ones reuse the first one's grammar."""
        for number, one in enumerate(params):
            fits = self._admission.fitting(one, prompt)
            stream = await self._runner.submit(
                prompt, fits, cache_salt=salt, most_unread=most, news=self._news
            )
            place = self._places[index + number]
            place.stats = stream.stats
            choice = Choice(index + number, prompt, stream, place)
            stream.watch = partial(self._came, choice)
            stream.interval = self._interval
            self.choices.append(choice)
            if stream.has_news:
                self._came(choice)
            self._metrics.submitted(len(prompt))

    def _give_up(self) -> None:
        """Undo `start`: close submitted choices, and uncount prompts that no engine has taken."""
        placed = {choice.index for choice in self.choices}
        for index, place in enumerate(self._places):
            if index not in placed:
                self._admission.start(place)
                self._admission.leave(place)
        self.close()

    def _came(self, choice: Choice) -> None:
        """Note that tokens came, even unread ones: a slow reader must not hold up the queue."""
        choice.last_news = perf_counter()
        if choice.is_queued:
            choice.last_counted = choice.last_news
        self._leave_queue(choice)
        if choice.stream.has_ended:
            self._leave_engine(choice)

    def _leave_queue(self, choice: Choice) -> None:
        if choice.is_queued:
            choice.is_queued = False
            self._admission.start(choice.place)

    def _leave_engine(self, choice: Choice) -> None:
        if choice.is_open:
            choice.is_open = False
            self._admission.leave(choice.place)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[Choice]:
        """Choices with news; `tokens` of each are those since the last time."""
        while True:
            fresh = [choice for choice in self.choices if choice.stream.has_news]
            if fresh:
                break
            if all(choice.is_over for choice in self.choices):
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        for choice in fresh:
            choice.tokens = choice.stream.take()
            self._count(choice)
        return fresh

    def _count(self, choice: Choice) -> None:
        last = choice.tokens[-1]
        count = 0 if self._drops_output else len(choice.tokens) - (last.error is not None)
        seconds = choice.last_news - choice.last_counted
        if not choice.has_started:
            choice.has_started = True
            choice.prompt_logprobs = choice.tokens[0].prompt_logprobs
            self._metrics.first_tokens(choice.stream.stats, count, seconds)
        else:
            self._metrics.next_tokens(count, seconds)
        choice.last_counted = choice.last_news
        choice.num_generated += count
        if reason := last.finish_reason:
            choice.is_over = True
            choice.finish_reason = "length" if self._drops_output and not last.error else reason
            self._leave_engine(choice)
            self._note_end(choice, choice.finish_reason)

    def _note_end(self, choice: Choice, reason: str) -> None:
        self._metrics.ended(choice.stream.stats, reason, choice.num_generated)
        of_prompt = [other for other in self.choices if other.prompt is choice.prompt]
        if all(other.is_over for other in of_prompt):
            self._metrics.all_ended(max([other.num_generated for other in of_prompt]))

    async def all_tokens(self) -> list[list[Token]]:
        """All tokens of each choice, once all have ended. ServeError if a choice failed."""
        found: dict[int, list[Token]] = {choice.index: [] for choice in self.choices}
        async for fresh in self:
            for choice in fresh:
                found[choice.index] += choice.tokens
        for tokens in found.values():
            if error := tokens[-1].error:
                raise ServeError(self.status_of(error), for_client(error))
        return list(found.values())

    def close(self) -> None:
        """Cancel choices that have not ended. Idempotent."""
        for choice in self.choices:
            choice.stream.watch = None  # breaks a reference cycle: many tokens are freed at once
            if not choice.is_over:
                choice.is_over = True
                choice.stream.cancel()
                self._leave_queue(choice)
                self._leave_engine(choice)
                self._note_end(choice, "abort")

    def status_of(self, error: str) -> int:
        """HTTP status for the error of a choice; 400 if its own grammar is the cause."""
        if NOT_FOLLOWED in error:
            return 400
        return 503 if self.is_runner_closed else 500

    def is_cut(self, is_sent: bool) -> bool:
        """Whether the end of the server cut the answer. `is_sent`: whether all of it was sent."""
        has_failed = any(choice.tokens and choice.tokens[-1].error for choice in self.choices)
        return self.is_runner_closed and (has_failed or not is_sent)

    @property
    def is_runner_closed(self) -> bool:
        return self._runner.is_closed

    @property
    def was_lost(self) -> bool:
        """Whether a choice's replica failed, so that a retry may succeed."""
        return any(choice.stream.was_lost for choice in self.choices)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; each prompt counts once, even with several choices."""
        prompts = {id(choice.prompt): len(choice.prompt) for choice in self.choices}
        return sum(prompts.values())

    @property
    def cached_tokens(self) -> int:
        first: dict[int, int] = {}
        for choice in self.choices:
            first.setdefault(id(choice.prompt), choice.stream.stats.cached_tokens)
        return sum(first.values())

    @property
    def generated_tokens(self) -> int:
        return sum([choice.num_generated for choice in self.choices])


async def _refusal(error: Exception, params: SamplingParams) -> ServeError:
    """The ServeError for `error`. All params of a request have the same shape."""
    if not isinstance(params, ShapedParams):
        return refusal(error)
    found = None
    if params.parts and NOT_TAKEN in str(error):
        found = await asyncio.to_thread(refused_part, params.parts)
    place, reason = found or (params.origin, error)
    return refusal(reason, place)


def salt_of(text: str | None) -> bytes:
    """The cache salt of `text`: only requests of one salt share prefixes."""
    return hashlib.sha256(text.encode()).digest() if text else b""
