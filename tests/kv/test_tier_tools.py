"""`kvgraph cache stat | verify | clear DIR`."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path

import pytest

from kvgraph.kv.tiers.disk import reading
from kvgraph.kv.tiers.disk.index import PRAGMAS
from kvgraph.kv.tiers.disk.store import DiskStore
from tests.support.command_line import run

MODELS = [sha256(name).digest() for name in (b"model", b"other")]
KEYS = [sha256(bytes([i])).digest() for i in range(20)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for model, count in zip(MODELS, (5, 3), strict=True):
        store = DiskStore(tmp_path, 1 << 20, model, 5000)
        for key in KEYS[:count]:
            assert store.write(key, [memoryview(key * 156)])
        store.close()
    (tmp_path / "kvgraph-0.1").mkdir()
    return tmp_path


def test_stat(folder: Path) -> None:
    found = json.loads(run("cache", "stat", folder, "--json").out)
    assert [(m["fingerprint"], m["pages"], m["nbytes"]) for m in found["models"]] == [
        (MODELS[1].hex(), 3, 3 * 4992),
        (MODELS[0].hex(), 5, 5 * 4992),
    ]
    assert found["other_versions"] == ["kvgraph-0.1"]
    text = run("cache", "stat", folder).out
    assert MODELS[0].hex()[:16] in text
    assert "24,960" in text
    assert "of another version of kvgraph: kvgraph-0.1" in text


def test_stat_of_more_pages_than_are_read_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run("cache", "stat", folder, "--json").out
    monkeypatch.setattr(reading, "BATCH_ROWS", 3)
    assert run("cache", "stat", folder, "--json").out == found


def test_stat_changes_nothing(folder: Path) -> None:
    """It also waits for no other process's change."""
    (generation,) = folder.glob("kvgraph-1.*")
    generation.chmod(0o755)
    before = contents(folder)
    with closing(sqlite3.connect(generation / "index.sqlite", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        found = json.loads(run("cache", "stat", folder, "--json").out)
        other.execute("ROLLBACK")
    assert [model["pages"] for model in found["models"]] == [3, 5]
    assert contents(folder) == before


def contents(folder: Path) -> dict[Path, tuple[int, bytes]]:
    """Mode and bytes of everything in the folder."""
    return {
        path: (path.stat().st_mode, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def test_stat_after_a_kill_in_the_middle_of_a_change(folder: Path, tmp_path: Path) -> None:
    (generation,) = folder.glob("kvgraph-1.*")
    with closing(sqlite3.connect(generation / "index.sqlite", isolation_level=None)) as db:
        db.executescript(PRAGMAS + "PRAGMA cache_size=1; BEGIN IMMEDIATE; DELETE FROM slots;")
        db.execute("INSERT INTO taken SELECT 1 FROM (VALUES (1), (2)), (VALUES (1), (2))")
        shutil.copytree(folder, tmp_path / "killed")
    assert (tmp_path / "killed" / generation.name / "index.sqlite-journal").stat().st_size
    found = json.loads(run("cache", "stat", tmp_path / "killed", "--json").out)
    assert [model["pages"] for model in found["models"]] == [3, 5]


def test_stat_of_an_index_that_is_not_made_yet(folder: Path) -> None:
    (index,) = folder.glob("kvgraph-1.*/index.sqlite")
    index.write_bytes(b"")
    assert json.loads(run("cache", "stat", folder, "--json").out)["models"] == []


def test_verify_removes_what_is_damaged(folder: Path) -> None:
    assert run("cache", "verify", folder).code == 0
    (slab,) = folder.glob("kvgraph-1.1/*.pages")
    content = slab.read_bytes()
    at = content.index(KEYS[2] * 2) + 100
    slab.write_bytes(content[:at] + b"?" + content[at + 1 :])
    outcome = run("cache", "verify", folder, "--json")
    assert (outcome.code, json.loads(outcome.out)) == (1, {"checked": 8, "damaged": 1})
    outcome = run("cache", "verify", folder)
    assert (outcome.code, outcome.out) == (0, f"{folder}: 7 pages, 0 damaged and removed\n")


def test_verify_of_files_cut_short(folder: Path) -> None:
    (slab,) = folder.glob("kvgraph-1.1/*.pages")
    slab.write_bytes(b"")
    assert json.loads(run("cache", "verify", folder, "--json").out) == {"checked": 8, "damaged": 8}


def test_clear(folder: Path) -> None:
    assert run("cache", "clear", folder).out == f"{folder}: 8 pages removed\n"
    assert json.loads(run("cache", "stat", folder, "--json").out)["models"] == []
    assert json.loads(run("cache", "clear", folder, "--json").out) == {"removed": 0}
    assert (folder / "kvgraph-0.1").exists()


@pytest.mark.parametrize("verb", ["stat", "verify", "clear"])
def test_bad_folders(verb: str, tmp_path: Path, folder: Path) -> None:
    (tmp_path / "file").touch()
    others = {tmp_path / "none": "nothing there", tmp_path / "file": "a file"}
    for other, got in {**others, folder / "kvgraph-0.1": "one without pages"}.items():
        outcome = run("cache", verb, other)
        assert outcome.code == 2
        assert f"{other}: expected the folder of a disk tier, got {got}" in outcome.err
        assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("damage", ["bytes", "size = -5", "size = 1 << 62", "used = NULL"])
def test_a_damaged_index_is_named_until_it_is_cleared(damage: str, folder: Path) -> None:
    path = folder / "kvgraph-1.1" / "index.sqlite"
    if damage == "bytes":
        path.write_bytes(b"x" * 5000)
    else:
        with sqlite3.connect(path) as db:
            db.execute(f"UPDATE slots SET {damage} WHERE slot = 1")
        db.close()
    for verb in ("stat", "verify"):
        outcome = run("cache", verb, folder)
        assert outcome.code == 2
        assert f"{folder}: expected a whole index, got a damaged one" in outcome.err
        assert "starts again, and so does kvgraph cache clear" in outcome.err
    assert json.loads(run("cache", "clear", folder, "--json").out) == {"removed": 0}
    assert json.loads(run("cache", "stat", folder, "--json").out)["models"] == []
    assert sorted(path.name for path in folder.iterdir()) == ["kvgraph-0.1", "kvgraph-1.2"]


@pytest.mark.parametrize("verb", ["verify", "clear"])
def test_a_folder_that_cannot_be_written_is_named(
    verb: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = os.open

    def read_only(path: str, flags: int, *rest: int, **options: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return found(path, flags, *rest, **options)

    monkeypatch.setattr(os, "open", read_only)
    outcome = run("cache", verb, folder)
    assert outcome.code == 2
    assert (
        f"{folder}: expected a folder that can be read and written, got 'Read-only file system'; "
        "give a copy of it in another place" in outcome.err
    )
