"""One replica's bookkeeping: rows, growth planned purely and then applied, commits, windows.

A request owns the same number of pages in every leaf, because all leaves agree on the page size;
they differ in which pages a window has left behind.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.inputs import BatchCharacteristics, RaggedKVCacheInputs
from kvgraph.errors import CapacityError, InsufficientPagesError, RequestError
from kvgraph.kv.hits import Hits
from kvgraph.kv.leaf import Leaf
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.prefix import chain, chain_root
from kvgraph.kv.requests import RequestID, TextContext
from kvgraph.kv.rows import UNBOUNDED, Resolved, Row
from kvgraph.kv.staging import MAX_STEPS, Extents, Staging, Upload
from kvgraph.kv.tiering import Tiering


@dataclass(frozen=True, slots=True)
class Settings:
    """What all replicas of a manager share."""

    page_size: int
    max_batch_size: int
    max_seq_len: int
    prefix_caching: bool
    identity: bytes
    hash_seed: bytes | None


class Growth(NamedTuple):
    """What one row will get: `hit` cached pages first, then fresh ones up to `num_pages`.

    `loads[leaf]`: positions among the hits whose pages come from a tier below; empty if none do.
    """

    ctx: TextContext
    row: Row
    hit: int
    num_pages: int
    root: bytes
    digests: list[bytes]
    loads: Sequence[Sequence[int]] = ()


class Plan(NamedTuple):
    """Growth of a batch, and the free pages that it costs in each leaf."""

    growths: list[Growth]
    costs: list[int]


class Replica:
    """A data-parallel copy: its rows, one `Leaf` per cache, and two staging sets."""

    def __init__(
        self, index: int, leaves: Sequence[Leaf], settings: Settings, upload: Upload | None
    ) -> None:
        self.index = index
        self.leaves = leaves
        self.settings = settings
        self.hits = Hits(leaves, settings.page_size)
        self.metrics = KVCacheMetrics()
        self.free_rows = list(reversed(range(settings.max_batch_size)))
        self._last = Resolved([], [])
        self._staging = [Staging(leaves, settings.max_batch_size, upload) for _ in range(2)]
        self._windows = [(i, leaf.window) for i, leaf in enumerate(leaves) if leaf.window]
        self._steps_matter = settings.prefix_caching or bool(self._windows)
        self._evictions_before = 0
        self.tiers: Tiering | None = None

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

    # -- growth: plan purely, then apply

    def plan_batch(self, resolved: Resolved, extra: int) -> Plan | None:
        """Growth of the rows that need any; None if there are none (the usual decode step)."""
        pending = [
            (ctx, row)
            for ctx, row in zip(resolved.contexts, resolved.rows, strict=True)
            if ctx.processed_length + ctx.active_length + extra > row.limit
        ]
        return self.plan(pending, extra) if pending else None

    def plan(self, pending: Sequence[tuple[TextContext, Row]], extra: int) -> Plan:
        """Growth to `processed + active + extra` tokens; raises what `alloc` raises."""
        growths = [self._plan_row(ctx, row, extra, self.tiers) for ctx, row in pending]
        plan = Plan(growths, self._costs(growths))
        if self.tiers is not None:
            plan = self._affordable(plan, extra)
        self._require_free(plan)
        return plan

    def forecast(self, ctx: TextContext, row: Row | None) -> list[int]:
        """Free pages that `alloc` would cost in each leaf, whether there are as many or not."""
        row = Row(ctx.request_id, self, 0, len(self.leaves)) if row is None else row
        growths = [] if row.is_dummy else [self._plan_row(ctx, row, 0, self.tiers)]
        return self._affordable(Plan(growths, self._costs(growths)), 0).costs

    def apply(self, plan: Plan) -> None:
        """Cannot fail. Hits first, so that no other growth reallocates them."""
        for growth in plan.growths:
            if growth.row.capacity == 0 and not growth.row.loading:
                self._open(growth)
        for growth in plan.growths:
            self._extend(growth)

    def _affordable(self, plan: Plan, extra: int) -> Plan:
        """The plan, without loads where it costs more pages than there are."""
        free = (leaf.pool.num_free for leaf in self.leaves)
        if all(map(operator.le, plan.costs, free)) or not any(g.loads for g in plan.growths):
            return plan
        growths = [self._plan_row(g.ctx, g.row, extra, None) for g in plan.growths]
        return Plan(growths, self._costs(growths))

    def _plan_row(self, ctx: TextContext, row: Row, extra: int, tiers: Tiering | None) -> Growth:
        processed, active = ctx.processed_length, ctx.active_length
        if not 0 <= active <= ctx.current_length - processed:
            raise RequestError(
                f"active_length of {ctx.request_id!r}: expected 0 to "
                f"{ctx.current_length - processed} unprocessed tokens, got {active}"
            )
        hit, root, digests = 0, row.root, row.digests
        loads: Sequence[Sequence[int]] = ()
        if row.capacity == 0:
            if row.loading:
                return Growth(ctx, row, 0, row.num_pages, root, digests)
            self._require_unprocessed(ctx)
            if self.settings.prefix_caching:
                root, digests = self.identities(ctx)
                hit = self.hits.joint(digests)
                if tiers is not None and ctx.asked is not None and ctx.asked.lookup.done:
                    hit, loads = self.hits.deeper(digests, hit, ctx.asked.present())
                processed = hit * self.settings.page_size
                active = min(active, ctx.current_length - processed)
        total = processed + active + extra
        if total > self.settings.max_seq_len:
            raise RequestError(
                f"alloc of {ctx.request_id!r}: expected at most max_seq_len="
                f"{self.settings.max_seq_len} tokens, got {total} "
                f"(processed {processed} + active {active} + further steps {extra})"
            )
        num_pages = max(ceildiv(total, self.settings.page_size), row.num_pages, hit)
        return Growth(ctx, row, hit, num_pages, root, digests, loads)

    def _require_unprocessed(self, ctx: TextContext) -> None:
        if ctx.processed_length:
            raise RequestError(
                f"alloc of {ctx.request_id!r}: expected processed_length 0 of a request that owns "
                f"no page, got {ctx.processed_length}; call `rewind` after `release`"
            )

    def identities(self, ctx: TextContext) -> tuple[bytes, list[bytes]]:
        """Root, and digests of all full pages that do not hold the last token."""
        given = self.settings
        root = chain_root(given.identity, ctx.adapter, given.hash_seed, ctx.cache_salt)
        full = (ctx.current_length - 1) // given.page_size
        return root, chain(root, ctx.tokens, given.page_size, 0, full)

    def _hit_pages(self, leaf: Leaf, growth: Growth) -> list[int]:
        """The cached pages that the row will read in this leaf and the device has."""
        index, visible = leaf.pool.index, self.hits.visible(leaf, growth.digests, growth.hit)
        if growth.loads:
            return [index[digest] for digest in visible if digest in index]
        return [index[digest] for digest in visible]

    def _costs(self, growths: Sequence[Growth]) -> list[int]:
        """Per leaf: fresh pages, and cached ones that leave the free queue (each once)."""
        fresh = sum(g.num_pages - max(g.hit, g.row.num_pages) for g in growths)
        hits = [g for g in growths if g.hit]
        if not hits:
            return [fresh] * len(self.leaves)
        costs = [fresh + self._revived(leaf, hits) for leaf in self.leaves]
        for growth in hits:
            for i, positions in enumerate(growth.loads):
                costs[i] += len(positions)
        return costs

    def _revived(self, leaf: Leaf, hits: Sequence[Growth]) -> int:
        refs = leaf.pool.refs
        return len({page for g in hits for page in self._hit_pages(leaf, g) if not refs[page]})

    def _require_free(self, plan: Plan) -> None:
        for leaf, cost in zip(self.leaves, plan.costs, strict=True):
            pool = leaf.pool
            if cost > pool.num_free:
                names = ", ".join(repr(g.row.request_id) for g in plan.growths[:4])
                whole = self._too_large(leaf, plan)
                raise InsufficientPagesError(
                    whole
                    or f"alloc of {names}: expected {cost} free pages on replica {self.index}, "
                    f"got {pool.num_free} ({pool.num_used} used of {pool.num_pages} in total)",
                    needed=cost,
                    free=pool.num_free,
                    used=pool.num_used,
                    total=pool.num_pages,
                )

    def _too_large(self, leaf: Leaf, plan: Plan) -> str:
        """Sentence about the first request that could not fit even into an empty pool."""
        at = self.leaves.index(leaf)
        for growth in plan.growths:
            row = growth.row
            passed = row.passed[at] if row.num_pages else self.hits.first_visible(leaf, growth.hit)
            if growth.num_pages - passed > leaf.pool.num_pages:
                return (
                    f"alloc of {row.request_id!r}: expected a request of at most the whole pool of "
                    f"{leaf.pool.num_pages} pages, got one that needs {growth.num_pages - passed}"
                )
        return ""

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
            pages = self._hit_pages(leaf, growth)
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
        leaf.pool.drop(gone)

    def point(self, row: Row, i: int, at: int, page: int) -> None:
        """Position `at` of the row is `page` from now on, in leaf `i`."""
        leaf = self.leaves[i]
        row.pages[i][at] = page
        leaf.table[row.index, at] = page
        for staging in self._staging:
            staging.dirty.add(row)

    # -- cache and metrics

    def reset_prefix_cache(self) -> None:
        """Un-commit what no live request holds."""
        for leaf in self.leaves:
            leaf.pool.forget_free()

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


def require_steps(num_steps: int, lookahead: int = 0) -> int:
    """Tokens beyond the active ones; RequestError unless 1 <= num_steps <= MAX_STEPS."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise RequestError(f"num_steps: expected 1 to {MAX_STEPS}, got {num_steps}")
    if lookahead < 0:
        raise RequestError(f"lookahead: expected >= 0, got {lookahead}")
    return num_steps - 1 + lookahead
