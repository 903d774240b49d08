"""Tiers below an engine: what comes back is what was computed, and nothing else ever is."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import tempfile
import threading
import time
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
from kvgraph.runtime.prefix import PrefixStore, write_prefix
from tests.runtime.drive import Logits, inputs_of
from tests.support.command_line import COMMAND
from tests.support.redis_server import RedisServer
from tests.support.stores import MemoryStore, opener

Compiled = Callable[..., Path]

MOST_KL = 1e-6


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


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


# -- the KL test: every tier, after forced eviction from those above


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


def pages_of(manager: PagedKVCacheManager, ctx: TextContext) -> dict[str, list[bytes]]:
    """Bytes of the pages that a follower of `ctx` would take."""
    return {
        leaf: [page.tobytes() for page in pages.values()]
        for leaf, pages in manager.committed_pages(ctx).items()
    }


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

        return {"stores": [partial(RemoteStore, server().url())]}
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


# -- loads that fail, stores that are slow or gone


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def engine_over(artifact: Artifact, store: Any, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with this store below a host tier of one page."""
    monkeypatch.setattr(
        "kvgraph.runtime.engine.tier_options",
        lambda params, **options: {"total_num_host_pages": 1, "stores": [opener(store)]},
    )
    return Engine(artifact, num_pages=24, num_threads=1)


