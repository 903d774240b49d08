"""A state machine against the plainest model: what every (page, offset) was last written with.

The model "runs" each step as a graph would: rows store first, through the lookup table, then read
what their queries see. A cell holds the hash of the token prefix that it was written with, so a
read is right iff it holds the hash of the reader's own prefix. Its low bits number the write, so
that content from before a reset is told from the same content computed later. All managers run
with `enable_runtime_checks`, so the whole bookkeeping is verified after every call as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvgraph.errors import CapacityError, InsufficientPagesError, KVGraphError, RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.leaf import Leaf
from kvgraph.kv.pool.rows import Phase
from kvgraph.kv.requests import TextContext
from tests.kv.model_requests import STAMP, Request, params_of
from tests.support.builders import snapshot

EXAMPLES, STEPS = 300, 60
ROWS = 5

seen: Counter[str] = Counter()


class CacheMachine(RuleBasedStateMachine):
    """Random lifecycles of requests whose prompts share prefixes."""

    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16, 128]),
        replicas=st.sampled_from([1, 2]),
        windows=st.sampled_from([(None,), (None,), (1,), (2,), (9,), (None, 9), (5, None, 2)]),
        caching=st.sampled_from([True, True, True, False]),
        pages=st.integers(4, 24),
    )
    def build(
        self,
        page_size: int,
        replicas: int,
        windows: tuple[int | None, ...],
        caching: bool,
        pages: int,
    ) -> None:
        params = params_of(replicas, page_size, windows, caching)
        self.page_size, self.windows, self.pages = page_size, windows, pages
        self.manager = PagedKVCacheManager(
            params, None, pages, enable_runtime_checks=True, max_batch_size=ROWS
        )
        self.num_replicas = replicas
        self.requests: dict[str, Request] = {}
        self.cells = np.full((replicas, len(windows), pages + 1, page_size), -1, np.int64)
        self.forget_nothing()
        self.extent = max(4, page_size * pages // 4)

    def forget_nothing(self) -> None:
        """Before the first rule."""
        self.born = self.runs = self.runs_before_reset = 0

    # -- rules

    @rule(
        stem=st.sampled_from([0, 0, 1]),
        shared=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
        own=st.sampled_from([0, 0, 1, 5]),
        salt=st.sampled_from([b"", b"", b"", b"salt"]),
        replica=st.integers(0, 1),
    )
    def claim(self, stem: int, shared: float, own: int, salt: bytes, replica: int) -> None:
        self.admit(stem, shared, own, salt, replica % self.num_replicas)

    def admit(self, stem: int, shared: float, own: int, salt: bytes, replica: int) -> None:
        """A request whose prompt begins with part of one of two stems."""
        tokens = [(stem + at) % 5 for at in range(int(shared * self.extent))] + [7 + own] * own
        ctx = TextContext(f"r{self.born}", tokens or [1], cache_salt=salt)
        self.born += 1
        if self.attempt(lambda: self.manager.claim(ctx.request_id, replica)):
            self.requests[str(ctx.request_id)] = Request(ctx, replica)

    @rule(seed=st.integers(0, 1 << 16))
    def serve(self, seed: int) -> None:
        """A dozen rounds as an engine has them: requests come, run in chunks, and go."""
        rng = Random(seed)
        for _ in range(12):
            for _ in range(rng.choice([0, 1, 2])):
                replica = rng.randrange(self.num_replicas)
                shared = rng.choice([0.25, 0.5, 0.75, 1.0])
                self.admit(rng.choice([0, 0, 1]), shared, rng.choice([0, 0, 1, 5]), b"", replica)
            for request in self.requests.values():
                rest = request.ctx.current_length - request.ctx.processed_length
                request.ctx.active_length = rng.choice([rest, rest, (rest + 1) // 2])
            batches = [self.masked(31, i) for i in range(self.num_replicas)]
            if self.run_batches(batches, 1) and rng.random() < 0.5:
                continue
            if self.requests:
                self.retire(self.requests[rng.choice(sorted(self.requests))], rng.random() < 0.3)

    @rule(replica=st.integers(0, 1))
    def claim_dummy(self, replica: int) -> None:
        replica %= self.num_replicas
        ctx = TextContext(f"dummy{self.born}", [1])
        self.born += 1
        self.attempt(lambda: self.manager.alloc_dummy(ctx.request_id, replica))
        if self.manager.contains(ctx.request_id, replica):
            self.requests[str(ctx.request_id)] = request = Request(ctx, replica)
            request.is_dummy = True

    @rule(data=st.data(), chunk=st.integers(-1, 40), lookahead=st.integers(0, 3))
    def alloc(self, data: st.DataObject, chunk: int, lookahead: int) -> None:
        request = self.pick(data)
        if request is None:
            return
        ctx, replica = request.ctx, request.replica
        rest = ctx.current_length - ctx.processed_length
        ctx.active_length = min(chunk, rest) if chunk >= 0 else rest
        used = self.manager.get_pct_used_blocks_after_allocation(ctx, replica)
        if self.attempt(lambda: self.manager.alloc(ctx, replica, lookahead=lookahead)):
            pools = [leaf.pool for leaf in self.manager._replicas[replica].leaves]
            now = max(100.0 * pool.num_used / pool.num_pages for pool in pools)
            assert now >= used if lookahead else now == used, (now, used)
            if not self.any_pages(request) and self.windows == (None,):
                assert ctx.cached_prefix_length == 0

    @rule(
        masks=st.tuples(*[st.sampled_from([31, 31, 1, 2, 13, 22])] * 2),
        num_steps=st.sampled_from([1, 1, 1, 2, 3]),
        rounds=st.sampled_from([1, 1, 5]),
    )
    def run(self, masks: tuple[int, int], num_steps: int, rounds: int) -> None:
        """Scheduling rounds over some requests: alloc, run, update, step."""
        for _ in range(rounds):
            batches = [self.masked(masks[i], i) for i in range(self.num_replicas)]
            self.run_batches(batches, num_steps)

    def run_batches(self, batches: list[list[Request]], num_steps: int) -> bool:
        contexts = [[request.ctx for request in batch] for batch in batches]
        allocated = self.attempt(lambda: self.manager.alloc_batch(contexts, num_steps=num_steps))
        if not allocated:
            return False
        chunked = any(
            ctx.processed_length + ctx.active_length < ctx.current_length
            for batch in contexts
            for ctx in batch
        )
        num_steps = 1 if chunked else num_steps
        inputs = self.manager.runtime_inputs(contexts, num_steps=num_steps)
        offsets: list[np.ndarray] = []
        for step in range(num_steps):
            if step:
                inputs = self.manager.increment_cache_lengths(inputs, offsets)
            self.execute(batches, inputs)
            offsets = [np.cumsum([0] + [r.ctx.active_length for r in batch]) for batch in batches]
            for request in (request for batch in batches for request in batch):
                self.generate(request)
        self.manager.step(contexts)
        return True

    @rule(data=st.data(), preempt=st.booleans())
    def release(self, data: st.DataObject, preempt: bool) -> None:
        request = self.pick(data)
        if request is None:
            return
        self.retire(request, preempt)

    def retire(self, request: Request, preempt: bool) -> None:
        name = str(request.ctx.request_id)
        self.manager.release(name, request.replica)
        del self.requests[name]
        if preempt and not request.is_dummy:
            request.ctx.rewind()
            self.manager.claim(name, request.replica)
            self.requests[name] = request

    @rule()
    def reset(self) -> None:
        held = [leaf.pool.refs[page] for leaf, page, _ in self.committed()]
        self.manager.reset_prefix_cache()
        self.runs_before_reset = self.runs
        seen["resets"] += 1
        seen["resets with pages of live requests"] += any(held)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """Calls that must fail, and change nothing."""
        ghost = TextContext("ghost", [1, 2])
        bad: list[Callable[[], Any]] = [
            lambda: self.manager.alloc(ghost),
            lambda: self.manager.release("ghost"),
            lambda: self.manager.step([[ghost]] * self.num_replicas),
            lambda: self.manager.runtime_inputs([[]] * (self.num_replicas + 1)),
            lambda: self.manager.alloc(ghost, self.num_replicas),
        ]
        request = self.pick(data)
        if request is not None:
            name, replica = request.ctx.request_id, request.replica
            bad += [
                lambda: self.manager.claim(name, replica),
                lambda: self.manager.runtime_inputs(
                    [[request.ctx] if i == replica else [] for i in range(self.num_replicas)],
                    max_cache_length=0,
                ),
            ]
            if self.num_replicas == 2:
                bad.append(lambda: self.manager.release(name, 1 - replica))
        assert not self.attempt(data.draw(st.sampled_from(bad)))

    @invariant()
    def count(self) -> None:
        seen["steps"] += 1

    @invariant()
    def nothing_is_known_from_before_a_reset(self) -> None:
        """Not even a token of a page."""
        for _, page, cells in self.committed():
            assert ((cells & STAMP) > self.runs_before_reset).all(), (page, cells)

    @invariant()
    def pages_without_content_are_reallocated_first(self) -> None:
        for replica in self.manager._replicas:
            for leaf in replica.leaves:
                cached = [leaf.pool.digests[page] is not None for page in leaf.pool.free_pages()]
                assert cached == sorted(cached)

    def committed(self) -> list[tuple[Leaf, int, np.ndarray]]:
        """Leaf, id and cells of each committed page."""
        return [
            (leaf, page, cells[page])
            for replica in self.manager._replicas
            for leaf, cells in zip(replica.leaves, self.cells[replica.index], strict=True)
            for page in leaf.pool.index.values()
        ]

    def teardown(self) -> None:
        """What the examples came across, so that the test cannot pass by doing nothing."""
        metrics = self.manager.get_metrics_aggregated()
        rows = [row for row in self.manager._claimed.values() if row.phase is not Phase.DUMMY]
        seen["examples with hits"] += metrics.cache_tokens > 0
        seen["examples with evictions"] += metrics.evictions > 0
        seen["examples with a window passed"] += any(any(row.passed) for row in rows)

    # -- the model

    def execute(self, batches: list[list[Request]], inputs: Any) -> None:
        """Store, then read, in every leaf; rows in the order of the batch."""
        self.runs += 1
        leaves = list(inputs.children.values()) if len(self.windows) > 1 else [inputs]
        for i, (window, leaf) in enumerate(zip(self.windows, leaves, strict=True)):
            for replica, (batch, record) in enumerate(zip(batches, leaf.inputs, strict=True)):
                cells = self.cells[replica, i]
                lengths = np.asarray(record.cache_lengths)
                table = np.asarray(record.lookup_table)
                self.check_maxima(batch, record)
                for request, length, row in zip(batch, lengths, table, strict=True):
                    assert length == request.ctx.processed_length
                    self.store(cells, request, row)
                for request, row in zip(batch, table, strict=True):
                    self.read(cells, request, row, window)

    def store(self, cells: np.ndarray, request: Request, row: np.ndarray) -> None:
        ctx, size = request.ctx, self.page_size
        total = ctx.processed_length + ctx.active_length
        at = np.arange(ctx.processed_length, total)
        pages = row[at // size]
        assert (pages == self.pages).all() if request.is_dummy else (pages < self.pages).all()
        cells[pages, at % size] = request.hashes(total)[ctx.processed_length :] | self.runs & STAMP

    def read(
        self, cells: np.ndarray, request: Request, row: np.ndarray, window: int | None
    ) -> None:
        ctx, size = request.ctx, self.page_size
        total = ctx.processed_length + ctx.active_length
        if request.is_dummy or ctx.active_length == 0:
            return
        first = 0 if window is None else max(0, ctx.processed_length - window + 1)
        at = np.arange(first, total)
        found = cells[row[at // size], at % size]
        assert (found & ~STAMP == request.hashes(total)[first:]).all(), (ctx, first, row)

    def check_maxima(self, batch: list[Request], record: Any) -> None:
        if batch:
            active = max(request.ctx.active_length for request in batch)
            longest = max(r.ctx.processed_length + r.ctx.active_length for r in batch)
            assert np.asarray(record.max_lengths)[0].tolist() == [active, longest]

    def generate(self, request: Request) -> None:
        ctx = request.ctx
        if ctx.processed_length + ctx.active_length < ctx.current_length:
            ctx.update()
        else:
            ctx.update((ctx.current_length * 3) % 5)

    # -- helpers

    def attempt(self, call: Callable[[], Any]) -> bool:
        """Whether the call succeeds; a failing one must change nothing at all."""
        before, lengths = snapshot(self.manager), self.all_lengths()
        try:
            call()
        except (RequestError, CapacityError) as error:
            assert isinstance(error, KVGraphError)
            if isinstance(error, InsufficientPagesError):
                assert error.needed > error.free
                assert error.free + error.used == error.total == self.pages
                seen["failed for pages"] += 1
            assert snapshot(self.manager) == before, error
            assert self.all_lengths() == lengths, error
            return False
        return True

    def all_lengths(self) -> list[tuple[int, ...]]:
        return [request.lengths() for request in self.requests.values()]

    def any_pages(self, request: Request) -> bool:
        return bool(self.manager.get_req_blocks(request.ctx.request_id, request.replica))

    def pick(self, data: st.DataObject) -> Request | None:
        if not self.requests:
            return None
        return self.requests[data.draw(st.sampled_from(sorted(self.requests)))]

    def masked(self, mask: int, replica: int) -> list[Request]:
        """A replica's requests at the bits of a mask, those that still fit into the pool."""
        own = [r for r in self.requests.values() if r.replica == replica and not self.too_long(r)]
        chosen = [request for i, request in enumerate(own) if mask >> i & 1]
        return chosen[::-1] if mask & 2 else chosen

    def too_long(self, request: Request) -> bool:
        return request.ctx.current_length + 3 > self.page_size * self.pages


def test_every_read_is_of_the_rows_own_prefix() -> None:
    seen.clear()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        CacheMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen["steps"] >= 10_000, seen
    assert min(seen.values()) >= 50, seen
