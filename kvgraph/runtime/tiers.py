"""The tiers below an engine's pool: from the settings of a deployment to what a manager takes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import RequestError
from kvgraph.kv.tiers.open import StoreOpener
from kvgraph.runtime.prefix import Prefix, PrefixStore

DEFAULT_DISK_BYTES = 16 << 30
"""Size limit of a disk tier where none is given."""


def tier_options(
    params: KVCacheParams | MultiKVCacheParams,
    *,
    total_num_host_pages: int | None,
    host_memory: int,
    disk: str | Path | None,
    disk_bytes: int,
    remote: str | None,
    prefixes: Sequence[Prefix],
) -> dict[str, Any]:
    """Keyword arguments of a paged manager; none where there are no tiers.

    `host_memory` bytes hold as many pages of every leaf; `total_num_host_pages` wins over it.
    RequestError for tiers below a cache without pages.
    """
    pages = total_num_host_pages
    if pages is None:
        pages = host_memory // params.bytes_per_page
        if host_memory and not pages:
            raise RequestError(
                f"host_memory: expected at least one page of {params.bytes_per_page} bytes, "
                f"got {host_memory} bytes"
            )
    stores = [*_disk(disk, disk_bytes), *_remote(remote)]
    sources: list[StoreOpener] = [partial(PrefixStore, prefix) for prefix in prefixes]
    if not (pages or stores or sources):
        return {}
    if params.cache_strategy is not KVCacheStrategy.PAGED:
        raise RequestError(f"tiers: expected a paged cache, got {params.cache_strategy}")
    return {"total_num_host_pages": pages, "stores": stores, "sources": sources}


def _disk(folder: str | Path | None, max_bytes: int) -> list[StoreOpener]:
    if folder is None:
        return []
    from kvgraph.kv.tiers.disk.store import DiskStore

    return [partial(DiskStore, Path(folder), max_bytes)]


def _remote(url: str | None) -> list[StoreOpener]:
    if url is None:
        return []
    from kvgraph.kv.tiers.remote import RemoteStore

    return [partial(RemoteStore, url)]
