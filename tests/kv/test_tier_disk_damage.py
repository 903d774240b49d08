"""The disk tier: damage to its files, and what is not this tier's."""

from __future__ import annotations

import os
import random
import shutil
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from kvgraph.errors import StoreError
from kvgraph.kv.tiers.disk import store as disk
from kvgraph.kv.tiers.disk.tools import describe
from tests.kv.disk_pages import KEYS, all_right, got, held, opened, page, put, put_or_drop

ROUNDS = 25
"""Of damage to each file."""


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


def test_no_flipped_bit_of_the_index_stops_a_start(tmp_path: Path) -> None:
    """All bytes of text, and others in turn; whatever they say, the tier serves again."""
    store = opened(tmp_path / "whole", pages=8)
    put(store, *range(5))
    store.close()
    content = (tmp_path / "whole" / "kvgraph-1.1" / "index.sqlite").read_bytes()
    places = [at for at, byte in enumerate(content) if byte]
    rng, hits = random.Random(0), 0
    for at in places[::5]:
        folder = tmp_path / "flipped"
        shutil.copytree(tmp_path / "whole", folder)
        flipped = bytearray(content)
        flipped[at] ^= rng.choice((1 << 7, 1 << rng.randrange(7)))
        (folder / "kvgraph-1.1" / "index.sqlite").write_bytes(flipped)
        store = opened(folder, pages=8)
        assert store.stats().problem == ""
        hits += sum(all_right(store, 5))
        put_or_drop(store)
        store.touch(KEYS[:3])
        store.close()
        store = opened(folder, pages=8)
        store.clear()
        put(store, 20)
        assert got(store, 20) == page(20), at
        store.close()
        shutil.rmtree(folder)
    assert 0 < hits < 5 * len(places[::5])


def plant(kind: str, path: Path) -> None:
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path.symlink_to(path.parent.parent.parent / "precious")


@pytest.mark.parametrize("kind", ["pipe", "folder", "socket", "link"])
@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-journal", "8192.pages"])
def test_what_is_no_file_is_neither_followed_nor_waited_for(
    kind: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "precious").write_bytes(page(7) * 9)
    folder = tmp_path / "t"
    store = opened(folder)
    put(store, 0, 1)
    store.close()
    (folder / "kvgraph-1.1" / name).touch()
    plant(kind, folder / "kvgraph-1.1" / name)
    store = opened(folder)
    assert all_right(store, 2) == [False, False]
    store.write(KEYS[2], [memoryview(page(2))])
    put(store, 3)
    assert got(store, 3) == page(3), "in the next generation"
    store.clear()
    store.close()
    assert (tmp_path / "precious").read_bytes() == page(7) * 9


def test_a_folder_serves_one_user(tmp_path: Path) -> None:
    was = os.umask(0)
    try:
        store = opened(tmp_path / "t")
        put(store, 0)
        store.close()
    finally:
        os.umask(was)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "t").rglob("*")}
    assert modes == {"kvgraph-1.1": 0o700, "index.sqlite": 0o600, "8192.pages": 0o600,
                     "index.sqlite-journal": 0o600}  # fmt: skip
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o700
    (tmp_path / "t" / "kvgraph-1.1").chmod(0o755)  # as it was made once
    opened(tmp_path / "t").close()
    assert (tmp_path / "t" / "kvgraph-1.1").stat().st_mode & 0o777 == 0o700


def test_links_in_place_of_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name, target in (("linked", "real"), ("dangling", "nowhere")):
        message = rf"{name}: expected a folder, got a link to .*{target}; .*serves one user: give"
        with pytest.raises(StoreError, match=message):
            opened(tmp_path / name)
    (tmp_path / "tier").mkdir()
    (tmp_path / "tier" / "kvgraph-1.1").symlink_to(tmp_path / "real")
    with pytest.raises(
        StoreError, match=r"kvgraph-1.1: expected a folder of this tier, got a link"
    ):
        opened(tmp_path / "tier")
    assert not list((tmp_path / "real").iterdir())
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives folders away")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "kvgraph-1.1").mkdir()
    os.chown(tmp_path / "kvgraph-1.1", 65534, 65534)
    message = r"kvgraph-1.1: expected a folder of user 0, got one of user 65534; .* serves one user"
    with pytest.raises(StoreError, match=message):
        opened(tmp_path)


