"""The pages of one pool: who holds them, which are free, and which hold known content.

    free queue   head [ reallocated first ... released last ] tail
    committed    digest of a token prefix <-> the page that holds its last tokens

A free page keeps its digest until it is reallocated from the head, so a later request with the
same prefix takes it out of the queue again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class PagePool:
    """Reference counts, the free queue and the index of committed pages `[0, num_pages)`.

    Taking a page out of the middle of the queue is lazy: its entry stays behind and is skipped
    when it comes to the head, so every operation is O(1) amortised.
    """

    __slots__ = (
        "_queue",
        "_skips",
        "digests",
        "evictions",
        "index",
        "num_free",
        "num_pages",
        "refs",
    )

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.refs = [0] * num_pages
        self.index: dict[bytes, int] = {}
        self.digests: list[bytes | None] = [None] * num_pages
        self.evictions = 0
        self._queue = deque(range(num_pages))
        self._skips: dict[int, int] = {}  # page -> its entries in the queue that no longer count

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    def take(self, count: int) -> list[int]:
        """`count` pages from the head, held once and un-committed; needs `num_free >= count`."""
        taken = []
        refs, digests, pop = self.refs, self.digests, self._queue.popleft
        for _ in range(count):
            page = pop()
            while page in self._skips:
                self._skip(page)
                page = pop()
            refs[page] = 1
            digest = digests[page]
            if digest is not None:
                del self.index[digest]
                digests[page] = None
                self.evictions += 1
            taken.append(page)
        self.num_free -= count
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder for each page; free ones leave the queue."""
        refs, skips = self.refs, self._skips
        for page in pages:
            if not refs[page]:
                skips[page] = skips.get(page, 0) + 1
                self.num_free -= 1
            refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """One holder fewer for each page; those without any join the tail in this order."""
        refs, queue = self.refs, self._queue
        for page in pages:
            refs[page] -= 1
            if not refs[page]:
                queue.append(page)
                self.num_free += 1
        if len(queue) > self.num_free + self.num_pages + 64:
            self._queue, self._skips = deque(self.free_pages()), {}

    def commit(self, page: int, digest: bytes) -> int:
        """Publish a held page under its digest, and return the page that now holds the content.

        If another page is published already, the holder gets that one and `page` is dropped.
        """
        known = self.index.setdefault(digest, page)
        if known == page:
            self.digests[page] = digest
        else:
            self.hold((known,))
            self.drop((page,))
        return known

    def forget_free(self) -> None:
        """Un-commit every page that nobody holds; the order of the queue stays."""
        for digest, page in list(self.index.items()):
            if not self.refs[page]:
                del self.index[digest]
                self.digests[page] = None

    def free_pages(self) -> Iterator[int]:
        """The free pages, head first."""
        skips = dict(self._skips)
        for page in self._queue:
            if skips.get(page):
                skips[page] -= 1
            else:
                yield page

    def _skip(self, page: int) -> None:
        self._skips[page] -= 1
        if not self._skips[page]:
            del self._skips[page]
