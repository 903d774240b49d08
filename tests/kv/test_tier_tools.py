"""`kvgraph cache stat | verify | clear DIR`."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import pytest

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
    for other in (tmp_path / "none", folder / "kvgraph-0.1"):
        outcome = run("cache", verb, other)
        assert outcome.code == 2
        assert f"{other}: expected the folder of a disk tier, got one without" in outcome.err
        assert not (tmp_path / "none").exists()
    (folder / "kvgraph-1.1" / "index.sqlite").write_bytes(b"x" * 5000)
    outcome = run("cache", verb, folder)
    assert outcome.code == 2
    assert "expected a whole index, got a damaged one" in outcome.err
