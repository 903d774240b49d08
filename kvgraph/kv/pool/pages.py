"""Pages of one pool: held by requests, pinned by copies, or cached with known content.

    queue       head [ without content | cached, released first ... released last ] tail
    committed   digest of a token prefix <-> the page that holds its last tokens

The queue holds the pages that no request holds. They are reallocated from its head: cached ones
only when no other page is free, the least recently released first. A page keeps its digest until
then, so a later request with the same prefix takes it out of the queue again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from kvgraph.kv.pool.journal import Event, PageRemoved


class PagePool:
    """Reference counts, the queue and the index of committed pages `[0, num_pages)`.

    - `refs`: number of requests that hold a page
    - `pins`: number of copies from or to a page; `offloads`: those copies that end early if a
      request needs the page
    - `num_free`: pages without a request and without a copy
    - `epoch`: replaced by a new object at each `forget`; work of an earlier epoch is not published
    - `journal`: events of committed pages; None if they are not followed

    The queue is a doubly linked ring that ends at the id `num_pages`: every operation takes
    constant time per page.
    """

    __slots__ = (
        "_after",
        "_before",
        "_passed",
        "digests",
        "epoch",
        "evictions",
        "index",
        "journal",
        "num_free",
        "num_pages",
        "offloads",
        "pins",
        "refs",
    )

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.num_free = num_pages
        self.refs = [0] * num_pages
        self.pins: Counter[int] = Counter()
        self.offloads: Counter[int] = Counter()
        self.index: dict[bytes, int] = {}
        self.digests: list[bytes | None] = [None] * num_pages
        self.evictions = 0
        self.epoch = object()
        self.journal: list[Event] | None = None
        ids = list(range(num_pages + 1))
        self._after = ids[1:] + ids[:1]
        self._before = ids[-1:] + ids[:-1]
        self._passed: set[int] = set()  # pinned pages that `take` skipped: not in the queue now

    @property
    def num_used(self) -> int:
        return self.num_pages - self.num_free

    @property
    def next_page(self) -> int:
        """The page that `take` gives next, unless a copy pins it; `num_pages` if there is none."""
        return self._after[self.num_pages]

    @property
    def num_obtainable(self) -> int:
        """Number of free pages and pages that only offloads pin. Any thread may call it; while
        another thread changes the pool, the number is approximate."""
        free, offloaded = self.num_free, list(self.offloads)
        kept = [p for p in offloaded if not self.refs[p] and self.pins[p] == self.offloads[p]]
        return min(self.num_pages, free + len(kept))

    def is_free(self, page: int) -> bool:
        return not self.refs[page] and page not in self.pins

    def take(self, count: int) -> list[int]:
        """Take `count` pages from the head, held once and un-committed; `num_free >= count` must
        hold."""
        taken = []
        refs, digests, pins, after = self.refs, self.digests, self.pins, self._after
        page = after[self.num_pages]
        for _ in range(count):
            while pins and page in pins:
                self._passed.add(page)
                page = after[page]
            refs[page] = 1
            digest = digests[page]
            if digest is not None:
                del self.index[digest]
                digests[page] = None
                self.evictions += 1
                if self.journal is not None:
                    self.journal.append(PageRemoved(digest))
            taken.append(page)
            page = after[page]
        after[self.num_pages], self._before[page] = page, self.num_pages
        self.num_free -= count
        return taken

    def hold(self, pages: Iterable[int]) -> None:
        """Add one request to each page; a page that had none leaves the queue."""
        refs, pins, passed = self.refs, self.pins, self._passed
        after, before = self._after, self._before
        for page in pages:
            if not refs[page]:
                if passed and page in passed:
                    passed.remove(page)
                else:
                    previous, following = before[page], after[page]
                    after[previous], before[following] = following, previous
                if not pins or page not in pins:
                    self.num_free -= 1
            refs[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Remove one request from each page, in this order; pages without any join the queue.

        Cached pages join its tail, pages without content its head.
        """
        refs, pins, digests = self.refs, self.pins, self.digests
        after, before, end = self._after, self._before, self.num_pages
        for page in pages:
            refs[page] -= 1
            if not refs[page]:
                previous = end if digests[page] is None else before[end]
                following = after[previous]
                after[previous] = before[following] = page
                before[page], after[page] = previous, following
                if not pins or page not in pins:
                    self.num_free += 1

    def pin(self, pages: Iterable[int], *, is_offload: bool = False) -> None:
        """Begin a copy from or to the pages: none is reallocated before `unpin`."""
        for page in pages:
            self.num_free -= self.is_free(page)
            self.pins[page] += 1
            if is_offload:
                self.offloads[page] += 1

    def unpin(self, pages: Iterable[int], *, is_offload: bool = False) -> None:
        """End a copy that `pin` began, with the same `is_offload`."""
        for page in pages:
            if is_offload:
                self.offloads[page] -= 1
                if not self.offloads[page]:
                    del self.offloads[page]
            self.pins[page] -= 1
            if self.pins[page]:
                continue
            del self.pins[page]
            if not self.refs[page]:
                self.num_free += 1
                if page in self._passed:
                    self.hold((page,))
                    self.drop((page,))

    def commit(self, page: int, digest: bytes) -> int:
        """Publish a request's page under its digest, and return the page that holds the content.

        If another page is published already, the request gets that one and `page` is dropped.
        """
        known = self.index.setdefault(digest, page)
        if known == page:
            self.digests[page] = digest
        else:
            self.hold((known,))
            self.drop((page,))
        return known

    def publish(self, page: int, digest: bytes) -> bool:
        """Publish a pinned page that no request holds; False if another page has the content."""
        if digest in self.index:
            return False
        self.hold((page,))
        self.index[digest], self.digests[page] = page, digest
        self.drop((page,))
        return True

    def forget(self) -> None:
        """Un-commit every page and begin a new epoch. Requests keep the pages that they hold."""
        self.epoch = object()
        for digest, page in self.index.items():
            self.digests[page] = None
            if self.journal is not None:
                self.journal.append(PageRemoved(digest))
        self.index.clear()

    def free_pages(self) -> Iterator[int]:
        """The free pages, head first."""
        page = self._after[self.num_pages]
        while page != self.num_pages:
            if page not in self.pins:
                yield page
            page = self._after[page]
