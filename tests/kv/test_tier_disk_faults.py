"""The disk tier: a disk that is full, fails or is locked, and processes that died."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvgraph.errors import StoreError
from kvgraph.kv.tiers.disk import generation, tools
from kvgraph.kv.tiers.disk import store as disk
from kvgraph.kv.tiers.disk.index import Index
from kvgraph.kv.tiers.disk.store import DiskStore
from tests.kv.disk_pages import (
    KEYS,
    MODEL,
    all_right,
    got,
    held,
    opened,
    page,
    put,
    put_or_drop,
)


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, writes beyond `size` bytes of a file fail."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = DiskStore(tmp_path, 100 << 20, MODEL, 1 << 20)
    size = 1 << 20
    with files_of_at_most(2 * size + 100):
        wrote = [store.write(KEYS[i], [memoryview(page(i, size))]) for i in range(6)]
        assert wrote == [True, True, False, False, False, False]
        assert got(store, 0, size) == page(0, size), "what it holds is still served"
        store.flush()
    assert store.stats().dropped == 4
    assert not store.write(KEYS[2], [memoryview(page(2, size))]), "it pauses"
    monkeypatch.setattr(store, "_writable_at", 0.0)
    assert store.write(KEYS[2], [memoryview(page(2, size))])
    assert got(store, 2, size) == page(2, size)
    store.close()


def test_a_disk_that_is_full_at_the_start_is_no_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with files_of_at_most(0):
        store = opened(tmp_path / "t")
        problem = store.stats().problem
        assert problem.startswith(
            f"disk tier {tmp_path}/t: expected files to read and write, got '"
        )
        assert got(store, 0) is None
        assert not store.write(KEYS[0], [memoryview(page(0))])
    monkeypatch.setattr(store, "_usable_at", 0.0)
    put(store, 0)
    assert got(store, 0) == page(0)
    assert store.stats().problem == ""
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.ESTALE])
@pytest.mark.parametrize("call", ["open", "mkdir", "pwritev", "preadv", "listdir", "stat"])
def test_a_disk_that_fails_at_any_call_is_no_tier(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of these calls fails, then the second alone, and so on."""
    monkeypatch.setattr(disk, "PAUSE_SECONDS", 0.0)
    original = getattr(os, call)
    for fails in range(12):
        counts = itertools.count()

        def failing(*given: Any, at: int = fails, of: Any = counts, **options: Any) -> Any:
            if next(of) == at:
                raise OSError(number, os.strerror(number))
            return original(*given, **options)

        monkeypatch.setattr(os, call, failing)
        store = opened(tmp_path / str(fails))
        put_or_drop(store)
        all_right(store, 48)
        monkeypatch.setattr(os, call, original)
        put(store, 50)
        assert got(store, 50) == page(50)
        assert store.stats().problem == ""
        store.close()


def no_room(*_: Any) -> None:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    raise error


class WithoutRoom(sqlite3.Connection):
    """A database on a disk that has no room for a journal."""

    def execute(self, sql: str, *values: Any) -> sqlite3.Cursor:
        if sql.startswith(("DELETE", "INSERT", "UPDATE")):
            mode = super().execute("PRAGMA journal_mode").fetchone()
            if mode != ("memory",):
                no_room()
        return super().execute(sql, *values)


def test_what_filled_the_disk_is_served_after_a_restart_and_can_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, pages=10)
    put(store, *range(10))
    store.close()
    connect = partial(sqlite3.connect, factory=WithoutRoom)
    monkeypatch.setattr(sqlite3, "connect", connect)
    store = opened(tmp_path, pages=10)
    assert store.stats().problem == ""
    assert all(all_right(store, 10))
    store.close()
    store = opened(tmp_path, pages=3)
    assert held(store) == [7, 8, 9]
    store.close()
    ((_, pages, _, _),), _ = tools.describe(tmp_path)
    assert pages == 3
    assert [state.checked for state in tools.verify(tmp_path)] == [1, 2, 3]
    assert tools.clear(tmp_path) == 3


