"""Engines and managers with tiers: what they are asked, and that nothing of them is lost."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from kvgraph import Engine, SamplingParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.artifact import Artifact
from tests.runtime.drive import Logits, inputs_of
from tests.support.stores import opener


def greedy(max_new_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)


def prompts(count: int, length: int, seed: int = 0, vocab: int = 2048) -> list[list[int]]:
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab, length).tolist() for _ in range(count)]


def answers(engine: Engine, asked: list[list[int]], tokens: int = 8) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(asked, greedy(tokens))]


def settle(manager: Any) -> None:
    """All copies and writes are done, and the manager knows."""
    deadline = time.monotonic() + 30
    while manager.get_metrics_aggregated().inflight_ops:
        assert time.monotonic() < deadline, manager.get_metrics_aggregated()
        time.sleep(0.001)
    manager.poll()


def assert_conserved(engine: Engine) -> None:
    """Nothing is held, by requests or by tiers."""
    settle(engine.kv)
    assert not engine.scheduler.busy
    assert engine.kv.num_free_blocks() == engine.kv.total_num_blocks()


def start(manager: PagedKVCacheManager, ctx: TextContext) -> bool:
    """Claim and alloc, and wait for what the tiers load; whether they did."""
    manager.claim(ctx.request_id)
    while not all(manager.prefetch([ctx])):
        manager.wait(0.05)
    manager.alloc(ctx)
    was_loading = manager.is_loading(ctx.request_id)
    while manager.is_loading(ctx.request_id):
        assert manager.wait(30)
        manager.poll()
    return was_loading


def run(session: Any, manager: PagedKVCacheManager, ctx: TextContext) -> Logits:
    manager.alloc(ctx)
    logits: Logits = session.run(inputs_of([ctx]), manager.runtime_inputs([[ctx]])).copy()
    ctx.update()
    manager.step([[ctx]])
    return logits


def evict_device(manager: PagedKVCacheManager) -> None:
    """A request that takes every page, and leaves NaNs (or 127s) in all of them."""
    size = manager.params.page_size
    pages = min(leaf.pool.num_pages for leaf in manager._replicas[0].leaves)
    filler = TextContext("filler", np.full(pages * size, 3))
    manager.claim("filler")
    manager.alloc(filler)
    manager.release("filler")
    for replica in manager._replicas:
        for leaf in replica.leaves:
            assert not leaf.pool.index
    for buffer in manager.get_device_buffer(0).all_buffers:
        pool = buffer.handle
        pool[...] = 127 if pool.dtype.kind == "i" else np.nan


def tiered(artifact: Artifact, pages: int, host_pages: int, *stores: Any) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        artifact.params(enable_prefix_caching=True),
        artifact.session(num_threads=1),
        pages,
        host_pages,
        max_batch_size=4,
        max_seq_len=2048,
        enable_runtime_checks=True,
        stores=[opener(store) for store in stores],
    )


def drop_host(manager: PagedKVCacheManager) -> None:
    """The host tier loses what it holds."""
    assert manager._tiers is not None
    connector: Any = manager._tiers.connector
    with connector._changed:
        connector._host.clear()
