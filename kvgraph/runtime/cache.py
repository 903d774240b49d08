"""Builds an engine's KV cache: a manager of the artifact's kind of cache, with its tiers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from kvgraph.contract.dims import BATCH_SIZE, NUM_LOGITS, TOTAL_SEQ_LEN
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import RequestError
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.memory import SCORED_TOKENS, most_logits, plan_leaves
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.tiers.open import StoreOpener
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.buckets import DecodeBuckets, dummy_rows
from kvgraph.runtime.cache_memory import default_bytes
from kvgraph.runtime.config import BatchConfig, CacheConfig, TierConfig
from kvgraph.runtime.pace import FixedPace, Pace, StepPace
from kvgraph.runtime.prefix_file import Prefix, PrefixStore, read_prefix
from kvgraph.runtime.scheduler import Scheduler
from kvgraph.runtime.sessions.base import Session


def make_cache(
    artifact: Artifact, session: Session, cache: CacheConfig, tiers: TierConfig, batch: BatchConfig
) -> tuple[KVCacheManager, Scheduler, DecodeBuckets | None]:
    """Return the cache manager, the scheduler, and the buckets if decode steps are captured.

    RequestError if a config does not fit the artifact's kind of cache, or its ranks.
    """
    strategy = artifact.params().cache_strategy
    caching = cache.enable_prefix_caching
    if caching is None:
        caching = strategy is KVCacheStrategy.PAGED
    params = artifact.params(enable_prefix_caching=caching)
    rows = 1 if strategy is KVCacheStrategy.PADDED else batch.max_batch_size  # in lockstep
    rows = min(rows, session.limits.get(BATCH_SIZE, rows))
    tokens = batch.max_batch_tokens or session.step_tokens
    tokens = min(tokens, session.limits.get(TOTAL_SEQ_LEN, tokens))
    captures = session.captures and strategy is KVCacheStrategy.PAGED
    longest = artifact.manifest.model.max_seq_len
    options = tier_options(params, tiers)
    if options and artifact.ranks > 1 and not session.host_pools:
        raise RequestError(
            f"tiers: expected none for {artifact.ranks} ranks on GPUs or several machines, where "
            "rank 0 does not reach all pools, got some"
        )
    kv: KVCacheManager
    if isinstance(params, KVCacheParams) and strategy is not KVCacheStrategy.PAGED:
        kv = _unpaged(params, session, cache, rows, longest)
    else:
        pages: int | Mapping[str, int] | None = cache.num_pages
        if pages is None:
            nbytes = cache.nbytes
            if nbytes is None:
                logits = min(most_logits(rows, tokens), session.limits.get(NUM_LOGITS, tokens))
                nbytes = default_bytes(params, session, tokens, logits, longest)
            planned = plan_leaves(params, nbytes, rows, longest, tokens).pages
            pages = {path: min(n, _most_pages(session, path)) for path, n in planned.items()}
        most = rows + (dummy_rows(rows) if captures else 0)
        kv = PagedKVCacheManager(
            params, session, pages, max_batch_size=most, max_seq_len=longest, **options
        )
    session.require_symbols(kv.input_symbols()[0])
    # In addition to one row per request; the graph may be compiled for fewer rows of logits.
    scored = min(SCORED_TOKENS, session.limits.get(NUM_LOGITS, rows + SCORED_TOKENS) - rows)
    scheduler = Scheduler(kv, rows, tokens, scored, _pace(batch.max_prefill_tokens))
    if not captures:
        return kv, scheduler, None
    assert isinstance(kv, PagedKVCacheManager)
    return kv, scheduler, DecodeBuckets(kv, rows, longest)


def _pace(max_prefill_tokens: int | Literal["auto"] | None) -> Pace | None:
    if max_prefill_tokens is None:
        return None
    return StepPace() if max_prefill_tokens == "auto" else FixedPace(max_prefill_tokens)


def _most_pages(session: Session, path: str) -> int:
    """Most pages of the leaf at `path` that the compiled graph allows, without the null page."""
    name = f"{path}.kv_blocks" if path else "kv_blocks"
    pool = next(symbol for symbol in session.signature.buffers if symbol.name == name)
    return session.limits.get(str(pool.shape[0]), sys.maxsize) - 1


def _unpaged(
    params: KVCacheParams, session: Session, cache: CacheConfig, rows: int, longest: int
) -> KVCacheManager:
    """A manager of a cache that keeps each row's tokens contiguous."""
    for name in ("num_pages", "cache_memory"):
        if (given := getattr(cache, name)) is not None:
            raise RequestError(
                f"{name}: expected None for a {params.cache_strategy} cache, got {given}"
            )
    continuous = params.cache_strategy is KVCacheStrategy.CONTINUOUS
    kind = ContinuousBatchingKVCacheManager if continuous else PaddedKVCacheManager
    return kind(params, rows, longest, params.num_layers, params.devices, session)


def tier_options(params: KVCacheParams | MultiKVCacheParams, tiers: TierConfig) -> dict[str, Any]:
    """Keyword arguments of a paged manager; empty if no tier is configured.

    `host_memory` bytes are divided into equally many pages of every leaf. RequestError for tiers
    below a cache without pages.
    """
    pages = tiers.total_num_host_pages
    if pages is None:
        pages = tiers.host_nbytes // params.bytes_per_page
        if tiers.host_nbytes and not pages:
            raise RequestError(
                f"host_memory: expected at least one page of {params.bytes_per_page} bytes, "
                f"got {tiers.host_nbytes} bytes"
            )
    stores = _stores(tiers)
    sources = [_source(prefix) for prefix in tiers.prefixes]
    if not (pages or stores or sources):
        return {}
    if params.cache_strategy is not KVCacheStrategy.PAGED:
        raise RequestError(f"tiers: expected a paged cache, got {params.cache_strategy}")
    return {"total_num_host_pages": pages, "stores": stores, "sources": sources}


def _stores(tiers: TierConfig) -> list[StoreOpener]:
    """Openers of the tiers that pages are written to, nearest tier first."""
    stores: list[StoreOpener] = []
    if tiers.disk is not None:
        from kvgraph.kv.tiers.disk.store import DiskStore

        stores.append(partial(DiskStore, Path(tiers.disk), tiers.disk_nbytes))
    if tiers.remote is not None:
        from kvgraph.kv.tiers.remote import RemoteStore

        stores.append(partial(RemoteStore, tiers.remote))
    return stores


def _source(prefix: str | Path | Prefix) -> StoreOpener:
    return partial(PrefixStore, prefix if isinstance(prefix, Prefix) else read_prefix(prefix))
