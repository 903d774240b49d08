"""The disk tier: pages that outlive the process, of the models and processes that share it."""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvgraph.errors import StoreError
from kvgraph.kv.tiers.disk import store as disk
from kvgraph.kv.tiers.disk.slabs import Slabs, Slot
from kvgraph.kv.tiers.disk.store import DiskStore
from tests.kv.disk_pages import (
    KEYS,
    MODEL,
    OTHER,
    SIZE,
    all_right,
    got,
    held,
    opened,
    page,
    put,
    slabs,
)


def test_pages_come_back_whole(tmp_path: Path) -> None:
    store = opened(tmp_path / "new" / "folder")
    content = memoryview(page(0))
    assert store.write(KEYS[0], [content[:100], content[100:101], content[101:]])
    assert got(store, 0) == page(0)
    assert got(store, 1) is None
    assert store.contains(KEYS[:2]) == [True, False]
    assert store.write(KEYS[0], [content]), "held already"
    store.flush()
    stats = store.stats()
    assert (stats.num_pages, stats.num_used_pages, stats.nbytes) == (100, 1, SIZE)
    assert (stats.written, stats.read, stats.missed, stats.dropped) == (1, 1, 1, 0)
    store.close()
    store.close()
    assert got(store, 0) is None
    assert not store.write(KEYS[1], [content])


def test_pages_outlive_the_process(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, *range(10))
    store.flush()  # not closed: as if killed
    again = opened(tmp_path)
    assert again.stats().num_used_pages == 10
    assert all(all_right(again, 10))
    store.close()
    again.close()


@pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 100_000])
def test_records_of_any_size(tmp_path: Path, size: int) -> None:
    store = DiskStore(tmp_path, 1 << 20, MODEL, 100_000)
    assert store.write(KEYS[0], [memoryview(page(0, size))])
    assert got(store, 0, size) == page(0, size)
    assert got(store, 0, size + 1) is None
    assert store.stats().foreign == 1
    assert got(store, 0, size) == page(0, size), "left where it was"
    store.close()


def test_the_least_recently_used_pages_make_room(tmp_path: Path) -> None:
    store = opened(tmp_path, pages=4)
    put(store, 0, 1, 2, 3)
    store.touch([KEYS[1], KEYS[0]])
    assert got(store, 2) == page(2)
    put(store, 4, 5)
    assert held(store) == [0, 2, 4, 5]
    assert store.stats().evicted == 2
    store.flush()
    assert store.stats().num_used_pages == 4
    store.close()


def test_processes_share_the_limit_and_the_order(tmp_path: Path) -> None:
    one, two = opened(tmp_path, pages=8), opened(tmp_path, pages=8)
    put(one, 0, 1, 2, 3)
    one.flush()
    put(two, 4, 5, 6, 7)
    two.flush()
    assert all(all_right(one, 8))
    assert all(all_right(two, 8))
    two.touch([KEYS[0]])
    two.flush()
    put(one, 8, 9)
    one.flush()
    assert held(two) == [0, 3, 4, 5, 6, 7, 8, 9]
    put(two, 9)
    assert two.stats().written == 4, "what another process wrote is not written again"
    one.close()
    two.close()
    assert sum(path.stat().st_size for path in slabs(tmp_path)) <= 8 * SIZE