def test_only_files_of_the_store_are_ever_removed(tmp_path: Path) -> None:
    """Of a damaged generation, of older ones, and of the dead."""
    for number in (1, 2):
        folder = tmp_path / f"kvgraph-1.{number}"
        folder.mkdir()
        for name in ("notes.txt", "notes.owner", "x.pages", "index.sqlite", "4096.pages"):
            (folder / name).write_bytes(b"not a database" * 99)
    (tmp_path / "kvgraph-1.7").write_text("a file")
    store = opened(tmp_path)
    put(store, 0)
    store.close()
    for number in (1, 2):
        left = sorted(os.listdir(tmp_path / f"kvgraph-1.{number}"))
        assert left == ["notes.owner", "notes.txt", "x.pages"]
    assert (tmp_path / "kvgraph-1.7").read_text() == "a file"


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


def test_only_the_folder_that_failed_in_use_is_abandoned(tmp_path: Path) -> None:
    """Not what another process made at its path meanwhile."""
    store = opened(tmp_path / "t")
    put(store, 0)
    store.flush()
    (tmp_path / "t" / "kvgraph-1.1" / "index.sqlite").write_bytes(b"not a database" * 1000)
    assert got(store, 0) is None
    assert store.stats().damaged == 1
    (tmp_path / "t").rename(tmp_path / "old")  # so that its number is not used again
    other = opened(tmp_path / "t")
    put(other, 1)
    other.flush()
    assert got(store, 1) == page(1)
    other.close()
    store.close()
    assert os.listdir(tmp_path / "t") == ["kvgraph-1.1"]


@pytest.mark.parametrize(
    "change",
    [
        "size = -5",
        "size = 1 << 62",
        "size = NULL",
        "size = 9223372036854775807",
        "stride = 1 << 40",
        "stride = 1",
        "slot = -1",
        "used = 9223372036854775807",
        "used = NULL",
        "model = NULL",
        "sum = NULL",
    ],
)
@pytest.mark.parametrize("is_open", [False, True], ids=["closed", "open"])
def test_numbers_out_of_range_are_damage(is_open: bool, change: str, tmp_path: Path) -> None:
    store = opened(tmp_path)
    put(store, *range(5))
    store.flush()
    with sqlite3.connect(tmp_path / "kvgraph-1.1" / "index.sqlite") as db:
        db.execute(f"UPDATE slots SET {change} WHERE slot = 1 AND key IS NOT NULL")
    db.close()
    if not is_open:
        store.close()
        store = opened(tmp_path)
        assert held(store) == [], "in the next generation"
    all_right(store, 5)
    store.touch(KEYS[:5])
    store.close()
    store = opened(tmp_path)
    put(store, 6)
    assert got(store, 6) == page(6)
    store.close()


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n"
FOREIGN = {
    "a trigger": f"CREATE TRIGGER t AFTER UPDATE ON slots BEGIN {ENDLESS} WHERE i < 0; END",
    "a view": f"ALTER TABLE slots RENAME TO others; CREATE VIEW slots AS {ENDLESS}",
    "another table": "DROP TABLE taken; CREATE TABLE taken (nbytes INTEGER, more TEXT)",
    "a check": "DROP TABLE taken; CREATE TABLE taken (nbytes INTEGER CHECK (abs(nbytes) > 0))",
    "an index": "CREATE INDEX more ON slots (abs(slot))",
}


@pytest.mark.parametrize("statements", FOREIGN.values(), ids=FOREIGN)
def test_an_index_of_another_schema_is_damage(
    statements: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(tmp_path)
    put(store, *range(3))
    store.close()
    with closing(sqlite3.connect(tmp_path / "kvgraph-1.1" / "index.sqlite")) as db:
        db.executescript(statements)
    with pytest.raises(StoreError, match="expected a whole index, got a damaged one"):
        describe(tmp_path)
    store = opened(tmp_path)
    assert "kvgraph-1.1: the index is damaged (" in caplog.text
    assert held(store) == [], "in the next generation"
    put(store, 6)
    assert got(store, 6) == page(6)
    store.close()
    assert [model.pages for model in describe(tmp_path)[0]] == [1]
