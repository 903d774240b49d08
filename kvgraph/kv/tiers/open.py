"""Opens the tiers of a manager: sizes of the host's slab, and the stores below it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from kvgraph.contract.sizes import size_text
from kvgraph.errors import CapacityError
from kvgraph.kv.tiers.copies import PageCopier
from kvgraph.kv.tiers.host import HostStore
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.store import PageStore
from kvgraph.kv.tiers.tiered import TieredConnector

StoreOpener = Callable[[bytes, int], PageStore]
"""`opener(fingerprint, page_bytes)`: of the model, layout and format; of the largest record."""

STAGING_BYTES = 64 << 20
"""Of each leaf: host memory through which pages pass to and from the stores."""

LEAST_STAGING = 4
"""Slots, where pages are larger than that."""


def fingerprint_of(identity: bytes) -> bytes:
    """What tells stores of different models, layouts and formats apart; 32 bytes."""
    return sha256(b"kvgraph-tier-1\0" + identity).digest()


def open_tiers(
    pools: Sequence[Sequence[LeafPools]],
    num_pages: Mapping[str, int],
    host_pages: Mapping[str, int],
    identity: bytes,
    stores: Sequence[StoreOpener],
    sources: Sequence[StoreOpener],
    *,
    threads: bool = True,
) -> TieredConnector:
    """The connector of `pools[replica][leaf]`; their pages and the host's by leaf path.

    `identity`: of model and layout. StoreError for what a user has to change, CapacityError for
    more host memory than the system promises; then nothing stays open. A UserWarning for a store
    that cannot be used now: it misses until it can.
    """
    sizes = {own.leaf: own.record_size for own in pools[0]}
    pages: dict[int, int] = {}
    staging: dict[int, int] = {}
    for leaf, size in sizes.items():
        room = max(LEAST_STAGING, min(num_pages[leaf], STAGING_BYTES // size))
        pages[size] = pages.get(size, 0) + host_pages[leaf]
        staging[size] = staging.get(size, 0) + (room if stores else 1)
    fingerprint, largest = fingerprint_of(identity), max(sizes.values())
    opened: list[PageStore] = []
    try:
        for opener in (*sources, *stores):
            opened.append(opener(fingerprint, largest))
        for store in opened:
            if problem := store.stats().problem:
                warnings.warn(f"{problem}; it is missed until it can be used", stacklevel=2)
        host = _host_store(pages, staging, pools[0][0].copier)
    except BaseException:
        for store in opened:
            store.close()
        raise
    return TieredConnector(
        host,
        opened[len(sources) :],
        opened[: len(sources)],
        largest=largest,
        max_offloads=sum(num_pages.values()) * len(pools),
        max_writes=sum(staging.values()) + sum(pages.values()) // 2,
        threads=threads,
    )


def _host_store(
    pages: Mapping[int, int], staging: Mapping[int, int], copier: PageCopier
) -> HostStore:
    try:
        return HostStore(pages, staging, copier.pinned_host_bytes)
    except (CapacityError, MemoryError, ValueError) as error:
        nbytes = sum(size * count for of in (pages, staging) for size, count in of.items())
        raise CapacityError(
            f"host_memory: expected {size_text(nbytes)} for {sum(pages.values())} pages and what "
            "passes through, which the system refused; use less"
        ) from error
