"""What rows will get, planned purely: all that can fail fails here, and nothing changes.

resolved batch -> rows that need pages -> Plan -> `Replica.apply`
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

from kvgraph.contract.dims import ceildiv
from kvgraph.errors import InsufficientPagesError, RequestError
from kvgraph.kv.hits import Hits
from kvgraph.kv.leaf import Leaf
from kvgraph.kv.requests import TextContext
from kvgraph.kv.rows import Resolved, Row
from kvgraph.kv.settings import Settings


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


class Planner:
    """Over the leaves of replica `index`: what the cache gives, what is fresh, what it costs."""

    __slots__ = ("_hits", "_index", "_leaves", "_settings")

    def __init__(self, index: int, leaves: Sequence[Leaf], settings: Settings, hits: Hits) -> None:
        self._index = index
        self._leaves = leaves
        self._settings = settings
        self._hits = hits

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
        has_tiers = self._settings.has_tiers
        growths = [self._plan_row(ctx, row, extra, has_tiers) for ctx, row in pending]
        plan = Plan(growths, self._costs(growths))
        if has_tiers:
            plan = self._affordable(plan, extra)
        self._require_free(plan)
        return plan

    def forecast(self, ctx: TextContext, row: Row) -> list[int]:
        """Free pages that `alloc` would cost in each leaf, whether there are as many or not."""
        if ctx.processed_length + ctx.active_length <= row.limit:
            return [0] * len(self._leaves)
        growths = [self._plan_row(ctx, row, 0, self._settings.has_tiers)]
        return self._affordable(Plan(growths, self._costs(growths)), 0).costs

    def hit_pages(self, leaf: Leaf, growth: Growth) -> list[int]:
        """The cached pages that the row will read in this leaf and the device has."""
        index, visible = leaf.pool.index, self._hits.visible(leaf, growth.digests, growth.hit)
        if growth.loads:
            return [index[digest] for digest in visible if digest in index]
        return [index[digest] for digest in visible]

    def _affordable(self, plan: Plan, extra: int) -> Plan:
        """The plan, without loads where it costs more pages than there are."""
        free = (leaf.pool.num_free for leaf in self._leaves)
        if all(map(operator.le, plan.costs, free)) or not any(g.loads for g in plan.growths):
            return plan
        growths = [self._plan_row(g.ctx, g.row, extra, False) for g in plan.growths]
        return Plan(growths, self._costs(growths))

    def _plan_row(self, ctx: TextContext, row: Row, extra: int, with_tiers: bool) -> Growth:
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
            if self._settings.prefix_caching:
                root, digests = self._settings.identities(ctx)
                hit = self._hits.joint(digests)
                if with_tiers and ctx.asked is not None and ctx.asked.is_valid(self._hits.epoch):
                    hit, loads = self._hits.deeper(digests, hit, ctx.asked.present())
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
        return Growth(ctx, row, hit, num_pages, root, digests, loads)

    def _require_unprocessed(self, ctx: TextContext) -> None:
        if ctx.processed_length:
            raise RequestError(
                f"alloc of {ctx.request_id!r}: expected processed_length 0 of a request that owns "
                f"no page, got {ctx.processed_length}; call `rewind` after `release`"
            )

    def _costs(self, growths: Sequence[Growth]) -> list[int]:
        """Per leaf: fresh pages, and cached ones that leave the free queue (each once)."""
        fresh = sum(g.num_pages - max(g.hit, g.row.num_pages) for g in growths)
        hits = [g for g in growths if g.hit]
        if not hits:
            return [fresh] * len(self._leaves)
        costs = [fresh + self._revived(leaf, hits) for leaf in self._leaves]
        for growth in hits:
            for i, positions in enumerate(growth.loads):
                costs[i] += len(positions)
        return costs

    def _revived(self, leaf: Leaf, hits: Sequence[Growth]) -> int:
        refs, pins = leaf.pool.refs, leaf.pool.pins
        pages = {page for g in hits for page in self.hit_pages(leaf, g) if not refs[page]}
        return len(pages - pins.keys()) if pins else len(pages)

    def _require_free(self, plan: Plan) -> None:
        for leaf, cost in zip(self._leaves, plan.costs, strict=True):
            pool = leaf.pool
            if cost > pool.num_free:
                names = ", ".join(repr(g.row.request_id) for g in plan.growths[:4])
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

    def _too_large(self, leaf: Leaf, plan: Plan) -> str:
        """Sentence about the first request that could not fit even into an empty pool."""
        at = self._leaves.index(leaf)
        for growth in plan.growths:
            row = growth.row
            passed = row.passed[at] if row.num_pages else self._hits.first_visible(leaf, growth.hit)
            if growth.num_pages - passed > leaf.pool.num_pages:
                return (
                    f"alloc of {row.request_id!r}: expected a request of at most the whole pool of "
                    f"{leaf.pool.num_pages} pages, got one that needs {growth.num_pages - passed}"
                )
        return ""
