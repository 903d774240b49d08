"""Measures the engine's load after each step, and decides which requests are admitted.

Decisions are made on the event loop before any header is sent, from the last measurement and the
requests that were submitted since. Nothing is scheduled here: the engine itself allocates pages.
See docs/decisions/2026-11-29-a-queue-behind-the-free-pages.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from kvgraph.kv.memory import most_pages
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import SamplingParams, Token
from kvgraph.runtime.stats import EngineStats, RequestStats
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
    free_pages: tuple[int, ...] = ()
    """Pages of each leaf that requests without a row can take; empty for a cache without pages."""
    measured: float = field(default_factory=perf_counter)
    """Time of the measurement, in seconds of `time.perf_counter`."""


class LoadMeter:
    """Measures steps; `load` is the last snapshot, which any thread may read."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.load = Load(engine.stats(), free_pages=_free_pages(engine))
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
        self.load = Load(stats, rate, between, _free_pages(self._engine), now)


def _free_pages(engine: Engine) -> tuple[int, ...]:
    """Pages of each leaf that new requests can take: none while a preempted request waits, which
    comes first."""
    kv = engine.kv
    if not isinstance(kv, PagedKVCacheManager):
        return ()
    if any(request.stats.started is not None for request in engine.scheduler.waiting):
        return (0,) * len(kv.params.leaves)
    return tuple([kv.num_free_blocks(leaf=path) for path in kv.params.leaves])


@dataclass(eq=False, slots=True)
class Place:
    """An open request, as admission counts it."""

    prompt: Sequence[int]
    salt: bytes
    pages: tuple[int, ...]
    """Pages of each leaf that the prompt needs, without those of the request before it."""
    stats: RequestStats | None = None
    """Times of the request; None until the engine has it."""

    @property
    def started(self) -> float | None:
        """Time of the first row; None before it. A preempted request keeps it."""
        return None if self.stats is None else self.stats.started


class Admission:
    """Counts open requests, those without a token yet, and those for which pages are short."""

    def __init__(self, facts: EngineFacts, options: ServeOptions, load: Callable[[], Load]) -> None:
        self._load = load
        self._facts = facts
        self._page_size = facts.page_size
        self._most_requests = options.max_queued_requests
        self._given_tokens = options.max_queued_tokens
        self.num_engines = 1
        """Number of equal engines behind this queue."""
        self._open: dict[Place, None] = {}
        self._last: Place | None = None
        self.num_queued = 0
        self.queued_tokens = 0

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def _rows(self) -> int:
        return self._facts.max_batch_size * self.num_engines

    @property
    def _most_tokens(self) -> int:
        if self._given_tokens is not None:
            return self._given_tokens
        return 16 * self._facts.max_batch_tokens * self.num_engines

    def require_room(self, each: Sequence[Sequence[int]], salt: bytes = b"") -> None:
        """Raise ServeError (429) if a request for `each` prompt does not fit the queue.

        Behind those that can start, by rows and by pages, at most `max_queued_requests` wait.
        Requests too large for an empty queue pass while none waits and one can start: otherwise
        they would never be admitted. An empty prompt is one that is not known yet.
        """
        self._require_room(each, self._needs(each, salt))

    def admit(self, each: Sequence[Sequence[int]], salt: bytes = b"") -> list[Place]:
        """`enter` a request for `each` prompt: all of them, or none if `require_room` refuses."""
        needs = self._needs(each, salt)
        self._require_room(each, needs)
        return [self._enter(prompt, salt, pages) for prompt, pages in zip(each, needs, strict=True)]

    def _require_room(
        self, each: Sequence[Sequence[int]], needs: Sequence[tuple[int, ...]]
    ) -> None:
        count, tokens = len(each), sum(map(len, each))
        waiting, startable = self._waiting(needs)
        is_busy = self.num_queued or self.num_open >= self._rows
        too_many = is_busy and self.num_open + count > self._rows + self._most_requests
        is_short = self.num_open and (waiting or not startable)
        too_short = is_short and waiting + count > startable + self._most_requests
        too_long = self.queued_tokens and self.queued_tokens + tokens > self._most_tokens
        if too_many or too_short or too_long:
            behind = max(0, self.num_open - self._rows, waiting - startable)
            raise ServeError(
                429,
                f"queue: expected at most {self._most_requests} requests and {self._most_tokens} "
                f"tokens of prompts waiting, got {count} and {tokens} more to "
                f"{behind} and {self.queued_tokens}; try again later",
                retry_after=self.retry_after(count, tokens),
            )

    def _waiting(self, needs: Sequence[tuple[int, ...]]) -> tuple[int, int]:
        """Number of requests that wait for their first row, and how many of them, with the pages
        that new ones need behind them, find theirs free."""
        load = self._load()
        free, needed = list(load.free_pages), []
        for place in self._open:
            if (started := place.started) is None:
                needed.append(place.pages)
            elif started > load.measured:  # it has taken its pages since
                free = _less(free, place.pages)
        waiting = len(needed)
        needed += needs
        for number, pages in enumerate(needed):
            free = _less(free, pages)
            if free and min(free) < 0:
                return waiting, number
        return waiting, len(needed)

    def _needs(self, each: Sequence[Sequence[int]], salt: bytes) -> list[tuple[int, ...]]:
        """Pages of each leaf for `each` prompt, which come one after the other."""
        before = [self._before(salt), *each]
        return [self._pages(prompt, before[at]) for at, prompt in enumerate(each)]

    def _before(self, salt: bytes) -> Sequence[int]:
        """The latest prompt, if it is open, so that a prompt can share its pages."""
        last = self._last
        return last.prompt if last in self._open and last.salt == salt else ()

    def _pages(self, prompt: Sequence[int], before: Sequence[int]) -> tuple[int, ...]:
        """Pages of each leaf for `prompt`, without full pages at its start that `before` has."""
        size, length, shared = self._page_size, max(1, len(prompt)), 0
        if self._facts.prefix_caching:
            most = min((length - 1) // size, len(before) // size)
            while shared < most and (
                prompt is before or _page(prompt, shared, size) == _page(before, shared, size)
            ):
                shared += 1
        chunk = self._facts.max_batch_tokens
        held = [most_pages(leaf, length, chunk) for leaf in self._facts.leaves]
        return tuple([max(1, pages - shared) for pages in held])

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

    def enter(self, prompt: Sequence[int], salt: bytes = b"") -> Place:
        """Count a request as open and queued. Set `stats` of its place once the engine has it."""
        return self._enter(prompt, salt, *self._needs([prompt], salt))

    def _enter(self, prompt: Sequence[int], salt: bytes, pages: tuple[int, ...]) -> Place:
        place = Place(prompt, salt, pages)
        self._open[place] = None
        self._last = place
        self.num_queued += 1
        self.queued_tokens += len(prompt)
        return place

    def start(self, place: Place) -> None:
        """Uncount a queued request that got its first token, or ended without one."""
        self.num_queued -= 1
        self.queued_tokens -= len(place.prompt)

    def leave(self, place: Place) -> None:
        del self._open[place]


def _page(prompt: Sequence[int], number: int, size: int) -> Sequence[int]:
    return prompt[number * size : (number + 1) * size]


def _less(free: list[int], pages: tuple[int, ...]) -> list[int]:
    return [left - taken for left, taken in zip(free, pages, strict=False)]
