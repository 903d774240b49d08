"""The disk tier: processes that use one index at the same time, and those that died."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvgraph.kv.tiers.disk import index, tools
from kvgraph.kv.tiers.disk import store as disk
from kvgraph.kv.tiers.disk.index import Index, NewPage
from kvgraph.kv.tiers.disk.owners import Owner
from kvgraph.kv.tiers.disk.slabs import Slot
from kvgraph.kv.tiers.disk.store import DiskStore
from tests.kv.disk_pages import KEYS, MODEL, SIZE, all_right, got, held, opened, page, put


@contextmanager
def locked_index(folder: Path, how: str = "EXCLUSIVE") -> Iterator[None]:
    """As another process holds it in the middle of a change; IMMEDIATE: it can be read."""
    path = folder / "kvgraph-1.1" / "index.sqlite"
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(f"BEGIN {how}")
        yield
        other.execute("ROLLBACK")


def with_a_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> DiskStore:
    """A store of one page, which waits for a lock for a moment only."""
    monkeypatch.setattr(index, "LOCK_SECONDS", 0.02)
    store = opened(folder)
    put(store, 0)
    store.flush()
    return store


def test_a_lock_that_is_not_released_pauses_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_a_page(tmp_path, monkeypatch)
    with locked_index(tmp_path):
        assert got(store, 0) is None
    assert got(store, 0) is None, "it pauses"
    assert not store.write(KEYS[1], [memoryview(page(1))])
    monkeypatch.setattr(store, "_usable_at", 0.0)
    assert got(store, 0) == page(0)
    store.close()


def test_pages_that_a_lock_keeps_from_the_index_are_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "LOCK_SECONDS", 0.02)
    store = opened(tmp_path)
    put(store, 0, 1)
    with locked_index(tmp_path):
        store.flush()
    assert store.stats().problem
    store.flush()
    assert held(opened(tmp_path)) == [], "it pauses"
    monkeypatch.setattr(store, "_writable_at", 0.0)
    store.flush()
    assert store.stats().dropped == 0
    another = opened(tmp_path)
    assert held(another) == [0, 1]
    assert all(all_right(another, 2))
    another.close()
    store.close()


def test_an_index_that_others_change_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever call finds it busy; pages that were not published yet are missed."""
    monkeypatch.setattr(disk, "BATCH_PAGES", 1)
    calls: list[Callable[[DiskStore], object]] = [
        DiskStore.flush,
        lambda store: store.touch([KEYS[0]]),
        lambda store: got(store, 0),
        lambda store: got(store, 1),
        lambda store: store.write(KEYS[2], [memoryview(page(2))]),
    ]
    for i, call in enumerate(calls):
        store = with_a_page(tmp_path / str(i), monkeypatch)
        store._pending[KEYS[1]] = NewPage(Slot(SIZE, 9), KEYS[1], SIZE, b"", 1)
        with locked_index(tmp_path / str(i), "IMMEDIATE"):
            call(store)
            assert "locked" in store.stats().problem
            assert [got(store, 0), got(store, 1), got(store, 0)] == [page(0), None, page(0)]
            assert held(store) == [0]
            assert not store.write(KEYS[2], [memoryview(page(2))]), "writes pause"
        store.close()
        assert store.stats().problem == "", "the last try does not wait"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Index]:
    """The indices that were checked, which takes long and stops all other processes."""
    found: list[Index] = []
    check = Index._check

    def noted(own: Index) -> None:
        found.append(own)
        check(own)

    monkeypatch.setattr(Index, "_check", noted)
    return found


def test_an_index_is_not_checked_again_while_its_processes_live(
    checks: list[Index], tmp_path: Path
) -> None:
    one = opened(tmp_path)
    put(one, 0)
    one.flush()
    two = opened(tmp_path)
    one.close()
    three = opened(tmp_path)
    assert len(checks) == 1
    assert (three.stats().num_used_pages, three.stats().nbytes) == (1, SIZE)
    two.close()
    three.close()
    opened(tmp_path).close()
    assert len(checks) == 2, "none lives"


def test_an_index_is_checked_after_a_kill(checks: list[Index], tmp_path: Path) -> None:
    run_and_die(tmp_path, "pass")
    assert [file.stat().st_size for file in tmp_path.glob("*/*.owner")] == [1]
    store = opened(tmp_path)
    assert len(checks) == 1
    store.close()


def test_a_process_that_has_not_checked_the_index_yet_is_not_trusted(
    checks: list[Index], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as slow:
        slow.setattr(Owner, "trust_index", lambda _: None)
        one = opened(tmp_path)
    two = opened(tmp_path)
    assert len(checks) == 2
    one.close()
    two.close()


def test_an_index_that_was_emptied_is_made_again(checks: list[Index], tmp_path: Path) -> None:
    """The total of its pages too, though another process lives."""
    one = opened(tmp_path)
    put(one, 0)
    one.flush()
    (tmp_path / "kvgraph-1.1" / "index.sqlite").write_bytes(b"")
    two = opened(tmp_path)
    assert len(checks) == 2
    put(two, 1)
    assert got(two, 1) == page(1)
    two.close()
    one.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kvgraph-1.1"]


def test_a_clear_that_fails_is_done_before_the_store_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_a_page(tmp_path, monkeypatch)
    put(store, 1)
    with locked_index(tmp_path):
        store.clear()
    assert held(store) == [], "it pauses"
    monkeypatch.setattr(store, "_usable_at", 0.0)
    assert held(store) == []
    put(store, 1)
    assert (got(store, 0), got(store, 1)) == (None, page(1))
    store.close()
    assert held(opened(tmp_path)) == [1]


def test_a_clear_that_failed_is_tried_again_as_the_store_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = with_a_page(tmp_path, monkeypatch)
    with locked_index(tmp_path):
        store.clear()
    store.close()
    assert held(opened(tmp_path)) == []


def test_a_store_that_closes_before_it_is_emptied_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = with_a_page(tmp_path, monkeypatch)
    with locked_index(tmp_path):
        store.clear()
        caplog.clear()
        store.close()
        store.close()
    told = [one for one in caplog.messages if "could not be emptied" in one]
    assert len(told) == 1
    assert told[0].endswith(f"run kvgraph cache clear {tmp_path}")
    tools.clear(tmp_path)
    assert held(opened(tmp_path)) == []


def run_and_die(folder: Path, code: str) -> None:
    """Run `code` in a process that opens a `store` of one page and does not close it."""
    whole = (
        "import os; from pathlib import Path; from kvgraph.kv.tiers.disk.store import DiskStore; "
        f"store = DiskStore(Path({str(folder)!r}), {SIZE}, {MODEL!r}, {SIZE}); {code}; os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", whole], check=True)


def test_room_that_the_dead_claimed_is_free_again(tmp_path: Path) -> None:
    store = opened(tmp_path, pages=1)
    run_and_die(tmp_path, f"assert store._files and store._claim(store._files, {SIZE})")
    put(store, 0)
    assert got(store, 0) == page(0)
    store.close()


def test_room_that_the_living_claim_is_not(tmp_path: Path) -> None:
    one, two = opened(tmp_path, pages=1), opened(tmp_path, pages=1)
    assert one._files is not None
    assert one._claim(one._files, SIZE)
    assert not two.write(KEYS[0], [memoryview(page(0))])
    assert two.stats().dropped == 1
    one.close()
    put(two, 0)
    two.close()
