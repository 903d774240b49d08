"""Measures the engine's load after each step, and decides which requests are admitted.

Decisions are made on the event loop before any header is sent, from the last measurement and the
requests that were submitted since. Nothing is scheduled here: the engine itself allocates pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter

from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import SamplingParams, Token
from kvgraph.runtime.stats import EngineStats
from kvgraph.serve.errors import ServeError
from kvgraph.serve.facts import EngineFacts
from kvgraph.serve.options import ServeOptions

SMOOTHING = 0.1
"""Share of the newest measurement in a moving average."""

MOST_RETRY_SECONDS = 60
UNKNOWN_PREFILL_RATE = 500.0
"""Assumed tokens/s before any prompt was computed."""


@dataclass(frozen=True, slots=True)
class Load:
    """Measurements of an engine at the end of a step."""

    stats: EngineStats
    prefill_rate: float | None = None
    """Prompt tokens/s, in steps with prompts; None before the first."""
    finish_seconds: float = 0.0
    """Seconds between the ends of two requests, without the engine's idle time; 0 before the
    first."""


class LoadMeter:
    """Measures steps; `load` is the last snapshot, which any thread may read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.load = Load(engine.stats())
        self._began = self._last_end = perf_counter()

    def before_step(self) -> None:
        """Note the start of a step. Call it in the engine's thread."""
        self._began = perf_counter()
        before = self.load.stats
        if not before.num_running and not before.num_waiting:  # the engine was idle
            self._last_end = self._began

    def after_step(self, tokens: Sequence[Token]) -> None:
        """Measure the step that ended. Call it in the engine's thread."""
        now, old, stats = perf_counter(), self.load, self._engine.stats()
        seconds = now - self._began
        computed = stats.computed_tokens - old.stats.computed_tokens
        rate = old.prefill_rate
        if computed > 0:
            measured = computed / seconds
            rate = measured if rate is None else rate + SMOOTHING * (measured - rate)
        between = old.finish_seconds
        if ended := sum([token.finish_reason is not None for token in tokens]):
            lasted = (now - self._last_end) / ended
            between = between + SMOOTHING * (lasted - between) if between else lasted
            self._last_end = now
        self.load = Load(stats, rate, between)


class Admission:
    """Counts open requests, and those without a token yet: the queue."""

    def __init__(self, facts: EngineFacts, options: ServeOptions, load: Callable[[], Load]) -> None:
        self._load = load
        self._facts = facts
        self._page_size = facts.page_size
        self._most_requests = options.max_queued_requests
        self._given_tokens = options.max_queued_tokens
        self.num_engines = 1
        """Number of equal engines behind this queue."""
        self.num_open = 0
        self.num_queued = 0
        self.queued_tokens = 0

    @property
    def _rows(self) -> int:
        return self._facts.max_batch_size * self.num_engines

    @property
    def _most_tokens(self) -> int:
        if self._given_tokens is not None:
            return self._given_tokens
        return 16 * self._facts.max_batch_tokens * self.num_engines

    def require_room(self, count: int, tokens: int) -> None:
        """Raise ServeError (429) if `count` requests of `tokens` tokens do not fit the queue.

        Requests too large for an empty queue pass while none waits and a row is free: otherwise
        they would never be admitted.
        """
        is_busy = self.num_queued or self.num_open >= self._rows
        too_many = is_busy and self.num_open + count > self._rows + self._most_requests
        too_long = self.queued_tokens and self.queued_tokens + tokens > self._most_tokens
        if too_many or too_long:
            raise ServeError(
                429,
                f"queue: expected at most {self._most_requests} requests and {self._most_tokens} "
                f"tokens of prompts waiting, got {count} and {tokens} more to "
                f"{max(0, self.num_open - self._rows)} and {self.queued_tokens}; try again later",
                retry_after=self.retry_after(count, tokens),
            )

    def fitting(self, params: SamplingParams, prompt: Sequence[int]) -> SamplingParams:
        """`params` with `max_new_tokens` cut to what fits after `prompt`, which itself fits."""
        return params.clamped_to(self._facts.longest - len(prompt))

    def retry_after(self, count: int, tokens: int) -> int:
        """Whole seconds until the request may fit, by the rates of prefill and ended requests."""
        load = self._load()
        prefill = max(0, self.queued_tokens + tokens - self._most_tokens) / (
            load.prefill_rate or UNKNOWN_PREFILL_RATE
        )
        ends = max(0, self.num_open + count - self._rows - self._most_requests)
        free = load.stats.num_free_pages
        if free is not None and load.stats.num_running:
            needed = math.ceil((self.queued_tokens + tokens) / self._page_size)
            held = max(1, (load.stats.num_pages or 0) - free) / load.stats.num_running
            ends = max(ends, math.ceil(max(0, needed - free) / held))
        return min(MOST_RETRY_SECONDS, max(1, math.ceil(max(prefill, ends * load.finish_seconds))))

    def enter(self, tokens: int) -> None:
        self.num_open += 1
        self.num_queued += 1
        self.queued_tokens += tokens

    def start(self, tokens: int) -> None:
        """Uncount a queued request that got its first token, or ended without one."""
        self.num_queued -= 1
        self.queued_tokens -= tokens

    def leave(self) -> None:
        self.num_open -= 1
