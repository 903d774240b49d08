"""The cache's state machine, with tiers below: a row never reads what is not its own prefix.

The cells of the model *are* the pools here: a page that is offloaded, evicted and loaded again
comes back with the hashes that it was written with, or the row that reads it fails. The tiers run
without threads: rules decide what is copied when, which stores lie, lose and drop, and who is
cancelled while pages are on their way.
"""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from kvgraph.contract.inputs import Buffer
from kvgraph.errors import CapacityError, InsufficientPagesError, RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.tiers import lookup, workers
from tests.kv.model_requests import STAMP, Request, params_of
from tests.kv.test_kv_model import ROWS, CacheMachine
from tests.support.builders import snapshot
from tests.support.stores import MemoryStore, opener

EXAMPLES, STEPS = 80, 40

seen: Counter[str] = Counter()


class Cells:
    """A session whose pools are the model's cells, in the order of replicas and leaves."""

    identity = b"model"

    def __init__(self, pools: list[np.ndarray]) -> None:
        self._pools = iter(pools)

    def allocate(self, symbol: Any, sizes: Any) -> Buffer:
        pool = next(self._pools).view(np.int32)
        return Buffer("int32", pool.shape, symbol.device, pool)


def hashes_of(record: bytes) -> bytes:
    return (np.frombuffer(record, np.int64) & ~STAMP).tobytes()


class Unthreaded(PagedKVCacheManager):
    _tier_threads = False


