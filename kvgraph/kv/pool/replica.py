"""Bookkeeping of one replica: rows, allocation, commits, windows and finished loads.

A request owns the same number of pages in every leaf, because all leaves have the same page size;
the leaves differ in the pages that a window has freed. A replica does not know of tiers: its calls
return the pages that they committed or freed, or that must be loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraph.contract.abilities import Upload
from kvgraph.errors import CapacityError
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.pool.batch import ReplicaBatch
from kvgraph.kv.pool.identity import PoolSettings, chain
from kvgraph.kv.pool.journal import Event, PagesCleared, PageStored
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.lookup import PrefixLookup
from kvgraph.kv.pool.plan import AllocPlan, Loadable, Planner, RowPlan
from kvgraph.kv.pool.rows import ALLOCATED, CLAIMED, LOADING, UNBOUNDED, Row
from kvgraph.kv.requests import RequestID, TextContext


class Committed(NamedTuple):
    """A page that was committed, as the first page of its leaf with this content."""

    leaf: int
    page: int
    digest: bytes


class Arrival(NamedTuple):
    """A page to be loaded: position `at` of the row in leaf `leaf`."""

    leaf: int
    at: int
    page: int
    digest: bytes


class PageLoad(NamedTuple):
    """Pages that a row waits for; after the load the row's first `hit` pages have known content.

    The row holds the pages; they are pinned until the caller unpins them.
    """

    ctx: TextContext
    row: Row
    hit: int
    arrivals: list[Arrival]


class Replica:
    """A data-parallel replica: its rows, one `Leaf` per cache, and the batch that it runs."""

    def __init__(
        self, index: int, leaves: Sequence[Leaf], settings: PoolSettings, upload: Upload | None
    ) -> None:
        self.index = index
        self.leaves = leaves
        self.settings = settings
        self.prefixes = PrefixLookup(leaves, settings.page_size)
        self.planner = Planner(index, leaves, settings, self.prefixes)
        self.batch = ReplicaBatch(index, leaves, settings, upload)
        self.metrics = KVCacheMetrics()
        self.free_rows = list(reversed(range(settings.max_batch_size)))
        self._upload = upload
        self._windows = [(i, leaf.window) for i, leaf in enumerate(leaves) if leaf.window]
        self.needs_step = settings.prefix_caching or bool(self._windows)
        self._evictions_before = 0

    def rebuilt(self) -> Replica:
        """A replica without requests on the same memory; it keeps the metrics."""
        leaves = [leaf.rebuilt() for leaf in self.leaves]
        fresh = Replica(self.index, leaves, self.settings, self._upload)
        fresh.metrics = self.read_metrics()
        return fresh

    # -- rows

    def open_row(self, request_id: RequestID) -> Row:
        """Take a free row, without pages; CapacityError if no row is free."""
        if not self.free_rows:
            raise CapacityError(
                f"claim of {request_id!r}: expected a free row among the max_batch_size="
                f"{self.settings.max_batch_size} of replica {self.index}, got none"
            )
        return Row(request_id, self.index, self.free_rows.pop(), len(self.leaves))

    def open_dummy(self, request_id: RequestID) -> Row:
        """Take a free row that points at the null page in every leaf."""
        row = self.open_row(request_id)
        row.become_dummy([leaf.null for leaf in self.leaves], self.settings)
        return row

    def close_row(self, row: Row) -> list[list[bytes]]:
        """Free the row and all its pages, the last page first.

        Returns, per leaf, digests of the freed pages that were committed, in the order of tokens.
        """
        for i, leaf in enumerate(self.leaves):
            leaf.clear(row, i)
        self.free_rows.append(row.index)
        self.batch.forget()
        return [row.digests[passed : row.committed] for passed in row.passed]

    # -- alloc: `planner` plans, `apply` carries out

    def pct_used_after(self, ctx: TextContext, row: Row | None, loadable: Loadable | None) -> float:
        """Percentage of the fullest leaf's pages in use after `alloc`; `row` is None before
        `claim`."""
        row = Row(ctx.request_id, self.index, 0, len(self.leaves)) if row is None else row
        costs = self.planner.forecast(ctx, row, loadable)
        return max(
            100.0 * (leaf.pool.num_used + cost) / leaf.pool.num_pages
            for leaf, cost in zip(self.leaves, costs, strict=True)
        )

    def apply(self, plan: AllocPlan) -> list[PageLoad]:
        """Carry out a plan and return the loads to start. Cannot fail. All hits are held before
        fresh pages are taken, so that no row reallocates them."""
        for one in plan.rows:
            if one.row.phase is CLAIMED:
                self._open(one)
        loads: list[PageLoad] = []
        for one in plan.rows:
            load = self._extend(one)
            if load is not None:
                loads.append(load)
        return loads

    def _open(self, plan: RowPlan) -> None:
        """Give a row its cached pages, with null pages before a window.

        Null pages also stand for pages to be loaded, until `_take_for_load` takes these.
        """
        ctx, row, hit = plan.ctx, plan.row, plan.hit
        row.root, row.digests, row.committed = plan.root, plan.digests, hit
        row.epoch = None if ctx.is_private else self.prefixes.epoch
        ctx.cached_prefix_length = row.counted = hit * self.settings.page_size
        if not hit:
            return
        served = 0
        for i, leaf in enumerate(self.leaves):
            pages = self.planner.hit_pages(leaf, plan)
            leaf.pool.hold(pages)
            served += len(pages)
            if plan.loads:
                visible = self.prefixes.visible(leaf, plan.digests, hit)
                pages = [leaf.pool.index.get(digest, leaf.null) for digest in visible]
            row.passed[i] = hit - len(pages)
            leaf.extend(row, i, [leaf.null] * row.passed[i] + pages)
        chunk = ctx.active_length
        ctx.skip_processing(ctx.cached_prefix_length)
        ctx.active_length = min(chunk, ctx.active_length)
        if not plan.loads:
            self._count_hit(hit, served)

    def _extend(self, plan: RowPlan) -> PageLoad | None:
        ctx, row = plan.ctx, plan.row
        fresh = plan.num_pages - row.num_pages
        if fresh or plan.hit:
            for i, leaf in enumerate(self.leaves):
                leaf.extend(row, i, leaf.pool.take(fresh))
            self.batch.mark(row)
        if plan.loads:
            return self._take_for_load(plan)
        if row.phase is LOADING:
            return None
        row.prefill_end = row.prefill_end or ctx.current_length
        end = min(ctx.processed_length + ctx.active_length, row.prefill_end)
        if end > row.counted:
            self.metrics.input_tokens += end - row.counted
            row.counted = end
        row.enter(ALLOCATED if plan.num_pages else CLAIMED, self.settings)
        return None

    def _count_hit(self, hit: int, served: int) -> None:
        self.metrics.device_blocks_served += served
        self.metrics.cache_tokens += hit * self.settings.page_size

    # -- loads

    def _take_for_load(self, plan: RowPlan) -> PageLoad:
        row, arrivals = plan.row, list[Arrival]()
        row.committed = min(positions[0] for positions in plan.loads if positions)
        for i, (leaf, positions) in enumerate(zip(self.leaves, plan.loads, strict=True)):
            pages = leaf.pool.take(len(positions))
            leaf.pool.pin(pages)
            for at, page in zip(positions, pages, strict=True):
                self._point(row, i, at, page)
                arrivals.append(Arrival(i, at, page, row.digests[at]))
        row.enter(LOADING, self.settings)
        return PageLoad(plan.ctx, row, plan.hit, arrivals)

    def land(self, load: PageLoad) -> None:
        """Finish a load: publish its pages, which hold their content, and let the row run."""
        row, hit = load.row, load.hit
        stored = []
        for i, at, page, digest in reversed(load.arrivals):
            known = self.leaves[i].pool.commit(page, digest)
            if known != page:
                self._point(row, i, at, known)
            else:
                stored.append((i, at))
        for i, at in reversed(stored):
            self._note(i, load.ctx, row, at)
        row.committed = hit
        row.enter(ALLOCATED, self.settings)
        self._count_hit(hit, sum(hit - passed for passed in row.passed) - len(load.arrivals))

    def adopt(self, load: PageLoad, landed: int) -> None:
        """Publish the first `landed` pages of a load; its row holds no pages any more."""
        stored = [
            (i, at)
            for i, at, page, digest in reversed(load.arrivals[:landed])
            if self.leaves[i].pool.publish(page, digest)
        ]
        for i, at in reversed(stored):
            self._note(i, load.ctx, load.row, at)

    def roll_back(self, load: PageLoad, landed: int) -> None:
        """Undo a failed load: the row owns no page, as after `claim`. The first `landed` pages
        become cached."""
        row = load.row
        for i, leaf in enumerate(self.leaves):
            leaf.clear(row, i)
            row.pages[i] = []
        self.adopt(load, landed)
        row.passed = [0] * len(self.leaves)
        row.root, row.digests = b"", []
        row.committed = row.counted = 0
        row.enter(CLAIMED, self.settings)
        self.metrics.load_failures += 1
        self.batch.mark(row)

    # -- after a step

    def step(self, awake: Sequence[tuple[TextContext, Row]]) -> list[Committed]:
        """Commit full, processed pages, and free pages behind windows. Cannot fail.

        Returns the committed pages, without pages whose content another page holds.
        """
        committed: list[Committed] = []
        for ctx, row in awake:
            if row.phase is ALLOCATED:
                self._advance(ctx, row, committed)
        return committed

    def commits(self, row: Row) -> bool:
        """Whether the row's pages are committed: not after a reset since its first pages."""
        return self.settings.prefix_caching and row.epoch is self.prefixes.epoch

    def _advance(self, ctx: TextContext, row: Row, committed: list[Committed]) -> None:
        page_size = self.settings.page_size
        wakes = [UNBOUNDED]
        if self.commits(row):
            self._commit(ctx, row, committed)
            wakes.append((row.committed + 1) * page_size)
        for i, window in self._windows:
            self._slide(ctx, row, i, window)
            wakes.append((row.passed[i] + 1) * page_size + window - 1)
        row.wake = min(wakes)

    def _commit(self, ctx: TextContext, row: Row, committed: list[Committed]) -> None:
        """Commit full, processed pages to the index; the last token is never hashed."""
        size = self.settings.page_size
        full = min(min(ctx.processed_length, ctx.current_length - 1) // size, row.num_pages)
        first = row.committed
        if full <= first:
            return
        hashed = len(row.digests)
        if full > hashed:
            last = row.digests[-1] if hashed else row.root
            row.digests += chain(last, ctx.tokens, size, hashed, full)
        for i, leaf in enumerate(self.leaves):
            pages, commit = row.pages[i], leaf.pool.commit
            for at in range(max(first, row.passed[i]), full):
                known = commit(pages[at], row.digests[at])
                if known == pages[at]:
                    committed.append(Committed(i, known, row.digests[at]))
                    self._note(i, ctx, row, at)
                else:
                    self._point(row, i, at, known)
        row.committed = full

    def _note(self, i: int, ctx: TextContext, row: Row, at: int) -> None:
        """Add to leaf `i`'s journal that the page at position `at` of the row was committed."""
        journal = self.leaves[i].pool.journal
        if journal is not None:
            size = self.settings.page_size
            tokens = ctx.tokens[at * size : (at + 1) * size].tolist()
            journal.append(PageStored(row.digests[at], row.digests[at - 1] if at else None, tokens))

    def _slide(self, ctx: TextContext, row: Row, i: int, window: int) -> None:
        """Free the pages that no later query sees; the null page replaces them in the row."""
        visible = ctx.processed_length - window + 1
        passed = min(max(0, visible) // self.settings.page_size, row.num_pages)
        if passed <= row.passed[i]:
            return
        leaf, pages = self.leaves[i], row.pages[i]
        gone = pages[row.passed[i] : passed]
        for at in range(row.passed[i], passed):
            self._point(row, i, at, leaf.null)
        row.passed[i] = passed
        leaf.pool.drop(reversed(gone))

    def _point(self, row: Row, i: int, at: int, page: int) -> None:
        """Set position `at` of the row to `page` in leaf `i`."""
        leaf = self.leaves[i]
        row.pages[i][at] = page
        leaf.table[row.index, at] = page
        self.batch.mark(row)

    # -- cache and metrics

    @property
    def followed(self) -> Leaf:
        """The leaf whose events `follow` records: the first without a window, or the first leaf."""
        return next((leaf for leaf in self.leaves if not leaf.window), self.leaves[0])

    def follow(self) -> list[Event]:
        """Start and return the list to which events of committed pages are appended."""
        pool = self.followed.pool
        pool.journal = [PagesCleared()]
        return pool.journal

    def reset_prefix_cache(self) -> None:
        """Un-commit all pages; rows that are claimed now commit no more pages."""
        for leaf in self.leaves:
            leaf.pool.forget()

    def read_metrics(self) -> KVCacheMetrics:
        evictions = sum(leaf.pool.evictions for leaf in self.leaves)
        return self.metrics + KVCacheMetrics(evictions=evictions - self._evictions_before)

    def reset_metrics(self) -> None:
        self.metrics = KVCacheMetrics()
        self._evictions_before = sum(leaf.pool.evictions for leaf in self.leaves)
