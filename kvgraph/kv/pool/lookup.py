"""Prefix lookup: pages that a new row can take from the device, or that a caller can load.

full attention   the run of known pages from the root
a window         the deepest point whose last pages are known, or a run from the root
several leaves   a fixed point: the deepest that all of them can continue from
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import TypeVar

from kvgraph.contract.dims import ceildiv
from kvgraph.kv.pool.leaf import Leaf

T = TypeVar("T")


class PrefixLookup:
    """Prefix lookup over the leaves of one replica; lengths are in pages."""

    __slots__ = ("_leaves", "_page_size")

    def __init__(self, leaves: Sequence[Leaf], page_size: int) -> None:
        self._leaves = leaves
        self._page_size = page_size

    @property
    def epoch(self) -> object:
        """Object that each reset of the cache replaces; results of an earlier epoch are invalid."""
        return self._leaves[0].pool.epoch

    def joint(
        self, digests: Sequence[bytes], loadable: Sequence[Container[bytes]] | None = None
    ) -> int:
        """Number of pages of the longest prefix that every leaf can continue from.

        It counts pages on the device and, per leaf, pages in `loadable`.
        """
        leaves = self._leaves
        if len(leaves) == 1 and loadable is None:
            return self._of_leaf(leaves[0], digests, leaves[0].pool.index)
        known: list[Container[bytes]] = [leaf.pool.index for leaf in leaves]
        if loadable is not None:
            known = [Either(*pair) for pair in zip(known, loadable, strict=True)]
        hit, before = len(digests), -1
        while hit != before:
            before = hit
            for leaf, index in zip(leaves, known, strict=True):
                hit = self._of_leaf(leaf, digests[:hit], index)
        return hit

    def deeper(
        self, digests: Sequence[bytes], hit: int, loadable: Sequence[Container[bytes]]
    ) -> tuple[int, Sequence[Sequence[int]]]:
        """Hit in pages with the loadable pages, and per leaf the positions of pages to load."""
        deeper = self.joint(digests, loadable)
        if deeper <= hit:
            return hit, ()
        return deeper, [
            [
                at
                for at in range(self.first_visible(leaf, deeper), deeper)
                if digests[at] not in leaf.pool.index
            ]
            for leaf in self._leaves
        ]

    def first_visible(self, leaf: Leaf, hit: int) -> int:
        """Index of the first of `hit` pages that the next query after them sees in this leaf."""
        return 0 if leaf.window is None else max(0, hit - self._window_pages(leaf.window))

    def visible(self, leaf: Leaf, digests: Sequence[bytes], hit: int) -> Sequence[bytes]:
        """Digests of the pages that a row with this hit reads in this leaf: the last pages of the
        hit if the leaf has a window."""
        return digests[self.first_visible(leaf, hit) : hit]

    def _of_leaf(self, leaf: Leaf, digests: Sequence[bytes], index: Container[bytes]) -> int:
        if leaf.window is None:
            return longest_run(digests, index)
        return deepest_window(digests, index, self._window_pages(leaf.window))

    def _window_pages(self, window: int) -> int:
        """Number of pages before a page edge that the first query after the edge sees."""
        return ceildiv(window - 1, self._page_size)


class Either:
    """Container of the digests in either of two indexes."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: Container[bytes], second: Container[bytes]) -> None:
        self._first, self._second = first, second

    def __contains__(self, digest: object) -> bool:
        return digest in self._first or digest in self._second


def longest_run(digests: Sequence[bytes], index: Container[bytes]) -> int:
    """Number of pages from the root that `index` holds without a gap."""
    for count, digest in enumerate(digests):
        if digest not in index:
            return count
    return len(digests)


def deepest_window(digests: Sequence[T], index: Container[T], window_pages: int) -> int:
    """Pages of the longest prefix of which `index` holds the last `window_pages` pages, or all
    pages if the prefix has fewer."""
    point, run = len(digests), 0
    for i in reversed(range(len(digests))):
        if run == window_pages:
            return point
        if digests[i] in index:
            run += 1
        else:
            point, run = i, 0
    return point