class TierMachine(CacheMachine):
    """Random lifecycles, random copies, stores that fail at random."""

    @initialize(
        page_size=st.sampled_from([1, 3, 4, 16]),
        replicas=st.sampled_from([1, 1, 2]),
        windows=st.sampled_from([(None,), (None,), (2,), (9,), (None, 9), (5, None, 2)]),
        pages=st.integers(6, 24),
        host_pages=st.sampled_from([0, 1, 5, 40]),
        stores=st.sampled_from([0, 1, 2]),
        faults=st.sampled_from([0.0, 0.0, 0.1, 0.5]),
        seed=st.integers(0, 1 << 16),
    )
    def build(  # type: ignore[override]
        self,
        page_size: int,
        replicas: int,
        windows: tuple[int | None, ...],
        pages: int,
        host_pages: int,
        stores: int,
        faults: float,
        seed: int,
    ) -> None:
        self.page_size, self.windows, self.pages = page_size, windows, pages
        self.cells = np.full((replicas, len(windows), pages + 1, page_size), -1, np.int64)
        self.rng = Random(seed)
        self.stores = [
            MemoryStore(name, lambda call: self.rng.random() < faults, hashes_of)
            for name in ("disk", "remote")[:stores]
        ]
        self.manager = Unthreaded(
            params_of(replicas, page_size, windows, True),
            Cells([self.cells[r, i] for r in range(replicas) for i in range(len(windows))]),
            pages,
            host_pages or (0 if stores else 3),
            enable_runtime_checks=True,
            max_batch_size=ROWS,
            stores=[opener(store) for store in self.stores],
        )
        tiers = self.manager._tiers
        assert tiers is not None
        self.tiers = tiers
        self.num_replicas = replicas
        self.requests: dict[str, Request] = {}
        self.forget_nothing()
        self.extent = max(4, page_size * pages // 4)

    # -- rules

    @rule(jobs=st.sampled_from([1, 2, 5, 50]))
    def work(self, jobs: int) -> None:
        """The threads get this far."""
        for _ in range(jobs):
            if not self.tiers.connector.work():  # type: ignore[attr-defined]
                break

    @rule()
    def poll(self) -> None:
        loading = {r.ctx.request_id: r for r in self.requests.values() if self.is_loading(r)}
        cached = {name: r.ctx.cached_prefix_length for name, r in loading.items()}
        ended = self.manager.poll()
        assert ended.keys() <= loading.keys()
        for name, has_landed in ended.items():
            request = loading[name]
            assert not self.is_loading(request)
            assert self.any_pages(request) == has_landed
            seen["loads that landed" if has_landed else "loads that failed"] += 1
            if has_landed:
                assert request.ctx.processed_length == cached[name] > 0
                seen["landed behind a window"] += self.has_passed(name)
            else:
                assert request.lengths() == (0, request.ctx.current_length) * 2 or (
                    request.ctx.processed_length == request.ctx.cached_prefix_length == 0
                )

    @rule(data=st.data())
    def prefetch(self, data: st.DataObject) -> None:
        request = self.pick(data)
        if request is not None:
            self.manager.prefetch([request.ctx], request.replica)

    @rule(data=st.data(), chunk=st.integers(-1, 40), lookahead=st.integers(0, 3))
    def alloc(self, data: st.DataObject, chunk: int, lookahead: int) -> None:
        request = self.pick(data)
        if request is None:
            return
        ctx = request.ctx
        rest = ctx.current_length - ctx.processed_length
        ctx.active_length = min(chunk, rest) if chunk >= 0 else rest
        self.alloc_one(request, lookahead)

    def alloc_one(self, request: Request, lookahead: int = 0) -> bool:
        if not self.any_pages(request):
            self.ask(request)
        ctx, before = request.ctx, self.is_loading(request)
        alloc = self.manager.alloc
        done = self.attempt(lambda: alloc(ctx, request.replica, lookahead=lookahead))
        if done and self.is_loading(request) and not before:
            seen["loads started"] += 1
            seen["loads behind hits"] += self.manager._claimed[ctx.request_id].committed > 0
        return done

    @rule(seed=st.integers(0, 1 << 16))
    def serve_a_while(self, seed: int) -> None:
        self.churn(seed + 1)

    @rule(seed=st.integers(0, 1 << 16))
    def churn(self, seed: int) -> None:
        """Short requests that come, run alone or together, and go, while the device forgets."""
        rng = Random(seed)
        for _ in range(16):
            if len(self.requests) < ROWS:
                shared = rng.choice([0.5, 0.75, 1.0])
                replica = rng.randrange(self.num_replicas)
                self.admit(rng.choice([0, 0, 1]), shared, rng.choice([0, 1]), b"", replica)
            rng.choice([self.lose_the_device, self.lose_the_host, self.poll, self.poll])()
            for request in list(self.requests.values()):
                rest = request.ctx.current_length - request.ctx.processed_length
                request.ctx.active_length = rng.choice([rest, rest, (rest + 1) // 2])
                if not self.too_long(request) and self.alloc_one(request):
                    if self.is_loading(request) and rng.random() < 0.2:
                        seen["loads cancelled"] += 1
                        self.retire(request, preempt=True)
                        continue
                    if self.is_loading(request) and rng.random() < 0.1:
                        self.work(rng.choice([0, 1]))
                        self.reset()
                    self.work(rng.choice([0, 1, 5]))
                    one = [[request] if i == request.replica else [] for i in range(2)]
                    self.run_batches(one[: self.num_replicas], 1)
                    if rng.random() < 0.02:
                        self.reset()
            if self.requests and rng.random() < 0.6:
                self.retire(self.requests[rng.choice(sorted(self.requests))], rng.random() < 0.3)

    @rule(data=st.data(), preempt=st.booleans())
    def cancel_a_load(self, data: st.DataObject, preempt: bool) -> None:
        loading = [name for name, r in self.requests.items() if self.is_loading(r)]
        if loading:
            seen["loads cancelled"] += 1
            self.retire(self.requests[data.draw(st.sampled_from(loading))], preempt)

    @rule()
    def run_a_loading_row(self) -> None:
        """Refused, and nothing changes."""
        for request in self.requests.values():
            if self.is_loading(request):
                batches = [
                    [request.ctx] if i == request.replica else [] for i in range(self.num_replicas)
                ]
                before = request.lengths()
                with pytest.raises(CapacityError, match="whose pages are on their way"):
                    self.manager.runtime_inputs(batches)
                self.manager.step(batches)
                assert request.lengths() == before

    @rule()
    def lose_the_device(self) -> None:
        """What no request holds on the device is evicted."""
        for replica in self.manager._replicas:
            for leaf in replica.leaves:
                leaf.pool.drop(leaf.pool.take(leaf.pool.num_free))

    @rule()
    def reset(self) -> None:
        """With copies in flight as they happen to be."""
        seen["resets with loads on their way"] += bool(self.tiers._loading)
        seen["resets with offloads on their way"] += self.num_pinned() > self.num_pages_loading()
        seen["resets with answers"] += any(
            self.tiers._lookup_of(r.ctx) for r in self.requests.values()
        )
        super().reset()

    @rule()
    def lose_the_host(self) -> None:
        """All that the host tier holds is evicted, as by many other prompts."""
        host = self.tiers.connector._host  # type: ignore[attr-defined]
        for shelf in host._shelves.values():
            while (slot := shelf.evict()) is not None:
                shelf.give(slot)

    @rule(data=st.data())
    def lose_a_record(self, data: st.DataObject) -> None:
        for store in self.stores:
            if store.pages:
                del store.pages[data.draw(st.sampled_from(sorted(store.pages)))]

    # -- as an engine does it

    def run_batches(self, batches: list[list[Request]], num_steps: int) -> bool:
        for request in (request for batch in batches for request in batch):
            if not self.any_pages(request):
                self.ask(request)
            if self.rng.random() < 0.5:
                self.work(self.rng.choice([1, 1, 5]))
        self.poll()
        contexts = [[request.ctx for request in batch] for batch in batches]
        if not self.attempt(lambda: self.manager.alloc_batch(contexts, num_steps=num_steps)):
            return False
        if self.rng.random() < 0.7:
            self.work(50)
            self.poll()
        batches = [
            [r for r in batch if not self.is_loading(r) and self.any_pages(r)] for batch in batches
        ]
        return super().run_batches(batches, num_steps)

    def ask(self, request: Request) -> None:
        while not all(self.manager.prefetch([request.ctx], request.replica)):
            if not self.tiers.connector.work():  # type: ignore[attr-defined]
                break  # another request loads the same pages

    def attempt(self, call: Any) -> bool:
        """Whether it succeeds; a failing one changes nothing but what the tiers hold on to."""
        self.poll()
        before, lengths = self.settled(), self.all_lengths()
        try:
            call()
        except (RequestError, CapacityError) as error:
            if isinstance(error, InsufficientPagesError):
                seen["failed for pages"] += 1
                assert self.num_pinned() <= self.num_pages_loading(), "offloads gave theirs up"
            assert self.settled() == before, error
            assert self.all_lengths() == lengths, error
            return False
        return True

    def settled(self) -> Any:
        """The bookkeeping without the holds of the tiers."""
        state = snapshot(self.manager)
        for _, metrics, leaves in state["replicas"]:
            metrics.inflight_ops = metrics.offload_dropped = 0
            for values in leaves:
                values[0][:] = [page for page, held in enumerate(values[1]) if not held]
        return state

    def has_passed(self, name: Any) -> bool:
        return any(self.manager._claimed[name].passed)

    def num_pinned(self) -> int:
        return sum(len(leaf.pool.pins) for r in self.manager._replicas for leaf in r.leaves)

    def num_pages_loading(self) -> int:
        return sum(len(loading.load.arrivals) for loading in self.tiers._loading.values())

    def masked(self, mask: int, replica: int) -> list[Request]:
        return [r for r in super().masked(mask, replica) if not self.is_loading(r)]

    def is_loading(self, request: Request) -> bool:
        return self.manager.is_loading(request.ctx.request_id)

    def teardown(self) -> None:
        metrics = self.manager.get_metrics_aggregated()
        seen["examples with hits"] += metrics.cache_tokens > 0
        seen["examples with evictions"] += metrics.evictions > 0
        seen["examples with pages from a store"] += metrics.disk_blocks_read > 0
        seen["examples with offloads dropped"] += metrics.offload_dropped > 0
        assert metrics.h2d_blocks_copied >= metrics.disk_blocks_read + metrics.remote_blocks_read
        for name in sorted(self.requests):
            self.retire(self.requests[name], preempt=False)
        while self.tiers.connector.work():  # type: ignore[attr-defined]
            pass
        assert self.manager.poll() == {}
        metrics = self.manager.get_metrics_aggregated()
        assert metrics.inflight_ops == 0
        for replica in self.manager._replicas:
            for leaf in replica.leaves:
                assert leaf.pool.num_free == leaf.pool.num_pages
                assert not leaf.pool.pins
        host = self.manager.tier_stats()["host"]
        assert host.num_used_pages <= host.num_pages
        self.manager.close()
        assert all(store.is_closed for store in self.stores)


def test_every_read_is_of_the_rows_own_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ANSWER_SECONDS", "PATIENCE_SECONDS"):  # no clock decides what happens
        monkeypatch.setattr(lookup, name, float("inf"))
    monkeypatch.setattr(workers, "GRACE_SECONDS", float("inf"))
    seen.clear()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        TierMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert len(seen) >= 10, seen
    assert min(seen.values()) >= 10, seen
