"""Committed pages read from, and put into, the pools of a replica outside of any request."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvgraph.errors import InsufficientPagesError
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.pages import PagePool
from kvgraph.kv.tiers.leaf_pools import LeafPools


class LeafPages(NamedTuple):
    """Pages of one leaf and what they hold: `pages[i]` the end of the prefix `digests[i]`."""

    pools: LeafPools
    digests: Sequence[bytes]
    pages: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.pools.record_size * len(self.pages)

    def only(self, at: Sequence[int]) -> LeafPages:
        """Those at these positions."""
        return LeafPages(self.pools, [self.digests[i] for i in at], [self.pages[i] for i in at])


@contextmanager
def held_pages(
    leaves: Sequence[Leaf], leaf_pools: Sequence[LeafPools], digests: Sequence[Sequence[bytes]]
) -> Iterator[list[LeafPages]]:
    """The committed pages of `digests[leaf]`; none is reallocated within the scope."""
    held = [
        LeafPages(pools, own, [leaf.pool.index[digest] for digest in own])
        for leaf, pools, own in zip(leaves, leaf_pools, digests, strict=True)
    ]
    for leaf, one in zip(leaves, held, strict=True):
        leaf.pool.pin(one.pages)
    try:
        yield held
    finally:
        for leaf, one in zip(leaves, held, strict=True):
            leaf.pool.unpin(one.pages)


@contextmanager
def adopted_pages(
    leaves: Sequence[Leaf], leaf_pools: Sequence[LeafPools], digests: Sequence[Sequence[bytes]]
) -> Iterator[list[LeafPages]]:
    """Free pages for those of `digests[leaf]` that the device lacks, to be filled in the scope.

    At its end they are committed and free; after an error, or a reset of the cache within the
    scope, they are free as before. InsufficientPagesError if too few are free.
    """
    pools = [leaf.pool for leaf in leaves]
    missing = [
        [digest for digest in own if digest not in pool.index]
        for pool, own in zip(pools, digests, strict=True)
    ]
    for pool, own in zip(pools, missing, strict=True):
        if len(own) > pool.num_free:
            raise InsufficientPagesError(
                f"pages of another engine: expected {len(own)} free pages, got {pool.num_free} "
                f"({pool.num_used} used of {pool.num_pages} in total)",
                needed=len(own),
                free=pool.num_free,
                used=pool.num_used,
                total=pool.num_pages,
            )
    held = [_pinned(pool, len(own)) for pool, own in zip(pools, missing, strict=True)]
    epochs = [pool.epoch for pool in pools]
    try:
        yield [LeafPages(*one) for one in zip(leaf_pools, missing, held, strict=True)]
        if epochs == [pool.epoch for pool in pools]:
            for pool, pages, own in zip(pools, held, missing, strict=True):
                for page, digest in zip(reversed(pages), reversed(own), strict=True):
                    pool.publish(page, digest)
    finally:
        for pool, pages in zip(pools, held, strict=True):
            pool.unpin(pages)


def _pinned(pool: PagePool, count: int) -> list[int]:
    pages = pool.take(count)
    pool.pin(pages)
    pool.drop(pages)
    return pages
