"""What an engine tells of its work: of one request, and of all."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TypedDict

from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager


@dataclass(slots=True)
class RequestStats:
    """When a request's parts happened, in seconds of `time.perf_counter`; None: not yet."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that its first admission took from the prefix cache."""
    submitted: float = field(default_factory=perf_counter)
    started: float | None = None
    """Its first tokens were in a step; before, it waited in the queue."""
    first_token: float | None = None
    ended: float | None = None

    def start(self, cached_tokens: int) -> None:
        """A later admission, after a preemption, changes nothing."""
        if self.started is None:
            self.started, self.cached_tokens = perf_counter(), cached_tokens

    @property
    def queue_seconds(self) -> float | None:
        return _between(self.submitted, self.started)

    @property
    def first_token_seconds(self) -> float | None:
        """From its submission to its first token."""
        return _between(self.submitted, self.first_token)

    @property
    def prefill_seconds(self) -> float | None:
        """From its first step to its first token."""
        return _between(self.started, self.first_token)

    @property
    def decode_seconds(self) -> float | None:
        """From its first token to its last one."""
        return _between(self.first_token, self.ended)

    @property
    def total_seconds(self) -> float | None:
        return _between(self.submitted, self.ended)


class CacheStats(TypedDict, total=False):
    """The fields of EngineStats that a cache has."""

    prompt_tokens: int
    cached_tokens: int
    num_free_pages: int
    num_pages: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """An engine at one moment; counters are since it was made.

    Pages are those of the device. A cache without pages has None of them, and no counters of
    prompts.
    """

    num_running: int
    num_waiting: int
    """Requests in the queue, and those whose pages come from a tier."""
    generated_tokens: int
    num_preemptions: int
    num_failed_requests: int
    num_repairs: int
    prompt_tokens: int = 0
    """Tokens of prompts that were admitted: computed, or taken from the prefix cache."""
    cached_tokens: int = 0
    num_free_pages: int | None = None
    """Pages that no request holds; cached ones among them."""
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


def cache_stats(kv: KVCacheManager) -> CacheStats:
    """What a cache of pages tells; nothing of another one."""
    if not isinstance(kv, PagedKVCacheManager):
        return {}
    metrics = kv.get_metrics_aggregated()
    return {
        "prompt_tokens": metrics.prompt_tokens,
        "cached_tokens": metrics.cache_tokens,
        "num_free_pages": kv.num_free_blocks(),
        "num_pages": kv.total_num_blocks(),
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start
