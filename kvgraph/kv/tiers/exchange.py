"""Read committed pages from a replica's pools, or add pages to them, without a request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from kvgraph.errors import InsufficientPagesError
from kvgraph.kv.pool.journal import PageStored
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.pages import PagePool
from kvgraph.kv.tiers.leaf_pools import LeafPools


class LeafPages(NamedTuple):
    """Pages of one leaf and their content: `pages[i]` holds the end of the prefix `digests[i]`."""

    pools: LeafPools
    digests: Sequence[bytes]
    pages: Sequence[int]

    @property
    def nbytes(self) -> int:
        return self.pools.record_size * len(self.pages)

    def only(self, at: Sequence[int]) -> LeafPages:
        """The pages at the positions `at`."""
        return LeafPages(self.pools, [self.digests[i] for i in at], [self.pages[i] for i in at])


@contextmanager
def held_pages(
    leaves: Sequence[Leaf], leaf_pools: Sequence[LeafPools], digests: Sequence[Sequence[bytes]]
) -> Iterator[list[LeafPages]]:
    """Yield the committed pages of `digests[leaf]`; none is reallocated within the scope."""
    held = [
        LeafPages(pools, own, [leaf.pool.index[digest] for digest in own])
        for leaf, pools, own in zip(leaves, leaf_pools, digests, strict=True)
    ]
    with _pinned([leaf.pool for leaf in leaves], [one.pages for one in held]):
        yield held


@contextmanager
def adopted_pages(
    leaves: Sequence[Leaf],
    leaf_pools: Sequence[LeafPools],
    digests: Sequence[Sequence[bytes]],
    stored: Iterable[PageStored],
) -> Iterator[list[LeafPages]]:
    """Yield free pages for the `digests[leaf]` that the device lacks; fill them in the scope.

    At the scope's end they are committed and free; after an error, or a reset of the cache within
    the scope, they are free and not committed. Pages that the device already has stay there, and do
    not count as free. InsufficientPagesError if too few pages are free. `stored`: the journal's
    events for the pages; a page without one is recorded with its digest only.
    """
    pools = [leaf.pool for leaf in leaves]
    present = [
        [pool.index[digest] for digest in own if digest in pool.index]
        for pool, own in zip(pools, digests, strict=True)
    ]
    missing = [
        [digest for digest in own if digest not in pool.index]
        for pool, own in zip(pools, digests, strict=True)
    ]
    with _pinned(pools, present):
        _require_free(pools, missing)
        fresh = [pool.take(len(own)) for pool, own in zip(pools, missing, strict=True)]
        with _pinned(pools, fresh):
            for pool, pages in zip(pools, fresh, strict=True):
                pool.drop(pages)
            epochs = [pool.epoch for pool in pools]
            yield [LeafPages(*one) for one in zip(leaf_pools, missing, fresh, strict=True)]
            if epochs == [pool.epoch for pool in pools]:
                told = {one.digest: one for one in stored}
                for pool, pages, lacked, own in zip(pools, fresh, missing, digests, strict=True):
                    _publish(pool, pages, lacked, told)
                    _renew(pool, own)


@contextmanager
def _pinned(pools: Sequence[PagePool], pages: Sequence[Sequence[int]]) -> Iterator[None]:
    """Pin `pages[pool]`: none of them is reallocated within the scope."""
    for pool, own in zip(pools, pages, strict=True):
        pool.pin(own)
    try:
        yield
    finally:
        for pool, own in zip(pools, pages, strict=True):
            pool.unpin(own)


def _require_free(pools: Sequence[PagePool], missing: Sequence[Sequence[bytes]]) -> None:
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


def _publish(
    pool: PagePool, pages: Sequence[int], digests: Sequence[bytes], told: Mapping[bytes, PageStored]
) -> None:
    for page, digest in zip(pages, digests, strict=True):
        if pool.publish(page, digest) and pool.journal is not None:
            pool.journal.append(told.get(digest, PageStored(digest, None, [])))


def _renew(pool: PagePool, digests: Sequence[bytes]) -> None:
    """Make all pages of a prefix the most recently used, old and new ones alike; its start last of
    all, since without the start the other pages cannot be hit."""
    pages = [pool.index[digest] for digest in digests if digest in pool.index]
    pool.hold(pages)
    pool.drop(reversed(pages))
