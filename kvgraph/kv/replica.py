"""One replica's bookkeeping: rows, plans carried out, values for a graph, commits, windows.

A request owns the same number of pages in every leaf, because all leaves agree on the page size;
they differ in which pages a window has left behind.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.inputs import BatchCharacteristics, RaggedKVCacheInputs
from kvgraph.errors import CapacityError, RequestError
from kvgraph.kv.growth import Growth, Plan, Planner
from kvgraph.kv.hits import Hits
from kvgraph.kv.leaf import Leaf
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.prefix import chain
from kvgraph.kv.requests import RequestID, TextContext
from kvgraph.kv.rows import UNBOUNDED, Resolved, Row
from kvgraph.kv.settings import Settings
from kvgraph.kv.staging import Extents, Staging, Upload
from kvgraph.kv.tiering import Tiering


class Replica:
    """A data-parallel copy: its rows, one `Leaf` per cache, and two staging sets."""

    def __init__(
        self, index: int, leaves: Sequence[Leaf], settings: Settings, upload: Upload | None
    ) -> None:
        self.index = index
        self.leaves = leaves
        self.settings = settings
        self.hits = Hits(leaves, settings.page_size)
        self.planner = Planner(index, leaves, settings, self.hits)
        self.metrics = KVCacheMetrics()
        self.free_rows = list(reversed(range(settings.max_batch_size)))
        self._last = Resolved([], [])
        self._upload = upload
        self._staging = [Staging(leaves, settings.max_batch_size, upload) for _ in range(2)]
        self._windows = [(i, leaf.window) for i, leaf in enumerate(leaves) if leaf.window]
        self._steps_matter = settings.prefix_caching or bool(self._windows)
        self._evictions_before = 0
        self.tiers: Tiering | None = None

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
        row = Row(request_id, self, self.free_rows.pop(), len(self.leaves))
        row.wake = 0 if self._steps_matter else UNBOUNDED
        return row

    def open_dummy(self, request_id: RequestID) -> Row:
        """A row that points at the null page in every leaf."""
        row = self.open_row(request_id)
        row.become_dummy([leaf.null for leaf in self.leaves])
        return row

    def close_row(self, row: Row) -> None:
        """Free all pages of the row, tail first, and the row itself."""
        if self.tiers is not None and not row.is_dummy:
            self.tiers.forget(row)
            self.tiers.touch(self, row)
        for i, leaf in enumerate(self.leaves):
            leaf.clear(row, i)
        self.free_rows.append(row.index)
        self._last = Resolved([], [])

    def resolve(
        self, batch: Sequence[TextContext], claimed: Mapping[RequestID, Row], call: str
    ) -> Resolved:
        """Rows of a batch; RequestError if one is not claimed here, or there are too many.

        The batch of the call before is recognised by its very contexts, without looking them up.
        """
        contexts = batch if type(batch) is list else list(batch)
        if contexts == self._last.contexts:
            return self._last
        contexts = list(contexts)
        if len(contexts) > self.settings.max_batch_size:
            raise RequestError(
                f"{call}: expected at most max_batch_size={self.settings.max_batch_size} rows "
                f"for replica {self.index}, got {len(contexts)}"
            )
        rows = [self.row_of(ctx.request_id, claimed, call) for ctx in contexts]
        if len(set(rows)) != len(rows):
            twice = next(row for i, row in enumerate(rows) if row in rows[:i])
            raise RequestError(
                f"{call}: expected every request once in a batch, got {twice.request_id!r} twice"
            )
        self._last = Resolved([], [])  # until all positions are the new ones
        for position, row in enumerate(rows):
            row.position = position
        self._last = Resolved(contexts, rows)
        return self._last

    def row_of(self, request_id: RequestID, claimed: Mapping[RequestID, Row], call: str) -> Row:
        """The request's row; RequestError if it is not claimed on this replica."""
        row = claimed.get(request_id)
        if row is None:
            raise RequestError(
                f"{call} of {request_id!r}: expected a request claimed on replica {self.index}, "
                "got one that is not claimed; call `claim` first"
            )
        if row.replica is not self:
            raise RequestError(
                f"{call} of {request_id!r}: expected a request claimed on replica {self.index}, "
                f"got one claimed on replica {row.replica.index}"
            )
        return row

    # -- growth: what `planner` planned is applied

    def pct_used_after(self, ctx: TextContext, row: Row | None) -> float:
        """Percent of the fullest leaf's pages held after `alloc`; `row` is None before `claim`."""
        row = Row(ctx.request_id, self, 0, len(self.leaves)) if row is None else row
        return max(
            100.0 * (leaf.pool.num_used + cost) / leaf.pool.num_pages
            for leaf, cost in zip(self.leaves, self.planner.forecast(ctx, row), strict=True)
        )

    def apply(self, plan: Plan) -> None:
        """Cannot fail. Hits first, so that no other growth reallocates them."""
        for growth in plan.growths:
            if growth.row.capacity == 0 and not growth.row.loading:
                self._open(growth)
        for growth in plan.growths:
            self._extend(growth)

    def _open(self, growth: Growth) -> None:
        """First pages of a row: what the cache gave, with null pages before a window.

        Null pages also stand where pages are to be loaded, until `_extend` takes them.
        """
        ctx, row, hit = growth.ctx, growth.row, growth.hit
        row.root, row.digests, row.committed = growth.root, growth.digests, hit
        ctx.cached_prefix_length = row.counted = hit * self.settings.page_size
        if not hit:
            return
        served = 0
        for i, leaf in enumerate(self.leaves):
            pages = self.planner.hit_pages(leaf, growth)
            leaf.pool.hold(pages)
            served += len(pages)
            if growth.loads:
                visible = self.hits.visible(leaf, growth.digests, hit)
                pages = [leaf.pool.index.get(digest, leaf.null) for digest in visible]
            row.passed[i] = hit - len(pages)
            leaf.extend(row, i, [leaf.null] * row.passed[i] + pages)
        chunk = ctx.active_length
        ctx.skip_processing(ctx.cached_prefix_length)
        ctx.active_length = min(chunk, ctx.active_length)
        if not growth.loads:
            self._count_hit(hit, served)

    def _extend(self, growth: Growth) -> None:
        ctx, row = growth.ctx, growth.row
        fresh = growth.num_pages - row.num_pages
        if fresh or growth.hit:
            for i, leaf in enumerate(self.leaves):
                leaf.extend(row, i, leaf.pool.take(fresh))
            for staging in self._staging:
                staging.dirty.add(row)
        if growth.loads:
            self._start_loads(growth)
        if row.loading:
            return
        row.capacity = growth.num_pages * self.settings.page_size
        row.prefill_end = row.prefill_end or ctx.current_length
        end = min(ctx.processed_length + ctx.active_length, row.prefill_end)
        if end > row.counted:
            self.metrics.input_tokens += end - row.counted
            row.counted = end
        done = row.counted >= row.prefill_end
        row.limit = min(row.capacity, self.settings.max_seq_len) if done else 0

    def _count_hit(self, hit: int, served: int) -> None:
        self.metrics.device_blocks_served += served
        self.metrics.cache_tokens += hit * self.settings.page_size

    # -- pages from tiers

    def _start_loads(self, growth: Growth) -> None:
        assert self.tiers is not None
        row = growth.row
        row.committed = min(positions[0] for positions in growth.loads if positions)
        self.tiers.start(self, row, growth.ctx, growth.loads, growth.hit)

    def land(self, row: Row, hit: int, loaded: int) -> None:
        """The first `hit` pages of the row are known content, `loaded` of them from the tiers."""
        row.committed = hit
        row.capacity = row.num_pages * self.settings.page_size
        self._count_hit(hit, sum(hit - passed for passed in row.passed) - loaded)

    def roll_back(self, row: Row) -> None:
        """A load failed: the row owns no page, as after `claim`."""
        for i, leaf in enumerate(self.leaves):
            leaf.clear(row, i)
            row.pages[i] = []
        row.passed = [0] * len(self.leaves)
        row.root, row.digests = b"", []
        row.committed = row.counted = row.capacity = row.limit = row.wake = 0
        self.metrics.load_failures += 1
        for staging in self._staging:
            staging.dirty.add(row)

    # -- values for a graph

    def measure(
        self,
        resolved: Resolved,
        extra: int,
        max_cache_length: int | None,
        bounds: BatchCharacteristics | None,
    ) -> Extents:
        """Lengths, maxima and table width of a batch; raises what `runtime_inputs` raises."""
        lengths = []
        longest_new = longest = 0
        for ctx, row in zip(resolved.contexts, resolved.rows, strict=True):
            cached, new = ctx.processed_length, ctx.active_length
            total = cached + new
            if total + extra > row.capacity:
                raise self._too_few_pages(row, total + extra)
            if new > longest_new:
                longest_new = new
            if total > longest:
                longest = total
            lengths.append(cached)
        if bounds is not None:
            self._require_within(bounds, len(lengths), longest_new, longest)
            longest_new, longest = bounds.max_prompt_length, bounds.max_cache_valid_length
        width = max(1, ceildiv(longest + extra, self.settings.page_size))
        if max_cache_length is not None:
            width = self._widened(width, max_cache_length, longest + extra)
        if width > self.max_width:
            raise RequestError(
                f"lookup_table: expected at most {self.max_width} pages of the pool in a row, "
                f"got {width} for a context of {longest + extra} tokens"
            )
        return lengths, longest_new, longest, width, extra + 1

    def fill(
        self, turn: int, resolved: Resolved, extents: Extents
    ) -> list[list[RaggedKVCacheInputs]]:
        """Write staging set `turn` (0 or 1); per leaf, one record per shard."""
        return self._staging[turn].fill(resolved, extents)

    @property
    def max_width(self) -> int:
        return min(leaf.max_width for leaf in self.leaves)

    def _too_few_pages(self, row: Row, tokens: int) -> CapacityError:
        if row.loading:
            return CapacityError(
                f"runtime_inputs of {row.request_id!r}: expected a request whose pages have "
                "landed, got one whose pages are on their way; call `poll` first"
            )
        return CapacityError(
            f"runtime_inputs of {row.request_id!r}: expected pages for {tokens} tokens, "
            f"got {row.num_pages} for {row.capacity}; call `alloc` first"
        )

    def _require_within(
        self, bounds: BatchCharacteristics, rows: int, longest_new: int, longest: int
    ) -> None:
        for name, bound, value in (
            ("batch_size", bounds.batch_size, rows),
            ("max_prompt_length", bounds.max_prompt_length, longest_new),
            ("max_cache_valid_length", bounds.max_cache_valid_length, longest),
        ):
            if value > bound:
                raise RequestError(
                    f"batch_characteristics.{name}: expected at least {value} as in the batch "
                    f"of replica {self.index}, got {bound}"
                )

    def _widened(self, width: int, max_cache_length: int, needed: int) -> int:
        pages = ceildiv(max_cache_length, self.settings.page_size)
        if max_cache_length < 1 or pages < width:
            raise RequestError(
                f"max_cache_length: expected at least {max(1, needed)} tokens as in the batch of "
                f"replica {self.index}, got {max_cache_length}"
            )
        if pages > self.max_width:
            raise RequestError(
                f"max_cache_length: expected at most the {self.max_width} pages of the pool, "
                f"got {max_cache_length} tokens in {pages} pages"
            )
        return pages

    # -- after a step

    def step(self, resolved: Resolved) -> None:
        """Commit what is full and processed; let windows pass. Cannot fail."""
        if not self._steps_matter:
            return
        for ctx, row in zip(resolved.contexts, resolved.rows, strict=True):
            if ctx.processed_length >= row.wake:
                self._advance(ctx, row)
        if self.tiers is not None:
            self.tiers.offload_offers()

    def _advance(self, ctx: TextContext, row: Row) -> None:
        if row.capacity == 0:
            return
        page_size = self.settings.page_size
        wakes = [UNBOUNDED]
        if self.settings.prefix_caching:
            self._commit(ctx, row)
            wakes.append((row.committed + 1) * page_size)
        for i, window in self._windows:
            self._slide(ctx, row, i, window)
            wakes.append((row.passed[i] + 1) * page_size + window - 1)
        row.wake = min(wakes)

    def _commit(self, ctx: TextContext, row: Row) -> None:
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
                if known != pages[at]:
                    self.point(row, i, at, known)
                elif self.tiers is not None:
                    self.tiers.offer(self, i, known, row.digests[at])
        row.committed = full

    def _slide(self, ctx: TextContext, row: Row, i: int, window: int) -> None:
        """Free the pages that no later query sees; they become the null page in the row."""
        visible = ctx.processed_length - window + 1
        passed = min(max(0, visible) // self.settings.page_size, row.num_pages)
        if passed <= row.passed[i]:
            return
        leaf, pages = self.leaves[i], row.pages[i]
        gone = pages[row.passed[i] : passed]
        for at in range(row.passed[i], passed):
            self.point(row, i, at, leaf.null)
        row.passed[i] = passed
        leaf.pool.drop(reversed(gone))

    def point(self, row: Row, i: int, at: int, page: int) -> None:
        """Position `at` of the row is `page` from now on, in leaf `i`."""
        leaf = self.leaves[i]
        row.pages[i][at] = page
        leaf.table[row.index, at] = page
        for staging in self._staging:
            staging.dirty.add(row)

    # -- cache and metrics

    def reset_prefix_cache(self) -> None:
        """Un-commit what no live request holds, and the rest once none holds it any more."""
        for leaf in self.leaves:
            leaf.pool.forget()

    def verify_staging(self) -> None:
        """AssertionError if a row that is not marked dirty differs from its lookup row."""
        for staging in self._staging:
            staging.verify(self._last)

    def read_metrics(self) -> KVCacheMetrics:
        evictions = sum(leaf.pool.evictions for leaf in self.leaves)
        return self.metrics + KVCacheMetrics(evictions=evictions - self._evictions_before)

    def reset_metrics(self) -> None:
        self.metrics = KVCacheMetrics()
        self._evictions_before = sum(leaf.pool.evictions for leaf in self.leaves)