def test_a_failed_load_is_computed_and_counted(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(3, 300)
    wanted = answers(Engine(artifact, num_pages=200, num_threads=1), asked)
    store = MemoryStore(fails=lambda call: call == "contains" or len(store.calls) % 5 == 0)
    with engine_over(artifact, store, monkeypatch) as engine:
        assert answers(engine, asked) == wanted
        assert answers(engine, asked) == wanted
        metrics = engine.kv.get_metrics_aggregated()
        assert metrics.load_failures > 0
        assert metrics.input_tokens + metrics.cache_tokens == 6 * 300
        assert_conserved(engine)


def test_a_slow_load_stops_nobody_else(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    first, second = prompts(2, 60)
    store = MemoryStore(fails=lambda call: call == "read" and not gate.wait(30))
    gate.set()
    with engine_over(artifact, store, monkeypatch) as engine:
        wanted = answers(engine, [first, second])
        settle(engine.kv)
        evict_device(engine.kv)  # type: ignore[arg-type]
        gate.clear()
        engine.submit(first, greedy(), request_id="held")
        engine.submit(prompts(1, 40, seed=9)[0], greedy(40), request_id="running")
        seen = [token.request_id for _ in range(20) for token in engine.step()]
        assert set(seen) == {"running"}
        assert [r.request_id for r in engine.scheduler.loading] == ["held"]
        gate.set()
        found = []
        while engine.busy:
            found += [t.token_id for t in engine.step() if t.request_id == "held"]
        assert found == wanted[0]
        assert engine.kv.get_metrics_aggregated().load_failures == 0
        assert_conserved(engine)


def test_a_store_that_does_not_answer_is_not_waited_for(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """Look-ups hang until the end of the test: everything is computed all the same."""
    asked = prompts(4, 60)
    wanted = answers(Engine(artifact, num_pages=200, num_threads=1), asked)
    store = MemoryStore(fails=lambda call: call == "contains" and not gate.wait(60))
    with engine_over(artifact, store, monkeypatch) as engine:
        assert answers(engine, asked) == wanted
        assert answers(engine, asked) == wanted
        assert not gate.is_set()
        assert engine.kv.get_metrics_aggregated().load_failures == 0
        gate.set()


def test_a_server_that_dies_freezes_and_comes_back(artifact: Artifact, server: RedisServer) -> None:
    asked = prompts(4, 100)
    wanted = answers(Engine(artifact, num_pages=200, num_threads=1), asked)
    with Engine(artifact, num_pages=24, num_threads=1, remote=server.url()) as engine:
        kv: Any = engine.kv
        assert answers(engine, asked) == wanted
        settle(kv)
        evict_device(kv)
        assert answers(engine, asked) == wanted
        assert kv.get_metrics_aggregated().remote_blocks_read >= 4 * 6
        for break_it in (server.freeze, server.thaw, server.kill, server.start):
            break_it()
            settle(kv)
            evict_device(kv)
            assert answers(engine, asked) == wanted
        assert_conserved(engine)


@pytest.fixture
def dead_server() -> str:
    """The address of nobody."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return f"redis://127.0.0.1:{listener.getsockname()[1]}"


def full_disk(*given: Any, **options: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_engine_serves_without_tiers_that_cannot_be_used(
    artifact: Artifact, dead_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says so once, of each; figures say so as long as it lasts."""
    asked = prompts(2, 100)
    wanted = answers(Engine(artifact, num_pages=60, num_threads=1), asked)
    folder = tmp_path / "tier"
    monkeypatch.setattr(os, "mkdir", full_disk)
    with pytest.warns(UserWarning, match="tier") as told:
        engine = Engine(artifact, num_pages=60, num_threads=1, disk=folder, remote=dead_server)
    sentences = [str(warning.message) for warning in told]
    server = dead_server.removeprefix("redis://")
    assert len(sentences) == 2
    assert sentences[0] == (
        f"disk tier {folder}: expected files to read and write, got 'No space left on device'; it "
        "is missed until it can be used"
    )
    assert sentences[1].startswith(f"remote tier {server}: expected the answers of a Valkey or ")
    with engine:
        assert answers(engine, asked) == wanted
        settle(engine.kv)
        stats: Any = engine.kv.tier_stats()  # type: ignore[attr-defined]
        assert [bool(stats[name].problem) for name in ("host", "disk", "remote")] == [0, 1, 1]


def test_the_command_line_says_it_in_one_line(artifact: Artifact, dead_server: str) -> None:
    command = [*COMMAND, "generate", str(artifact.folder), "The", "--max-new-tokens", "4"]
    done = subprocess.run([*command, "--remote", dead_server], capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) != (0, ""), done.stderr
    first, *rest = done.stderr.splitlines()
    assert first.startswith("warning: remote tier 127.0.0.1:")
    assert first.endswith("Connection refused; it is missed until it can be used")
    assert len(rest) == 1, "how fast it was"


def test_pages_outlive_the_process_that_computed_them(artifact: Artifact, tmp_path: Path) -> None:
    asked = prompts(4, 100)
    with Engine(artifact, num_pages=200, num_threads=1, disk=tmp_path / "tier") as engine:
        wanted = answers(engine, asked)
    with Engine(artifact, num_pages=200, num_threads=1, disk=tmp_path / "tier") as engine:
        kv: Any = engine.kv
        assert kv.get_num_used_disk_pages() == 4 * 6
        assert answers(engine, asked) == wanted
        metrics = kv.get_metrics_aggregated()
        assert (metrics.disk_blocks_read, metrics.cache_tokens) == (4 * 6, 4 * 96)
        assert kv.get_num_disk_pages() > 24


def test_a_load_that_crawls_is_given_up(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts(1, 300)
    wanted = answers(Engine(artifact, num_pages=200, num_threads=1), asked)
    with engine_over(artifact, MemoryStore(), monkeypatch) as engine:
        answers(engine, asked)
        settle(engine.kv)
        evict_device(engine.kv)  # type: ignore[arg-type]
        monkeypatch.setattr("kvgraph.kv.tiers.workers.GRACE_SECONDS", -1.0)
        assert answers(engine, asked) == wanted
        assert engine.kv.get_metrics_aggregated().load_failures == 1
        assert_conserved(engine)


def test_cancelled_while_loading(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """The pages stay held until the store lets go of them, and are shared if they landed."""
    asked = prompts(1, 60)
    store = MemoryStore(fails=lambda call: call == "read" and not gate.wait(30))
    gate.set()
    with engine_over(artifact, store, monkeypatch) as engine:
        wanted = answers(engine, asked)
        settle(engine.kv)
        evict_device(engine.kv)  # type: ignore[arg-type]
        gate.clear()
        engine.submit(asked[0], greedy(), request_id="held")
        running = engine.submit(prompts(1, 40, seed=9)[0], greedy(40))
        while not engine.scheduler.loading:
            engine.step()
        while store.calls[-1] != "read":
            time.sleep(0.001)
        engine.cancel("held")
        engine.step()
        held = engine.kv.total_num_blocks() - engine.kv.num_free_blocks()
        assert held >= 3 + 3, "pages of the cancelled load are still written to"
        gate.set()
        engine.cancel(running)
        assert_conserved(engine)
        assert answers(engine, asked) == wanted


def test_pages_that_tiers_hold_are_given_up_where_a_request_needs_them(
    artifact: Artifact, gate: threading.Event
) -> None:
    """Offloads that wait for a stuck store are dropped and counted; `alloc` never fails of them."""
    store = MemoryStore(fails=lambda call: call == "write" and not gate.wait(30))
    manager = tiered(artifact, 24, 0, store)
    for turn in range(6):
        ctx = TextContext(f"r{turn}", prompts(1, 16 * 23, seed=turn)[0])
        start(manager, ctx)
        run(manager.session, manager, ctx)
        manager.release(ctx.request_id)
    metrics = manager.get_metrics_aggregated()
    assert metrics.offload_dropped > 0
    gate.set()
    settle(manager)
    assert manager.num_free_blocks() == manager.total_num_blocks()
    metrics = manager.get_metrics_aggregated()
    assert metrics.disk_blocks_written + metrics.offload_dropped == 6 * 22
    manager.close()


def test_a_store_that_breaks_its_word_stops_nothing(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(MemoryStore):
        def contains(self, keys: Any) -> list[bool]:
            raise OSError("no")

        def write(self, key: bytes, parts: Any) -> bool:
            raise OSError("no")

    asked = prompts(3, 100)
    wanted = answers(Engine(artifact, num_pages=200, num_threads=1), asked)
    with engine_over(artifact, Broken(), monkeypatch) as engine:
        assert answers(engine, asked) == wanted
        assert_conserved(engine)
        assert engine.kv.get_metrics_aggregated().offload_dropped > 0
    assert "a tier failed" in caplog.text


def test_two_requests_load_a_page_once(artifact: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    with engine_over(artifact, store, monkeypatch) as engine:
        head = prompts(1, 160)[0]
        wanted = answers(engine, [[*head, 5], [*head, 6]])
        settle(engine.kv)
        evict_device(engine.kv)  # type: ignore[arg-type]
        drop_host(engine.kv)  # type: ignore[arg-type]
        engine.kv.reset_metrics()
        assert answers(engine, [[*head, 5], [*head, 6]]) == wanted
        assert engine.kv.get_metrics_aggregated().h2d_blocks_copied == 10


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
