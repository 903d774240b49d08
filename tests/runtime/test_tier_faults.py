"""Tiers that fail, are slow or are gone: requests are computed, and nothing waits for long."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph import Engine
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.artifact import Artifact
from tests.runtime.tier_engines import (
    answers,
    assert_conserved,
    drop_host,
    evict_device,
    greedy,
    prompts,
    run,
    settle,
    start,
    tiered,
)
from tests.support.command_line import COMMAND
from tests.support.redis_server import RedisServer
from tests.support.stores import MemoryStore, opener

Compiled = Callable[..., Path]


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has to be short
        started = RedisServer(Path(folder))
        started.start()
        yield started
        started.kill()


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def engine_over(
    artifact: Artifact, store: Any, monkeypatch: pytest.MonkeyPatch, host_pages: int = 1
) -> Engine:
    """An engine with this store below a host tier of one page."""
    options = {"total_num_host_pages": host_pages, "stores": [opener(store)]}
    monkeypatch.setattr("kvgraph.runtime.cache.tier_options", lambda params, tiers: options)
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


def test_pages_before_one_that_fails_are_used(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A damaged page costs what comes behind it; once it is written again nothing is missed."""
    asked = prompts(1, 300)
    damaged: list[int] = []
    store = MemoryStore(fails=lambda call: call == "read" and store.calls.count("read") in damaged)
    with engine_over(artifact, store, monkeypatch) as engine:
        size = engine.kv.params.page_size  # type: ignore[attr-defined]
        wanted = answers(engine, asked)
        for failing, cached in (([6], 5 * size), ([1], 0), ([], 300 // size * size)):
            settle(engine.kv)
            evict_device(engine.kv)  # type: ignore[arg-type]
            store.calls.clear()
            damaged[:] = failing
            (done,) = engine.generate(asked, greedy())
            assert done.token_ids == wanted[0]
            assert done.cached_tokens == cached
        assert engine.kv.get_metrics_aggregated().load_failures == 2
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
    monkeypatch.setattr("kvgraph.kv.tiers.lookup.PATIENCE_SECONDS", 0.25)
    store = MemoryStore(fails=lambda call: call == "contains" and not gate.wait(60))
    with engine_over(artifact, store, monkeypatch) as engine:
        assert answers(engine, asked) == wanted
        assert answers(engine, asked) == wanted
        assert not gate.is_set()
        assert engine.kv.get_metrics_aggregated().load_failures == 0
        gate.set()


def test_a_server_that_dies_freezes_and_comes_back(
    artifact: Artifact, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgraph.kv.tiers.remote import RemoteStore

    monkeypatch.setitem(RemoteStore.__init__.__kwdefaults__, "timeout", 30.0)
    asked = prompts(4, 100)
    wanted = answers(Engine(artifact, num_pages=200, num_threads=1), asked)
    with Engine(artifact, num_pages=24, num_threads=1, remote=server.url()) as engine:
        kv: Any = engine.kv
        assert answers(engine, asked) == wanted
        settle(kv)
        evict_device(kv)
        assert answers(engine, asked) == wanted
        assert kv.get_metrics_aggregated().remote_blocks_read >= 4 * 6
        kv._tiers.connector._stores[0]._wire._timeout = 1.0
        monkeypatch.setattr("kvgraph.kv.tiers.lookup.PATIENCE_SECONDS", 0.25)
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
    assert len(rest) == 2, "how fast prompt and generation were"


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


def test_an_idle_engine_holds_no_pages_that_tiers_copy(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its one step queues the copies, and no step follows that would see them end."""
    with engine_over(artifact, MemoryStore(), monkeypatch) as engine:
        answers(engine, prompts(1, 300), tokens=1)
        stats = engine.stats()
        assert (stats.num_free_pages, stats.num_pages, stats.page_usage) == (24, 24, 0)
        assert engine.kv.get_num_used_pages() == 0  # type: ignore[attr-defined]
        assert_conserved(engine)


def test_pages_that_tiers_hold_are_given_up_where_a_request_needs_them(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """Offloads that wait for a stuck store are dropped and counted; `alloc` never fails of them."""
    monkeypatch.setattr("kvgraph.kv.tiers.lookup.PATIENCE_SECONDS", 0.25)
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


def test_a_stuck_store_leaves_room_for_requests(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """Of the pages that wait for a slot most are given up, while another request runs."""
    monkeypatch.setattr("kvgraph.kv.tiers.lookup.PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr("kvgraph.kv.tiers.open.STAGING_BYTES", 0)  # 4 slots
    store = MemoryStore(fails=lambda call: call == "write" and not gate.wait(30))
    with engine_over(artifact, store, monkeypatch, host_pages=0) as engine:
        answers(engine, prompts(1, 16 * 20), tokens=1)  # its pages are committed, and wait
        engine.submit(prompts(1, 20, seed=1)[0], greedy(60))
        later = engine.submit(prompts(1, 16 * 8, seed=2)[0], greedy(1))
        while later not in {token.request_id for token in engine.step()}:
            assert engine.busy
        assert engine.busy, "expected the one to run while the other was admitted"
        gate.set()


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