def test_a_page_is_read_though_the_index_cannot_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    put(store, 0, 1)
    store.flush()
    monkeypatch.setattr(disk, "BATCH_PAGES", 1)
    monkeypatch.setattr(Index, "touch", no_room)
    assert [got(store, i) for i in (0, 1, 0)] == [page(0), page(1), page(0)]
    assert (store.stats().read, store.stats().missed) == (3, 0)
    store.touch([KEYS[0]])
    store.flush()
    assert all(all_right(store, 2)), "only writes pause"
    assert "full" in store.stats().problem
    assert not store.write(KEYS[2], [memoryview(page(2))])
    store.close()


def test_an_index_that_cannot_grow_is_no_tier(tmp_path: Path) -> None:
    store = opened(tmp_path, pages=64)
    put(store, 0)
    store.flush()
    with files_of_at_most(0):
        put_or_drop(store)
        all_right(store, 48)
    store.close()


def test_a_folder_that_vanishes_is_no_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(disk, "PAUSE_SECONDS", 0.0)
    store = opened(tmp_path / "store")
    put(store, *range(20))
    store.flush()
    shutil.rmtree(tmp_path / "store")
    for _ in range(3):
        all_right(store, 40)
        put_or_drop(store)
    assert "got an index that was removed or replaced; pauses for" in caplog.text
    (tmp_path / "store").mkdir()
    put(store, 50)
    assert got(store, 50) == page(50)
    store.close()


@pytest.mark.parametrize("folder", [".", "kvgraph-1.1"])
def test_a_folder_that_was_removed_is_no_damage_to_the_next_one(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have made it, at the same path."""
    monkeypatch.setattr(disk, "PAUSE_SECONDS", 0.0)
    store = opened(tmp_path / "t")
    put(store, 0)
    store.flush()
    shutil.rmtree(tmp_path / "t" / folder)
    other = opened(tmp_path / "t")
    put(other, 1)
    other.flush()
    put(store, 2)
    store.flush()
    assert store.stats().damaged == 0
    put(store, 3)
    store.flush()
    assert held(other) == [1, 3]
    assert held(store) == [1, 3]
    store.close()
    other.close()
    assert os.listdir(tmp_path / "t") == ["kvgraph-1.1"]


def test_pages_that_the_index_had_no_room_for_are_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "BATCH_PAGES", 2)
    store = opened(tmp_path)
    with monkeypatch.context() as full:
        full.setattr(Index, "publish", no_room)
        put(store, 0, 1)
        assert "full" in store.stats().problem
        assert not store.write(KEYS[2], [memoryview(page(2))]), "it pauses"
        assert held(store) == [], "a read would have to publish them"
    monkeypatch.setattr(store, "_writable_at", 0.0)
    put(store, 2)
    store.flush()
    assert (store.stats().written, store.stats().dropped) == (3, 1)
    another = opened(tmp_path)
    assert held(another) == [0, 1, 2]
    another.close()
    store.close()


def test_generations_are_told_from_other_names(tmp_path: Path) -> None:
    for name in ("kvgraph-1.2", "kvgraph-1.10", "kvgraph-1.x", "kvgraph-2.1", "kvgraph-1.01"):
        (tmp_path / name).mkdir()
    assert generation.generations(tmp_path) == [2, 10]
    assert [path.name for path in generation.other_versions(tmp_path)] == ["kvgraph-2.1"]


def test_a_limit_below_one_page(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"size limit of at least one page, 12288 bytes, got 8192"):
        DiskStore(tmp_path, 8192, MODEL, 8193)


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch()
    for folder in (path, path / "below", tmp_path / ("n" * 300), tmp_path / "\0"):
        with pytest.raises(StoreError, match=f"disk tier {folder}: expected a folder that can be"):
            opened(folder)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    was = os.geteuid()
    if was == 0:  # root may write anywhere
        for parent in tmp_path.parents:
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        with pytest.raises(StoreError, match="folder that can be written, got 'Permission denied'"):
            opened(tmp_path)
    finally:
        os.seteuid(was)
        tmp_path.chmod(0o755)
