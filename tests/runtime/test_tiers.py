"""Tiers below an engine: what comes back is what was computed, and nothing else ever is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.prefix import write_prefix
from kvgraph.runtime.prefix_file import PrefixStore
from tests.runtime.drive import Logits
from tests.runtime.tier_engines import (
    answers,
    assert_conserved,
    drop_host,
    evict_device,
    prompts,
    run,
    settle,
    start,
    tiered,
)
from tests.support.redis_server import RedisServer
from tests.support.stores import MemoryStore, opener

Compiled = Callable[..., Path]

MOST_KL = 1e-6


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


def pages_of(manager: PagedKVCacheManager, ctx: TextContext) -> dict[str, list[bytes]]:
    """Bytes of the pages that a follower of `ctx` would take."""
    return {
        leaf: [page.tobytes() for page in pages.values()]
        for leaf, pages in manager.committed_pages(ctx).items()
    }


def kl(p_logits: Logits, q_logits: Logits) -> float:
    p, q = (np.exp(x - x.max()) / np.exp(x - x.max()).sum() for x in (p_logits, q_logits))
    return float((p * (np.log(p) - np.log(q))).sum())


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has to be short
        started = RedisServer(Path(folder))
        started.start()
        yield started
        started.kill()


def tier_arguments(
    tier: str, artifact: Artifact, tokens: list[int], tmp_path: Path, server: Any
) -> dict[str, Any]:
    if tier == "host":
        return {"total_num_host_pages": 40}
    if tier == "store":
        return {"stores": [opener(MemoryStore())]}
    if tier == "store under a small host":
        return {"total_num_host_pages": 2, "stores": [opener(MemoryStore("remote"))]}
    if tier == "disk":
        from kvgraph.kv.tiers.disk.store import DiskStore

        return {"stores": [partial(DiskStore, tmp_path / "disk", 1 << 26)]}
    if tier == "remote":
        from kvgraph.kv.tiers.remote import RemoteStore

        return {"stores": [partial(RemoteStore, server().url(), timeout=30)]}
    engine = Engine(artifact, num_pages=60, num_threads=1)
    prefix = write_prefix(engine, tokens, tmp_path / "prefix.kvp")
    return {"sources": [lambda fingerprint, nbytes: PrefixStore(prefix, fingerprint, nbytes)]}


TIERS = ["host", "store", "store under a small host", "disk", "remote", "prefix"]
MODELS: dict[str, dict[str, Any]] = {
    "tiny-llama": {},
    "gemma3_text": {"page_size": 8},
    "qwen3": {"cache_dtype": "int8"},
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("model", MODELS)
def test_logits_of_a_restored_prefix_equal_a_cold_run(
    model: str,
    tier: str,
    compiled: Compiled,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    artifact = kvgraph.load(compiled(model, **MODELS[model]))
    session = artifact.session(num_threads=1)
    tokens = prompts(1, 75, vocab=artifact.manifest.model.vocab_size)[0]
    params: Any = artifact.params(enable_prefix_caching=True)
    manager = PagedKVCacheManager(
        params,
        session,
        20,
        max_batch_size=2,
        enable_runtime_checks=True,
        max_seq_len=400,
        **tier_arguments(
            tier, artifact, tokens, tmp_path, partial(request.getfixturevalue, "server")
        ),
    )
    cold = TextContext("cold", tokens)
    if tier != "prefix":
        start(manager, cold)
        cold_logits = run(session, manager, cold)
        computed = pages_of(manager, TextContext("all", [*tokens, 3]))
        manager.release("cold")
        settle(manager)
        evict_device(manager)
    else:
        alone = PagedKVCacheManager(params, session, 20, max_batch_size=1, max_seq_len=400)
        start(alone, cold)
        cold_logits = run(session, alone, cold)
        computed = pages_of(alone, TextContext("all", [*tokens, 3]))
        evict_device(manager)
    warm = TextContext("warm", tokens)
    assert start(manager, warm)
    full = (len(tokens) - 1) // params.page_size
    assert warm.processed_length == warm.cached_prefix_length == full * params.page_size
    restored = pages_of(manager, TextContext("all", tokens))
    for leaf, pages in restored.items():
        assert pages
        assert set(pages) <= set(computed[leaf]), "bit-equal pages"
    warm_logits = run(session, manager, warm)
    assert np.isfinite(warm_logits).all()
    assert kl(cold_logits[0], warm_logits[0]) < MOST_KL
    assert manager.get_metrics_aggregated().load_failures == 0
    manager.close()


# -- engines


def test_tokens_are_those_of_an_engine_without_tiers(artifact: Artifact) -> None:
    asked = prompts(6, 300)
    wanted = answers(Engine(artifact, num_pages=200, num_threads=1), asked)
    with Engine(artifact, num_pages=24, total_num_host_pages=200, num_threads=1) as engine:
        assert answers(engine, asked) == wanted
        settle(engine.kv)
        engine.kv.reset_metrics()
        assert answers(engine, asked) == wanted
        metrics = engine.kv.get_metrics_aggregated()
        assert metrics.cache_tokens == 6 * 288, "every full page but the last token's"
        assert metrics.h2d_blocks_copied == 6 * 18
        assert metrics.load_failures == metrics.offload_dropped == 0
        assert_conserved(engine)


def test_counters_tell_the_truth(artifact: Artifact) -> None:
    store = MemoryStore()
    manager = tiered(artifact, 24, 30, store)
    engine_of = Engine(artifact, num_pages=24, total_num_host_pages=30, num_threads=1)
    kv: Any = engine_of.kv
    assert (kv.total_num_host_pages, kv.get_num_host_pages(0)) == (30, 30)
    assert (kv.get_num_disk_pages(0), kv.get_num_used_disk_pages(0)) == (0, 0)
    answers(engine_of, prompts(1, 100), tokens=1)
    settle(kv)
    assert kv.get_num_used_host_pages(0) == 6
    assert kv.host_committed_block_pct == 6 / 30
    metrics = kv.get_metrics_aggregated()
    assert (metrics.d2h_blocks_copied, metrics.h2d_blocks_copied) == (6, 0)
    kv.reset_prefix_cache()
    assert kv.get_num_used_host_pages(0) == 0
    answers(engine_of, prompts(1, 100), tokens=1)
    assert kv.get_metrics_aggregated().cache_tokens == 0
    engine_of.close()
    session = manager.session
    for name in ("cold", "warm"):
        ctx = TextContext(name, prompts(1, 100)[0])
        assert start(manager, ctx) == (name == "warm")
        run(session, manager, ctx)
        manager.release(name)
        settle(manager)
        drop_host(manager)
        evict_device(manager)
    metrics = manager.get_metrics_aggregated()
    assert (manager.get_num_disk_pages(), manager.get_num_used_disk_pages()) == (1000, 6)
    assert (metrics.disk_blocks_written, metrics.disk_blocks_read) == (6, 6)
    assert manager.tier_stats()["host"].written == 6
    manager.reset_metrics()
    metrics = manager.get_metrics_aggregated()
    assert metrics.disk_blocks_read == metrics.d2h_blocks_copied == metrics.cache_tokens == 0
    manager.reset_prefix_cache()
    assert manager.get_num_used_disk_pages() == 0
    assert manager.get_num_used_host_pages() == 0
    manager.close()
    assert store.is_closed


def test_a_prompt_that_is_scored_leaves_no_pages(artifact: Artifact) -> None:
    """Neither in the pool nor in a tier. Where it is preempted, it is computed again."""
    with Engine(artifact, num_pages=40, total_num_host_pages=30, num_threads=1) as engine:
        kv: Any = engine.kv
        asked = prompts(1, 100)
        answers(engine, asked, tokens=1)
        scored = SamplingParams(max_new_tokens=40, ignore_eos=True, prompt_logprobs=0)
        whole = engine.generate(asked, scored)[0].token_ids
        engine.submit(asked[0], scored)
        tokens = engine.step()
        engine.scheduler._preempt(engine.scheduler.running)
        while engine.busy:
            tokens += engine.step()
        assert [token.token_id for token in tokens] == whole
        settle(kv)
        assert len(kv.committed_digests()) == kv.get_num_used_host_pages() == 6
        metrics = kv.get_metrics_aggregated()
        assert (metrics.cache_tokens, metrics.d2h_blocks_copied) == (0, 6)
        assert_conserved(engine)


# -- bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"total_num_host_pages": -1}, r"total_num_host_pages: expected >= 0 or None, got -1"),
        ({"host_memory": 5}, r"host_memory: expected at least one page of 32768 bytes, got 5"),
        (
            {"total_num_host_pages": 5, "enable_prefix_caching": False},
            r"tiers: expected enable_prefix_caching=True, got False",
        ),
        ({"disk": "tier", "disk_bytes": 100}, r"tier: expected a size limit of at least one page"),
        ({"remote": "nowhere"}, r"remote tier: expected an address such as redis://"),
        ({"prefixes": ["nothing.kvp"]}, r"nothing.kvp: expected a prefix .* got no file"),
    ],
)
def test_bad_options(artifact: Artifact, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        Engine(artifact, num_pages=4, **options)
    assert isinstance(raised.value, kvgraph.KVGraphError)


def test_no_tiers_without_pages(compiled: Compiled) -> None:
    artifact = kvgraph.load(compiled("tiny-llama", cache="continuous"))
    with pytest.raises(RequestError, match="tiers: expected a paged cache, got continuous"):
        Engine(artifact, total_num_host_pages=4)
