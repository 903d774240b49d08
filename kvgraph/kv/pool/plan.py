"""Plan of an `alloc`: every error is raised here, before anything changes.

rows that need pages -> AllocPlan -> `Planner.widen` -> `Replica.apply`
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

from kvgraph.contract.dims import ceildiv
from kvgraph.errors import InsufficientPagesError, RequestError
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.lookup import PrefixLookup
from kvgraph.kv.pool.rows import CLAIMED, LOADING, Row
from kvgraph.kv.requests import TextContext, no_part

Loadable = Callable[[int, TextContext], Sequence[Container[bytes]] | None]
"""Function (replica, request) -> digests of loadable pages per leaf; None if nothing is known."""


class RowPlan(NamedTuple):
    """Pages that one row will get: `hit` cached pages first, then fresh pages up to `num_pages`.

    `loads[leaf]`: positions of hits whose pages must be loaded; empty if there are none.
    """

    ctx: TextContext
    row: Row
    hit: int
    num_pages: int
    root: bytes
    digests: list[bytes]
    loads: Sequence[Sequence[int]] = ()


class AllocPlan(NamedTuple):
    """Plans of a batch's rows, and the number of free pages that they cost in each leaf."""

    rows: list[RowPlan]
    costs: list[int]


class Planner:
    """Plans allocs of replica `index`: cached pages, fresh pages, and their cost in each leaf."""

    __slots__ = ("_index", "_leaves", "_prefixes", "_settings")

    def __init__(
        self, index: int, leaves: Sequence[Leaf], settings: PoolSettings, prefixes: PrefixLookup
    ) -> None:
        self._index = index
        self._leaves = leaves
        self._settings = settings
        self._prefixes = prefixes

    def plan(
        self,
        lacking: Sequence[tuple[TextContext, Row]],
        extra: int,
        loadable: Loadable | None = None,
    ) -> AllocPlan:
        """Plan pages for `processed + active + extra` tokens of each row; raises like `alloc`, and
        changes nothing."""
        rows = [self._plan_row(ctx, row, extra, loadable) for ctx, row in lacking]
        plan = AllocPlan(rows, self._costs(rows))
        if loadable is not None:
            plan = self._affordable(plan, extra)
        self._require_free(plan)
        return plan

    def widen(self, plan: AllocPlan) -> None:
        """Widen the lookup tables for the plan, so that `apply` needs no memory for them.
        CapacityError if the system has too little."""
        widest = max((one.num_pages for one in plan.rows), default=0)
        for leaf in self._leaves:
            leaf.widen(widest)

    def forecast(self, ctx: TextContext, row: Row, loadable: Loadable | None) -> list[int]:
        """Number of pages that `alloc` would cost in each leaf; it may exceed the free pages."""
        if ctx.processed_length + ctx.active_length <= row.limit:
            return [0] * len(self._leaves)
        rows = [self._plan_row(ctx, row, 0, loadable)]
        return self._affordable(AllocPlan(rows, self._costs(rows)), 0).costs

    def hit_pages(self, leaf: Leaf, plan: RowPlan) -> list[int]:
        """Cached pages on the device that the row will read in this leaf."""
        index, visible = leaf.pool.index, self._prefixes.visible(leaf, plan.digests, plan.hit)
        if plan.loads:
            return [index[digest] for digest in visible if digest in index]
        return [index[digest] for digest in visible]

    def _affordable(self, plan: AllocPlan, extra: int) -> AllocPlan:
        """The plan; without loads if it costs more pages than are free."""
        free = (leaf.pool.num_free for leaf in self._leaves)
        if all(map(operator.le, plan.costs, free)) or not any(one.loads for one in plan.rows):
            return plan
        rows = [self._plan_row(one.ctx, one.row, extra, None) for one in plan.rows]
        return AllocPlan(rows, self._costs(rows))

    def _plan_row(
        self, ctx: TextContext, row: Row, extra: int, loadable: Loadable | None
    ) -> RowPlan:
        processed, active = ctx.processed_length, ctx.active_length
        if not 0 <= active <= ctx.current_length - processed:
            raise no_part(ctx, active)
        hit, root, digests = 0, row.root, row.digests
        loads: Sequence[Sequence[int]] = ()
        if row.phase is LOADING:
            return RowPlan(ctx, row, 0, row.num_pages, root, digests)
        if row.phase is CLAIMED:
            self._require_unprocessed(ctx)
            if self._settings.prefix_caching:
                root, digests = self._settings.identities(ctx)
                hit = self._prefixes.joint(digests)
                known = None if loadable is None else loadable(self._index, ctx)
                if known is not None:
                    hit, loads = self._prefixes.deeper(digests, hit, known)
                processed = hit * self._settings.page_size
                active = min(active, ctx.current_length - processed)
        total = processed + active + extra
        if total > self._settings.max_seq_len:
            raise RequestError(
                f"alloc of {ctx.request_id!r}: expected at most max_seq_len="
                f"{self._settings.max_seq_len} tokens, got {total} "
                f"(processed {processed} + active {active} + further steps {extra})"
            )
        num_pages = max(ceildiv(total, self._settings.page_size), row.num_pages, hit)
        return RowPlan(ctx, row, hit, num_pages, root, digests, loads)

    def _require_unprocessed(self, ctx: TextContext) -> None:
        if ctx.processed_length:
            raise RequestError(
                f"alloc of {ctx.request_id!r}: expected processed_length 0 of a request that owns "
                f"no page, got {ctx.processed_length}; call `rewind` after `release`"
            )

    def _costs(self, rows: Sequence[RowPlan]) -> list[int]:
        """Cost in each leaf: fresh pages, and cached pages that leave the queue (once each)."""
        fresh = sum(one.num_pages - max(one.hit, one.row.num_pages) for one in rows)
        hits = [one for one in rows if one.hit]
        if not hits:
            return [fresh] * len(self._leaves)
        costs = [fresh + self._revived(leaf, hits) for leaf in self._leaves]
        for one in hits:
            for i, positions in enumerate(one.loads):
                costs[i] += len(positions)
        return costs

    def _revived(self, leaf: Leaf, hits: Sequence[RowPlan]) -> int:
        refs, pins = leaf.pool.refs, leaf.pool.pins
        pages = {page for one in hits for page in self.hit_pages(leaf, one) if not refs[page]}
        return len(pages - pins.keys()) if pins else len(pages)

    def _require_free(self, plan: AllocPlan) -> None:
        for leaf, cost in zip(self._leaves, plan.costs, strict=True):
            pool = leaf.pool
            if cost > pool.num_free:
                names = ", ".join(repr(one.row.request_id) for one in plan.rows[:4])
                whole = self._too_large(leaf, plan)
                raise InsufficientPagesError(
                    whole
                    or f"alloc of {names}: expected {cost} free pages on replica {self._index}, "
                    f"got {pool.num_free} ({pool.num_used} used of {pool.num_pages} in total)",
                    needed=cost,
                    free=pool.num_free,
                    used=pool.num_used,
                    total=pool.num_pages,
                )

    def _too_large(self, leaf: Leaf, plan: AllocPlan) -> str:
        """Error text for the first request that does not fit into an empty pool; "" if all fit."""
        at = self._leaves.index(leaf)
        for one in plan.rows:
            row, first = one.row, self._prefixes.first_visible(leaf, one.hit)
            needed = one.num_pages - (row.passed[at] if row.num_pages else first)
            if needed > leaf.pool.num_pages:
                return (
                    f"alloc of {row.request_id!r}: expected a request of at most the whole pool of "
                    f"{leaf.pool.num_pages} pages, got one that needs {needed}"
                )
        return ""
