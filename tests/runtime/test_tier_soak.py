"""Hours of requests in little: a pool that evicts all the time, tiers that fail, random cancels."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.kv.tiers.disk.store import DiskStore
from kvgraph.runtime.sampling import Token
from tests.runtime.tier_engines import assert_conserved
from tests.support.stores import MemoryStore, opener

Compiled = Callable[..., Path]

MOST_GROWTH = 48 << 20
"""Bytes of resident memory between the first quarter and the end; a leak of pages is far more."""


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_prompts(random: Random) -> list[list[int]]:
    """Six heads of two to nine pages, each with eight tails."""
    heads = [
        [random.randrange(3, 2048) for _ in range(random.randrange(32, 150))] for _ in "123456"
    ]
    tails = [[random.randrange(3, 2048) for _ in range(random.randrange(1, 30))] for _ in range(48)]
    return [heads[at % 6] + tail for at, tail in enumerate(tails)]


class Soak:
    """Random submits and cancels; what came of each request, against what must come."""

    def __init__(self, engine: Engine, prompts: list[list[int]], wanted: list[list[int]]) -> None:
        self.engine, self.prompts, self.wanted = engine, prompts, wanted
        self.random = Random(7)
        self.tokens: dict[str, list[int]] = {}
        self.asked: dict[str, int] = {}
        self.done = self.cancelled = self.cancelled_loading = 0

    def run(self, requests: int) -> None:
        submitted = 0
        while submitted < requests or self.engine.busy:
            while submitted < requests and len(self.asked) < 6 and self.random.random() < 0.7:
                self.submit()
                submitted += 1
            for token in self.engine.step():
                self.take(token)
            if self.asked and self.random.random() < 0.06:
                self.cancel()

    def submit(self) -> None:
        at = self.random.randrange(len(self.prompts))
        sampling = SamplingParams(max_new_tokens=len(self.wanted[at]), ignore_eos=True)
        request = self.engine.submit(self.prompts[at], sampling)
        self.asked[request], self.tokens[request] = at, []

    def take(self, token: Token) -> None:
        tokens = self.tokens[token.request_id]
        tokens.append(token.token_id)
        at = self.asked[token.request_id]
        assert tokens == self.wanted[at][: len(tokens)], (at, tokens)
        if token.finish_reason:
            assert tokens == self.wanted[at]
            self.done += 1
            del self.asked[token.request_id], self.tokens[token.request_id]

    def cancel(self) -> None:
        loading = [request.request_id for request in self.engine.scheduler.loading]
        request = self.random.choice(loading or sorted(self.asked))
        self.engine.cancel(request)
        del self.asked[request], self.tokens[request]
        self.cancelled += 1
        self.cancelled_loading += bool(loading)


@pytest.mark.parametrize(
    "requests", [400, pytest.param(6000, marks=pytest.mark.slow)], ids=["short", "long"]
)
def test_soak(
    requests: int, compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = kvgraph.load(compiled("tiny-llama"))
    random = Random(3)
    prompts = make_prompts(random)
    plain = Engine(artifact, num_pages=700, enable_prefix_caching=False, num_threads=1)
    wanted = [
        done.token_ids
        for done in plain.generate(prompts, SamplingParams(max_new_tokens=5, ignore_eos=True))
    ]
    del plain
    faulty = MemoryStore("remote", fails=lambda call: random.random() < 0.05)
    stores: list[Any] = [
        lambda fingerprint, nbytes: DiskStore(tmp_path, 60 * (nbytes + 4096), fingerprint, nbytes),
        opener(faulty),
    ]
    monkeypatch.setattr(
        "kvgraph.runtime.cache.tier_options",
        lambda params, tiers: {"total_num_host_pages": 20, "stores": stores},
    )
    with Engine(artifact, num_pages=26, max_batch_size=5, num_threads=1) as engine:
        soak = Soak(engine, prompts, wanted)
        soak.run(requests // 4)
        before = resident()
        soak.run(requests - requests // 4)
        assert_conserved(engine)
        growth = resident() - before
        metrics = engine.kv.get_metrics_aggregated()  # type: ignore[attr-defined]
        assert growth < MOST_GROWTH, growth
        assert soak.done + soak.cancelled == requests
        assert soak.cancelled > requests // 40
        assert metrics.evictions > requests
        assert metrics.h2d_blocks_copied > requests
        assert metrics.disk_blocks_read + metrics.remote_blocks_read > 20
        assert metrics.load_failures > 0
