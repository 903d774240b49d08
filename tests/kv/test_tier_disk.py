"""The disk tier: pages that outlive the process, whatever happens to their files."""

from __future__ import annotations

import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import pytest

from kvgraph.errors import StoreError
from kvgraph.kv.tiers import disk, generation, index
from kvgraph.kv.tiers.disk import DiskStore
from kvgraph.kv.tiers.slabs import Slabs, Slot

MODEL, OTHER = sha256(b"model").digest(), sha256(b"other").digest()
SIZE = 8192
ROUNDS = 25
"""Of damage to each file."""

KEYS = [sha256(f"key {i}".encode()).digest() for i in range(64)]


def page(i: int, size: int = SIZE) -> bytes:
    return (KEYS[i] * (size // 32 + 1))[:size]


def opened(
    folder: Path, pages: int = 100, model: bytes = MODEL, page_bytes: int = SIZE
) -> DiskStore:
    return DiskStore(folder, pages * SIZE, model, page_bytes)


def put(store: DiskStore, *which: int) -> None:
    for i in which:
        assert store.write(KEYS[i], [memoryview(page(i))])


def got(store: DiskStore, i: int, size: int = SIZE) -> bytes | None:
    """The page as read into poisoned memory."""
    out = bytearray(b"\xff" * size)
    return bytes(out) if store.read(KEYS[i], memoryview(out)) else None


def held(store: DiskStore) -> list[int]:
    return [i for i, is_here in enumerate(store.contains(KEYS)) if is_here]


def all_right(store: DiskStore, count: int) -> list[bool]:
    """Which of the first pages are served; none may be wrong."""
    found = [got(store, i) for i in range(count)]
    assert all(content in (None, page(i)) for i, content in enumerate(found))
    return [content is not None for content in found]


def slabs(folder: Path) -> list[Path]:
    return sorted(folder.glob("kvgraph-*/*.pages"))


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


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    store = opened(folder)
    put(store, *range(40))
    store.close()
    return folder


def damage(path: Path, rng: random.Random) -> None:
    """Flip bits of a file, cut it short, or overwrite a block."""
    content = bytearray(path.read_bytes())
    kind = rng.choice(("flip", "flip", "cut", "zero", "noise"))
    at = rng.randrange(len(content) + 1)
    if kind == "flip":
        for _ in range(rng.choice((1, 1, 8, 64))):
            content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del content[at:]
    else:
        noise = bytes(4096) if kind == "zero" else rng.randbytes(4096)
        content[at : at + 4096] = noise[: len(content) - at]
    path.write_bytes(content)


@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
@pytest.mark.parametrize("name", ["index.sqlite", "*.pages"])
def test_no_damage_to_any_file_serves_a_wrong_page(
    name: str, is_open: bool, filled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "PAUSE_SECONDS", 0.0)
    hits = 0
    for seed in range(ROUNDS):
        folder = tmp_path / str(seed)
        shutil.copytree(filled, folder)
        store = opened(folder) if is_open else None
        (path,) = folder.glob(f"kvgraph-1.1/{name}")
        damage(path, random.Random(seed))
        store = store or opened(folder)
        hits += sum(all_right(store, 40))
        put_or_drop(store)
        all_right(store, 48)
        store.close()
        store = opened(folder)
        all_right(store, 48)
        store.clear()
        put(store, *range(40, 48))
        assert held(store) == [*range(40, 48)], "it serves again"
        store.close()
        shutil.rmtree(folder)
    assert 0 < hits < ROUNDS * 40


def put_or_drop(store: DiskStore) -> None:
    for i in range(40, 48):
        store.write(KEYS[i], [memoryview(page(i))])
    store.flush()


def test_a_damaged_index_is_abandoned_by_all(tmp_path: Path) -> None:
    one, two = opened(tmp_path), opened(tmp_path)
    put(one, *range(20))
    one.flush()
    path = tmp_path / "kvgraph-1.1" / "index.sqlite"
    path.write_bytes(b"not a database" * 1000)
    three = opened(tmp_path)
    put(three, 20)
    three.flush()
    for store in (one, two):
        all_right(store, 21)
        store.touch([KEYS[20]])
        store.flush()
        assert got(store, 20) == page(20)
        store.close()
    three.close()
    assert [path.name for path in tmp_path.iterdir()] == ["kvgraph-1.2"]


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


def test_an_index_that_cannot_grow_is_no_tier(tmp_path: Path) -> None:
    store = opened(tmp_path, pages=64)
    put(store, 0)
    store.flush()
    with files_of_at_most(0):
        put_or_drop(store)
        all_right(store, 48)
    store.close()


def test_a_folder_that_vanishes_is_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "PAUSE_SECONDS", 0.0)
    store = opened(tmp_path / "store")
    put(store, *range(20))
    store.flush()
    shutil.rmtree(tmp_path / "store")
    for _ in range(3):
        all_right(store, 40)
        put_or_drop(store)
    (tmp_path / "store").mkdir()
    put(store, 50)
    assert got(store, 50) == page(50)
    store.close()


def test_a_lock_that_is_not_released_pauses_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "LOCK_SECONDS", 0.02)
    store = opened(tmp_path)
    put(store, 0)
    store.flush()
    other = sqlite3.connect(tmp_path / "kvgraph-1.1" / "index.sqlite", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert got(store, 0) is None
    other.execute("ROLLBACK")
    other.close()
    assert got(store, 0) is None, "it pauses"
    assert not store.write(KEYS[1], [memoryview(page(1))])
    monkeypatch.setattr(store, "_usable_at", 0.0)
    assert got(store, 0) == page(0)
    store.close()


def test_a_clear_that_fails_is_done_before_the_store_answers_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(index, "LOCK_SECONDS", 0.02)
    store = opened(tmp_path)
    put(store, 0)
    store.flush()
    put(store, 1)
    with sqlite3.connect(tmp_path / "kvgraph-1.1" / "index.sqlite", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        store.clear()
        other.execute("ROLLBACK")
    other.close()
    assert held(store) == [], "it pauses"
    monkeypatch.setattr(store, "_usable_at", 0.0)
    assert held(store) == []
    put(store, 1)
    assert (got(store, 0), got(store, 1)) == (None, page(1))
    store.close()
    assert held(opened(tmp_path)) == [1]


def test_room_that_the_dead_claimed_is_free_again(tmp_path: Path) -> None:
    store = opened(tmp_path, pages=1)
    code = (
        "import os; from pathlib import Path; from kvgraph.kv.tiers.disk import DiskStore; "
        f"store = DiskStore(Path({str(tmp_path)!r}), {SIZE}, {MODEL!r}, {SIZE}); "
        f"assert store._files and store._claim(store._files, {SIZE}); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
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
    for folder in (path, path / "below"):
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
