"""One replica's bookkeeping: rows, plans carried out, commits, windows, loads that landed.

A request owns the same number of pages in every leaf, because all leaves agree on the page size;
they differ in which pages a window has left behind. What happens to pages outside of the replica
is not known here: its calls return what they committed, freed and want loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvgraph.errors import CapacityError
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.pool.batch import ReplicaBatch, Upload
from kvgraph.kv.pool.identity import PoolSettings, chain
from kvgraph.kv.pool.journal import Cleared, Event, Stored
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.lookup import PrefixLookup
from kvgraph.kv.pool.plan import AllocPlan, Loadable, Planner, RowPlan
from kvgraph.kv.pool.rows import ALLOCATED, CLAIMED, LOADING, UNBOUNDED, Row
from kvgraph.kv.requests import RequestID, TextContext


class Committed(NamedTuple):
    """A page that holds known content now, and is the first of its leaf that does."""

    leaf: int
    page: int
    digest: bytes


class Arrival(NamedTuple):
    """A page to be loaded: position `at` of the row in leaf `leaf`."""

    leaf: int
    at: int
    page: int
    digest: bytes


class Load(NamedTuple):
    """First pages that a row waits for; `hit` pages of the row will be known content.

    The pages are the row's, and pinned until the caller unpins them.
    """

    ctx: TextContext
    row: Row
    hit: int
    arrivals: list[Arrival]


class Replica:
    """A data-parallel copy: its rows, one `Leaf` per cache, and the batch that it runs."""

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
        """A replica without requests on the same memory; its metrics go on."""
        leaves = [leaf.rebuilt() for leaf in self.leaves]
        fresh = Replica(self.index, leaves, self.settings, self._upload)
        fresh.metrics = self.read_metrics()
        return fresh

    # -- rows

    def open_row(self, request_id: RequestID) -> Row:
        """A row without pages; CapacityError if all are taken."""
        if not self.free_rows:
            raise CapacityError(
                f"claim of {request_id!r}: expected a free row among the max_batch_size="
                f"{self.settings.max_batch_size} of replica {self.index}, got none"
            )
        return Row(request_id, self.index, self.free_rows.pop(), len(self.leaves))

    def open_dummy(self, request_id: RequestID) -> Row:
        """A row that points at the null page in every leaf."""
        row = self.open_row(request_id)
        row.become_dummy([leaf.null for leaf in self.leaves], self.settings)
        return row

    def close_row(self, row: Row) -> list[list[bytes]]:
        """Free all pages of the row, tail first, and the row itself.

        Returns, per leaf, digests of the pages that it freed and had committed, in the order of
        tokens.
        """
        for i, leaf in enumerate(self.leaves):
            leaf.clear(row, i)
        self.free_rows.append(row.index)
        self.batch.forget()
        return [row.digests[passed : row.committed] for passed in row.passed]

    # -- alloc: what `planner` planned is applied

    def pct_used_after(self, ctx: TextContext, row: Row | None, loadable: Loadable | None) -> float:
        """Percent of the fullest leaf's pages held after `alloc`; `row` is None before `claim`."""
        row = Row(ctx.request_id, self.index, 0, len(self.leaves)) if row is None else row
        costs = self.planner.forecast(ctx, row, loadable)
        return max(
            100.0 * (leaf.pool.num_used + cost) / leaf.pool.num_pages
            for leaf, cost in zip(self.leaves, costs, strict=True)
        )

    def apply(self, plan: AllocPlan) -> list[Load]:
        """Cannot fail; returns what is to be loaded. Hits first: no other row reallocates them."""
        for one in plan.rows:
            if one.row.phase is CLAIMED:
                self._open(one)
        loads: list[Load] = []
        for one in plan.rows:
            load = self._extend(one)
            if load is not None:
                loads.append(load)
        return loads

    def _open(self, plan: RowPlan) -> None:
        """First pages of a row: what the cache gave, with null pages before a window.

        Null pages also stand where pages are to be loaded, until `_take_for_load` takes them.
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

    def _extend(self, plan: RowPlan) -> Load | None:
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

    def _take_for_load(self, plan: RowPlan) -> Load:
        row, arrivals = plan.row, list[Arrival]()
        row.committed = min(positions[0] for positions in plan.loads if positions)
        for i, (leaf, positions) in enumerate(zip(self.leaves, plan.loads, strict=True)):
            pages = leaf.pool.take(len(positions))
            leaf.pool.pin(pages)
            for at, page in zip(positions, pages, strict=True):
                self._point(row, i, at, page)
                arrivals.append(Arrival(i, at, page, row.digests[at]))
        row.enter(LOADING, self.settings)
        return Load(plan.ctx, row, plan.hit, arrivals)

    def land(self, load: Load) -> None:
        """The pages of the load hold their content: publish them, and let the row run."""
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

    def adopt(self, load: Load, landed: int) -> None:
        """The first pages of a load hold their content, but its row has none: publish them."""
        stored = [
            (i, at)
            for i, at, page, digest in reversed(load.arrivals[:landed])
            if self.leaves[i].pool.publish(page, digest)
        ]
        for i, at in reversed(stored):
            self._note(i, load.ctx, load.row, at)

    def roll_back(self, load: Load, landed: int) -> None:
        """A load failed: the row owns no page, as after `claim`. Pages that landed are cached."""
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
        """Commit what is full and processed; let windows pass. Cannot fail.

        Returns the pages that were committed, except those whose content another page holds.
        """
        committed: list[Committed] = []
        for ctx, row in awake:
            if row.phase is ALLOCATED:
                self._advance(ctx, row, committed)
        return committed

    def commits(self, row: Row) -> bool:
        """Whether other requests may take its pages: not where a reset came since it was opened."""
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
        """Offer full, processed pages to the index; the last token is never hashed."""
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
        """The page at position `at` of the row was committed in leaf `i`."""
        journal = self.leaves[i].pool.journal
        if journal is not None:
            size = self.settings.page_size
            tokens = ctx.tokens[at * size : (at + 1) * size].tolist()
            journal.append(Stored(row.digests[at], row.digests[at - 1] if at else None, tokens))

    def _slide(self, ctx: TextContext, row: Row, i: int, window: int) -> None:
        """Free the pages that no later query sees; they become the null page in the row."""
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
        """Position `at` of the row is `page` from now on, in leaf `i`."""
        leaf = self.leaves[i]
        row.pages[i][at] = page
        leaf.table[row.index, at] = page
        self.batch.mark(row)

    # -- cache and metrics

    @property
    def followed(self) -> Leaf:
        """The leaf that keeps whole prefixes, or the first: `follow` tells of its pages."""
        return next((leaf for leaf in self.leaves if not leaf.window), self.leaves[0])

    def follow(self) -> list[Event]:
        """A list that what happens to committed pages is appended to from now on."""
        pool = self.followed.pool
        pool.journal = [Cleared()]
        return pool.journal

    def reset_prefix_cache(self) -> None:
        """Un-commit all pages; the rows that are open now commit nothing more."""
        for leaf in self.leaves:
            leaf.pool.forget()

    def read_metrics(self) -> KVCacheMetrics:
        evictions = sum(leaf.pool.evictions for leaf in self.leaves)
        return self.metrics + KVCacheMetrics(evictions=evictions - self._evictions_before)

    def reset_metrics(self) -> None:
        self.metrics = KVCacheMetrics()
        self._evictions_before = sum(leaf.pool.evictions for leaf in self.leaves)
