"""Statistics of one request, and of an engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TypedDict

from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager


@dataclass(slots=True)
class RequestStats:
    """Times of a request's phases, in seconds of `time.perf_counter`; None: not yet reached."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that the first admission took from the prefix cache."""
    submitted: float = field(default_factory=perf_counter)
    started: float | None = None
    """Time of the first admission; before it, the request waited in the queue."""
    first_token: float | None = None
    ended: float | None = None

    @property
    def queue_seconds(self) -> float | None:
        return _between(self.submitted, self.started)

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from submission to the first token."""
        return _between(self.submitted, self.first_token)

    @property
    def prefill_seconds(self) -> float | None:
        """Seconds from the first step to the first token."""
        return _between(self.started, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """Seconds from the first token to the last one."""
        return _between(self.first_token, self.ended)

    @property
    def total_seconds(self) -> float | None:
        return _between(self.submitted, self.ended)


@dataclass(slots=True)
class PromptCounts:
    """Tokens of the prompts of all requests that were admitted."""

    prompt_tokens: int = 0
    cached_tokens: int = 0

    def start(self, stats: RequestStats, cached_tokens: int) -> None:
        """Record a first admission; a later one, after a preemption, changes nothing."""
        if stats.started is None:
            stats.started, stats.cached_tokens = perf_counter(), cached_tokens
            self.prompt_tokens += stats.prompt_tokens
            self.cached_tokens += cached_tokens


class CacheStats(TypedDict, total=False):
    """Fields of EngineStats that a paged cache provides."""

    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    num_free_pages: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """State of an engine at one moment; counters are since the engine was made.

    Pages are those of the device. For a cache without pages, page counts are None and prompt
    counters 0.
    """

    num_running: int
    num_waiting: int
    """Requests in the queue, and requests whose pages are loading from a tier."""
    generated_tokens: int
    num_preemptions: int
    num_failed_requests: int
    num_repairs: int
    prompt_tokens: int = 0
    """Tokens of prompts that were admitted; a preempted request counts once."""
    cached_tokens: int = 0
    """Tokens of them that the first admission took from the prefix cache."""
    computed_tokens: int = 0
    """Tokens that were computed as parts of prompts; a preempted request counts again."""
    num_free_pages: int | None = None
    """Pages that no request holds, including cached ones."""
    num_pages: int | None = None

    @property
    def page_usage(self) -> float:
        """Share of the pages that requests hold; 0 for a cache without pages."""
        if not self.num_pages or self.num_free_pages is None:
            return 0.0
        return 1 - self.num_free_pages / self.num_pages

    def __str__(self) -> str:
        parts = [f"{self.num_running} running", f"{self.num_waiting} waiting"]
        if self.num_pages is not None:
            parts.append(f"{self.num_free_pages} of {self.num_pages} pages free")
        return ", ".join(parts)


def cache_stats(kv: KVCacheManager, prompts: PromptCounts) -> CacheStats:
    """Statistics of a paged cache; empty for any other cache."""
    if not isinstance(kv, PagedKVCacheManager):
        return {}
    return {
        "prompt_tokens": prompts.prompt_tokens,
        "cached_tokens": prompts.cached_tokens,
        "computed_tokens": kv.get_metrics_aggregated().input_tokens,
        "num_free_pages": kv.num_free_blocks(),
        "num_pages": kv.total_num_blocks(),
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
