"""EngineFacts: facts about an engine for a server whose engine may be in another process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvgraph.contract.params import KVCacheParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.runtime.engine import Engine


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine's fixed limits."""

    vocab_size: int
    longest: int
    """Tokens of the longest context that model and pool can hold."""
    max_batch_size: int
    max_batch_tokens: int
    page_size: int
    prefix_caching: bool
    num_pages: int | None
    leaves: tuple[KVCacheParams, ...] = ()
    """Parameters of each leaf of a paged cache; empty for any other cache."""
    settings: PoolSettings | None = None
    """Settings that the digests of pages depend on; None without a prefix cache."""
    routed_pages: int = 0
    """Number of pages that routers track: of the leaf that keeps whole prefixes."""
    window: int | None = None
    """Window in tokens if every layer has one: the cache then keeps no whole prefixes."""


def facts_of(engine: Engine) -> EngineFacts:
    kv, rows = engine.kv, engine.scheduler
    facts = EngineFacts(
        engine.model.vocab_size,
        engine._builder.longest_context(),
        rows.max_batch_size,
        rows.max_batch_tokens,
        kv.settings.page_size if isinstance(kv, PagedKVCacheManager) else kv.params.page_size,
        kv.params.enable_prefix_caching,
        engine.stats().num_pages,
    )
    if not isinstance(kv, PagedKVCacheManager):
        return facts
    facts = replace(facts, leaves=tuple(kv.params.leaves.values()))
    if not facts.prefix_caching:
        return facts
    pages, window = kv.followed()
    return replace(facts, settings=kv.settings, routed_pages=pages, window=window)