def test_both_write_one_page(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    put(one, 0, 1)
    put(two, 0, 2)
    one.flush()
    two.flush()
    assert (all_right(one, 3), all_right(two, 3)) == ([True] * 3, [True] * 3)
    one.close()
    two.close()
    assert opened(tmp_path).stats().nbytes == 3 * SIZE


def test_sizes_share_the_limit(tmp_path: Path) -> None:
    small, large = 4096, 40960
    store = DiskStore(tmp_path, 2 * large, MODEL, large)
    for i in range(20):
        assert store.write(KEYS[i], [memoryview(page(i, small))])
    assert store.write(KEYS[20], [memoryview(page(20, large))])
    assert held(store) == [*range(10, 21)]
    assert all(got(store, i, small) == page(i, small) for i in range(10, 20))
    store.close()
    blocks = sum(path.stat().st_blocks for path in slabs(tmp_path))
    assert blocks * 512 <= 2 * large, "an evicted page's blocks go back to the file system"


def test_a_page_beyond_the_limit_is_dropped(tmp_path: Path) -> None:
    store = opened(tmp_path, pages=2)
    assert not store.write(KEYS[0], [memoryview(page(0, 3 * SIZE))])
    put(store, 1)
    assert store.stats().dropped == 1
    store.close()


def test_a_smaller_limit_evicts_at_open(tmp_path: Path) -> None:
    store = opened(tmp_path, pages=10)
    put(store, *range(10))
    store.close()
    store = opened(tmp_path, pages=3)
    assert held(store) == [7, 8, 9]
    assert store.stats().nbytes == 3 * SIZE
    store.close()


def test_another_model_is_ignored_counted_and_never_mixed(tmp_path: Path) -> None:
    other = opened(tmp_path, model=OTHER)
    put(other, 0, 1)
    other.close()
    (tmp_path / "kvgraph-0.1").mkdir()
    (tmp_path / "kvgraph-0.1" / "data").write_bytes(b"of another version")
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    store = opened(tmp_path)
    assert store.stats().foreign == 3
    assert store.stats().num_used_pages == 0
    assert held(store) == []
    assert store.write(KEYS[0], [memoryview(bytes(SIZE))])
    store.clear()
    assert held(store) == []
    store.close()
    assert all(all_right(opened(tmp_path, model=OTHER), 2))
    assert (tmp_path / "kvgraph-0.1" / "data").read_bytes() == b"of another version"
    assert (tmp_path / "notes.txt").exists()


def test_an_index_that_mixes_models_up_serves_nothing(tmp_path: Path) -> None:
    other = opened(tmp_path, model=OTHER)
    put(other, 0, 1)
    other.close()
    with sqlite3.connect(tmp_path / "kvgraph-1.1" / "index.sqlite") as db:
        db.execute("UPDATE slots SET model = ?", (MODEL,))
    db.close()
    store = opened(tmp_path)
    assert all_right(store, 2) == [False, False]
    assert store.stats().damaged == 2
    store.close()


def test_a_damaged_page_is_a_miss_and_is_removed(tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, 0, 1, 2)
    store.flush()
    (slab,) = slabs(tmp_path)
    content = slab.read_bytes()
    at = content.index(KEYS[1]) + 5000
    slab.write_bytes(content[:at] + b"\x00" + content[at + 1 :])
    assert all_right(store, 3) == [True, False, True]
    assert held(store) == [0, 2]
    assert store.stats().damaged == 1
    put(store, 1)
    assert all(all_right(store, 3))
    store.close()


def test_several_find_one_page_damaged(tmp_path: Path) -> None:
    """Its slot is free once, and stays with a process that claimed it since."""
    one, two = opened(tmp_path, pages=1), opened(tmp_path, pages=1)
    put(one, 0)
    one.flush()
    index = one._ready(False).index
    found = index.find(KEYS[0])
    assert found is not None
    assert [index.remove(KEYS[0], found) for _ in range(2)] == [1, 0]
    assert (index.counts(), index.taken) == ((0, 0), 0)
    put(two, 1)
    assert index.remove(KEYS[0], found) == 0
    two.flush()
    assert got(two, 1) == page(1)
    assert two.stats().dropped == 0


def test_a_damaged_page_while_another_process_writes(tmp_path: Path) -> None:
    """It is a miss, no more: what is whole is read on."""
    store = opened(tmp_path)
    put(store, 0, 1)
    store.flush()
    (slab,) = slabs(tmp_path)
    content = slab.read_bytes()
    slab.write_bytes(content.replace(page(0), bytes(SIZE)))
    (index,) = tmp_path.glob("kvgraph-*/index.sqlite")
    with closing(sqlite3.connect(index, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert all_right(store, 2) == [False, True]
    stats = store.stats()
    assert (stats.problem, stats.damaged) == ("", 0)
    assert all_right(store, 2) == [False, True]
    assert store.stats().damaged == 1


def test_a_slot_reused_while_it_is_read_is_a_miss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = opened(tmp_path, pages=1), opened(tmp_path, pages=1)
    put(reader, 0)
    reader.flush()
    read = Slabs.read

    def late(self: Slabs, at: Slot, out: memoryview) -> bool:
        put(writer, 1)
        writer.flush()
        return read(self, at, out)

    monkeypatch.setattr(Slabs, "read", late)
    assert got(reader, 0) is None
    monkeypatch.undo()
    assert reader.stats().damaged == 0
    assert got(reader, 1) == page(1), "not removed in the place of the old one"
    reader.close()
    writer.close()


def test_the_order_holds_when_the_clock_goes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path, pages=4)
    put(store, 0, 1, 2, 3)
    store.flush()
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 86400 * 10**9)
    put(store, 4, 5)
    store.flush()
    assert got(store, 2) == page(2)
    put(store, 6)
    store.flush()
    assert held(store) == [2, 4, 5, 6]
    store.close()


def locks_that_fail(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", fails)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    locks_that_fail(number, monkeypatch)
    before = num_descriptors()
    expected = (
        f"^disk tier {tmp_path}/kvgraph-1.1: expected a file system with locks \\(flock\\), "
        f"got '{os.strerror(number)}'$"
    )
    with pytest.raises(StoreError, match=expected):
        opened(tmp_path)
    assert num_descriptors() == before
    assert list(tmp_path.glob("*/*.owner")) == []


def test_locks_that_fail_for_a_while_leave_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSE_SECONDS", 0.0)
    with monkeypatch.context() as failing:
        locks_that_fail(errno.EIO, failing)
        store = opened(tmp_path)
        before = num_descriptors()
        for _ in range(5):
            assert got(store, 0) is None
        assert store.stats().problem
        assert num_descriptors() == before
        assert list(tmp_path.glob("*/*.owner")) == []
    put(store, 0)
    assert got(store, 0) == page(0)
    store.close()


def test_pages_larger_than_a_call_moves_are_moved_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, read = os.pwrite, os.pread

    def fill(file: int, parts: list[memoryview], at: int) -> int:
        data = read(file, min(5, parts[0].nbytes), at)
        parts[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: write(file, b"".join(parts)[:7], at))
    monkeypatch.setattr(os, "preadv", fill)
    store = opened(tmp_path)
    data = memoryview(page(0))
    assert store.write(KEYS[0], [data[:3], data[3:10], data[10:]])
    assert got(store, 0) == page(0)
    store.close()


def test_a_disk_that_takes_no_more_bytes_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(tmp_path)
    monkeypatch.setattr(os, "pwritev", lambda file, parts, at: 0)
    assert not store.write(KEYS[0], [memoryview(page(0))])
    assert "No space left on device" in store.stats().problem
    store.close()
