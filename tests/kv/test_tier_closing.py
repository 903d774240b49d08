"""The end of a manager with tiers: closed, dropped, forked, or open as the interpreter ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvgraph.errors import CapacityError, StoreError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.kv.tiers import jobs, workers
from kvgraph.kv.tiers.connector import Move
from kvgraph.kv.tiers.copies import HostCopier
from kvgraph.kv.tiers.disk import tools
from kvgraph.kv.tiers.host import HostStore
from kvgraph.kv.tiers.jobs import Job
from kvgraph.kv.tiers.tiered import TieredConnector
from kvgraph.kv.tiers.workers import TierWorkers
from tests.support import command_line
from tests.support.builders import make_params, start
from tests.support.faults import failing
from tests.support.refused_threads import SENTENCE, refused_threads
from tests.support.stores import MemoryStore, opener


def make_manager(store: MemoryStore) -> tuple[PagedKVCacheManager, TieredConnector]:
    params = make_params(enable_prefix_caching=True)
    manager = PagedKVCacheManager(params, None, 8, 4, max_batch_size=1, stores=[opener(store)])
    assert manager._tiers is not None
    connector = manager._tiers.connector
    assert isinstance(connector, TieredConnector)
    return manager, connector


def require_ended(connector: TieredConnector, store: MemoryStore) -> None:
    assert len(connector._threads) == 2
    for thread in connector._threads:
        thread.join(30)
        assert not thread.is_alive()
    assert store.is_closed


def test_a_manager_that_is_dropped_ends_its_threads() -> None:
    store = MemoryStore()
    manager, connector = make_manager(store)
    del manager
    gc.collect()
    require_ended(connector, store)


def test_a_manager_that_is_collected_in_a_thread_of_its_own_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The collector runs wherever it likes: here within the thread, which holds the lock."""
    take, is_due = TierWorkers._take_store, threading.Event()

    def collecting(self: TierWorkers) -> Job | None:
        if is_due.is_set():
            is_due.clear()
            gc.collect()
        return take(self)

    monkeypatch.setattr(TierWorkers, "_take_store", collecting)
    store = MemoryStore()
    manager, connector = make_manager(store)
    cycle: list[Any] = [manager]
    cycle.append(cycle)
    gc.disable()
    try:
        is_due.set()
        with connector._changed:
            del manager, cycle
            connector._changed.notify_all()
        require_ended(connector, store)
    finally:
        gc.enable()


def test_a_manager_goes_on_without_its_tiers_after_close() -> None:
    manager, _ = make_manager(MemoryStore())
    manager.close()
    for first in range(6):  # more pages than the pool has
        tokens = range(first * 100, first * 100 + 20)
        assert manager.prefetch([TextContext("a", tokens)]) == [True]
        ctx = start(manager, "a", tokens)
        ctx.update(1)
        manager.step([ctx])
        manager.release("a")
    assert manager.num_free_blocks() == 8


FORKING = """
import os, sys
from pathlib import Path
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.tiers.disk.store import DiskStore
from tests.support.builders import make_params

folder = Path(sys.argv[1])
manager = PagedKVCacheManager(
    make_params(enable_prefix_caching=True), None, 8, 4, max_batch_size=1,
    stores=[lambda fingerprint, size: DiskStore(folder, 1 << 20, fingerprint, size)],
)
for end in (lambda: manager.close(), lambda: None):
    if not (child := os.fork()):
        end()
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
print(len(list(folder.glob("*/*.owner"))))
manager.close()
print(len(list(folder.glob("*/*.owner"))))
"""


