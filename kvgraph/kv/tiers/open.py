"""Open the tiers of a manager: the host's slab and the stores below it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256

from kvgraph.contract.abilities import PageCopier
from kvgraph.contract.sizes import size_text
from kvgraph.errors import CapacityError, StoreError
from kvgraph.kv.tiers.host import HostStore
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.store import PageStore
from kvgraph.kv.tiers.tiered import TieredConnector

StoreOpener = Callable[[bytes, int], PageStore]
"""`opener(fingerprint, page_bytes)` opens a store. `fingerprint`: of model, layout and format.
`page_bytes`: size of the largest record."""

HOST = "host"
"""Name of the tier in host memory."""

STAGING_BYTES = 64 << 20
"""Bytes of host memory of each leaf through which pages pass to and from the stores."""

LEAST_STAGING = 4
"""Least number of staging slots of a leaf, even if they take more than STAGING_BYTES."""


def fingerprint_of(identity: bytes) -> bytes:
    """The 32-byte fingerprint that separates stores of different models, layouts and formats."""
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
    """Open the stores and return the connector of `pools[replica][leaf]`.

    `num_pages`, `host_pages`: pages of the device and of the host, by leaf path. `identity`:
    identity of model and layout. StoreError for an error that the user must fix, CapacityError if
    the system refuses host memory or a thread; then no store stays open. UserWarning for a store
    that cannot be used now: its reads are misses until it can.
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
            store = opener(fingerprint, largest)
            name = getattr(store, "name", None)
            if isinstance(name, str):
                opened.append(store)
            if not isinstance(name, str) or name == HOST:
                raise StoreError(
                    "stores: expected a PageStore from each opener, with a name other than "
                    f"{HOST!r}, got {type(store).__name__} with the name {name!r}"
                )
        for store in opened:
            if problem := store.stats().problem:
                warnings.warn(f"{problem}; it is missed until it can be used", stacklevel=2)
        return TieredConnector(
            _host_store(pages, staging, pools[0][0].copier),
            opened[len(sources) :],
            opened[: len(sources)],
            largest=largest,
            max_offloads=sum(num_pages.values()) * len(pools),
            max_writes=sum(staging.values()) + sum(pages.values()) // 2,
            threads=threads,
        )
    except BaseException:
        for store in opened:
            store.close()
        raise


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
