"""The manager of an artifact's kind of cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import RequestError
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.memory import plan_leaves
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime.sessions.base import Session


def make_manager(
    params: KVCacheParams | MultiKVCacheParams,
    session: Session,
    num_pages: int | None,
    cache_memory: int,
    max_batch_size: int,
    max_batch_tokens: int,
    max_seq_len: int,
    num_dummies: int,
    tiers: Mapping[str, Any],
) -> KVCacheManager:
    """The manager of the artifact's cache kind, with rows for requests and `num_dummies` more."""
    if isinstance(params, KVCacheParams) and params.cache_strategy is not KVCacheStrategy.PAGED:
        if num_pages is not None:
            raise RequestError(
                f"num_pages: expected None for a {params.cache_strategy} cache, got {num_pages}"
            )
        continuous = params.cache_strategy is KVCacheStrategy.CONTINUOUS
        kind = ContinuousBatchingKVCacheManager if continuous else PaddedKVCacheManager
        return kind(params, max_batch_size, max_seq_len, params.num_layers, params.devices, session)
    pages: int | dict[str, int] | None = num_pages
    if pages is None:
        plan = plan_leaves(params, cache_memory, max_batch_size, max_seq_len, max_batch_tokens)
        pages = plan.pages
    return PagedKVCacheManager(
        params,
        session,
        pages,
        max_batch_size=max_batch_size + num_dummies,
        max_seq_len=max_seq_len,
        **tiers,
    )