def test_a_fork_that_ends_leaves_its_parents_tiers_alone(tmp_path: Path) -> None:
    command = [*command_line.FORKING, "-c", FORKING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("1\n0\n", "")


def test_an_interpreter_that_ends_finishes_what_is_queued(tmp_path: Path) -> None:
    left_open = FORKING.split("for end in")[0] + (
        "from kvgraph.kv.requests import TextContext\n"
        "ctx = TextContext('a', range(20)); manager.claim('a'); manager.alloc(ctx)\n"
        "ctx.update(1); manager.step([ctx])\n"
    )
    subprocess.run([sys.executable, "-c", left_open, str(tmp_path)], timeout=60, check=True)
    ((_, pages, _, _),), _ = tools.describe(tmp_path)
    assert pages == 5
    assert not list(tmp_path.glob("*/*.owner"))


class Slow(MemoryStore):
    """Each write waits for a turn, at most for `seconds`."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.turns, self._seconds = threading.Semaphore(0), seconds
        self.is_writing = threading.Event()

    def write(self, key: bytes, parts: Sequence[memoryview]) -> bool:
        self.is_writing.set()
        self.turns.acquire(timeout=self._seconds)
        return super().write(key, parts)


def filled(store: MemoryStore) -> tuple[PagedKVCacheManager, TieredConnector]:
    """Five pages on their way to the store."""
    manager, connector = make_manager(store)
    ctx = start(manager, "a", range(20))
    ctx.update(1)
    manager.step([ctx])
    manager.release("a")
    return manager, connector


def test_what_a_slow_store_has_not_taken_in_time_is_dropped_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "CLOSE_SECONDS", 0.1)
    store = Slow(60.0)
    manager, connector = filled(store)
    assert store.is_writing.wait(30)
    drop = connector.drop_queued

    def drop_and_let_go() -> None:
        drop()
        store.turns.release()

    monkeypatch.setattr(connector, "drop_queued", drop_and_let_go)
    manager.close()
    require_ended(connector, store)
    assert store.writes == 1, "a write that has begun ends"
    assert connector.metrics().offload_dropped == 4
    assert "4 copies of pages are dropped" in caplog.text


def test_a_close_that_is_hurried_waits_for_no_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "CLOSE_SECONDS", 60.0)
    store = Slow(60.0)
    manager, connector = filled(store)
    assert store.is_writing.wait(30)
    closing = threading.Thread(target=manager.close)
    closing.start()
    connector.drop_queued()
    store.turns.release()
    closing.join(30)
    assert not closing.is_alive()
    require_ended(connector, store)
    assert store.writes == 1


def test_more_host_memory_than_there_is_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: HostCopier, nbytes: int) -> Any:
        raise MemoryError

    monkeypatch.setattr(HostCopier, "pinned_host_bytes", refuse)
    store = MemoryStore()
    message = (
        r"^host_memory: expected .*B for 4 pages and what passes .* the system refused; use less$"
    )
    with pytest.raises(CapacityError, match=message):
        make_manager(store)
    assert store.is_closed


@pytest.mark.parametrize(
    ("second", "got"),
    [
        (None, "NoneType with the name None"),
        (MemoryStore, "type with the name None"),
        (MemoryStore("host"), "MemoryStore with the name 'host'"),
    ],
)
def test_an_opener_that_gives_no_store_ends_the_others(second: Any, got: str) -> None:
    first = MemoryStore()
    with pytest.raises(StoreError) as refused:
        PagedKVCacheManager(
            make_params(enable_prefix_caching=True),
            None,
            8,
            max_batch_size=1,
            stores=[opener(first), opener(second)],
        )
    assert str(refused.value) == (
        f"stores: expected a PageStore from each opener, with a name other than 'host', got {got}"
    )
    assert first.is_closed
    assert second is None or second is MemoryStore or second.is_closed


def test_a_thread_that_finds_no_memory_between_jobs_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The second slot of an offload is refused: the first is given back, and both are asked for
    again."""
    refused = failing(HostStore.reserve, 1, MemoryError("injected"))
    monkeypatch.setattr(HostStore, "reserve", refused)
    store = MemoryStore()
    manager, connector = filled(store)
    manager.close()
    require_ended(connector, store)
    assert "injected" in caplog.text
    assert (len(store.pages), store.writes) == (5, 5)
    assert not connector._host._reserved
    assert connector.metrics().offload_dropped == 0


@pytest.mark.parametrize("take", ["_take_copy", "_take_store"])
def test_a_thread_that_never_finds_its_next_job_ends_the_tiers(
    take: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Requests go on without them, and `close` returns."""
    monkeypatch.setattr(jobs, "FIRST_PAUSE", 0.0001)
    takes, fails = getattr(TierWorkers, take), threading.Event()

    def failing_take(self: TierWorkers) -> Job | None:
        if fails.is_set():
            raise ValueError
        job: Job | None = takes(self)
        return job

    monkeypatch.setattr(TierWorkers, take, failing_take)
    store = MemoryStore()
    manager, connector = filled(store)
    fails.set()
    load = connector.load([Move(b"none", manager.leaf_pools()[0], 0)])
    connector.touch([b"a key"])  # wakes both
    require_ended(connector, store)
    assert caplog.text.count("a tier failed") == jobs.MOST_FAILURES
    assert "the tiers end" in caplog.text
    assert connector._ended.pop(connector._ended.index(load)).ok is False
    again = start(manager, "b", range(20))
    assert (again.cached_prefix_length, manager.is_loading("b")) == (16, False)
    manager.close()


@pytest.mark.parametrize("first", [0, 1])
def test_a_thread_that_the_system_refuses_ends_the_others(first: int) -> None:
    store, before = MemoryStore(), threading.enumerate()
    with refused_threads("kvgraph-tiers", first), pytest.raises(CapacityError, match=SENTENCE):
        make_manager(store)
    assert store.is_closed
    assert threading.enumerate() == before


@pytest.mark.parametrize("runs", [False, True], ids=["before", "after"])
def test_an_interrupt_while_threads_start(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that run end, and the one that does not is never joined."""
    begin, started = threading.Thread.start, list[threading.Thread]()

    def interrupted(thread: threading.Thread) -> None:
        if thread.name == "kvgraph-tiers":
            started.append(thread)
        if len(started) < 2 or runs:
            begin(thread)
        if len(started) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_manager(MemoryStore())
    for thread in started[: 1 + runs]:
        thread.join(30)
        assert not thread.is_alive()
