"""What a server must know of an engine that it may not hold itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgraph.errors import RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's limits, which do not change while it runs."""

    vocab_size: int
    longest: int
    """Tokens of the longest context that model and pool can hold."""
    max_batch_size: int
    max_batch_tokens: int
    page_size: int
    prefix_caching: bool
    num_pages: int | None
    settings: PoolSettings | None = None
    """How pages are told apart; None without a prefix cache."""
    routed_pages: int = 0
    """Pages that routers are told of: those of the cache that keeps whole prefixes."""
    window: int | None = None
    """Of a model whose every layer has one, in tokens: its cache keeps no whole prefixes."""


def facts_of(engine: Engine) -> EngineFacts:
    kv, rows = engine.kv, engine.scheduler
    facts = EngineFacts(
        engine.model.vocab_size,
        longest_context(engine),
        rows.max_batch_size,
        rows.max_batch_tokens,
        kv.params.page_size,
        kv.params.enable_prefix_caching,
        engine.stats().num_pages,
    )
    if not (isinstance(kv, PagedKVCacheManager) and facts.prefix_caching):
        return facts
    pages, window = kv.followed()
    return replace(facts, settings=kv.settings, routed_pages=pages, window=window)


def longest_context(engine: Engine) -> int:
    """Tokens of prompt and output that a request may have: of the model, and in the pool."""
    low, high = 1, engine.model.max_seq_len
    chunk = engine.scheduler.max_batch_tokens
    while low < high:
        middle = (low + high + 1) // 2
        try:
            engine.kv.require_room("longest", middle - 1, chunk)
            low = middle
        except RequestError:
            high = middle - 1
    return low
