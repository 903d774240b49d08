"""Hashes of an artifact are compared once, and again where a file may have changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

import kvgraph
from kvgraph.contract.hashes import FileEntry, verify_files
from kvgraph.errors import ArtifactError
from kvgraph.runtime import intact
from tests.support.artifacts import Compiled
from tests.support.command_line import run

NAME = "weights.safetensors"
CHANGED = "the file was changed"

Hashed = list[Path]
"""Folders whose files were hashed, in order."""


@pytest.fixture
def artifact(tmp_path: Path, compiled: Compiled) -> Path:
    return Path(shutil.copytree(compiled("tiny-llama"), tmp_path / "model.kvg"))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, not made yet. Files are trusted however young they are."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(intact, "SETTLED_SECONDS", 0)
    return folder


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Hashed:
    folders: Hashed = []

    def verify(folder: Path, files: Mapping[str, FileEntry]) -> None:
        folders.append(folder)
        verify_files(folder, files)

    monkeypatch.setattr(intact, "verify_files", verify)
    return folders


def stamps(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def damage(path: Path) -> None:
    """Another byte in the middle; size and modification time stay."""
    before = path.stat()
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_the_second_load_hashes_nothing(artifact: Path, cache: Path, hashed: Hashed) -> None:
    for _ in range(3):
        kvgraph.load(artifact)
    assert len(hashed) == 1
    assert len(stamps(cache)) == 1
    kvgraph.load(artifact, verify=True)
    assert len(hashed) == 2


def test_a_full_check_serves_later_loads(artifact: Path, cache: Path, hashed: Hashed) -> None:
    assert run("verify", artifact).code in (0, None)
    kvgraph.load(artifact)
    assert len(hashed) == 1
    assert run("verify", artifact).code in (0, None)
    assert len(hashed) == 2


def test_one_stamp_for_all_paths_to_a_folder(
    artifact: Path, cache: Path, hashed: Hashed, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = artifact.with_name("link")
    link.symlink_to(artifact)
    monkeypatch.chdir(artifact.parent)
    for path in (artifact, link, Path("model.kvg")):
        kvgraph.load(path)
    assert len(hashed) == 1
    shutil.copytree(artifact, artifact.with_name("copy"))
    kvgraph.load(artifact.with_name("copy"))
    assert len(hashed) == 2


def remove(path: Path) -> None:
    path.unlink()


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


@pytest.mark.parametrize("change", [damage, remove, grow])
@pytest.mark.parametrize("name", [NAME, "tokenizer.json"])
def test_a_changed_file_is_found(
    artifact: Path, cache: Path, change: Callable[[Path], None], name: str
) -> None:
    kvgraph.load(artifact)
    change(artifact / name)
    for _ in range(2):
        with pytest.raises(ArtifactError, match=rf"{name}: "):
            kvgraph.load(artifact)


def replace_by_a_copy(path: Path) -> None:
    copy = Path(shutil.copy2(path, path.with_name("copy")))
    copy.replace(path)


@pytest.mark.parametrize("change", [os.utime, replace_by_a_copy])
def test_equal_bytes_of_another_time_are_hashed_once_more(
    artifact: Path, cache: Path, hashed: Hashed, change: Callable[[Path], object]
) -> None:
    kvgraph.load(artifact)
    change(artifact / NAME)
    for _ in range(3):
        kvgraph.load(artifact)
    assert len(hashed) == 2


@pytest.mark.parametrize("command", ["generate", "chat", "prefill", "verify"])
def test_a_change_that_no_time_shows_is_found_where_it_is_asked_for(
    artifact: Path, cache: Path, tmp_path: Path, command: str
) -> None:
    """As on a disk that decays: the stamp is made after the damage."""
    kvgraph.load(artifact)
    damage(artifact / NAME)
    (stamp,) = stamps(cache)
    files = kvgraph.load(artifact, verify=False).manifest.files
    intact._write(stamp, intact._stamp(artifact, files))
    assert kvgraph.load(artifact).folder == artifact
    text = tmp_path / "text"
    text.write_text("x")
    arguments = {
        "generate": ["x", "--verify"],
        "chat": ["--verify"],
        "prefill": ["--prompt-file", text, "-o", tmp_path / "x.kvp", "--verify"],
        "verify": [],
    }[command]
    outcome = run(command, artifact, *arguments)
    assert outcome.code == 2
    assert CHANGED in outcome.err


def test_a_change_while_the_files_are_hashed(
    artifact: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(folder: Path, files: Mapping[str, FileEntry]) -> None:
        verify_files(folder, files)
        damage(folder / NAME)

    with monkeypatch.context() as patch:
        patch.setattr(intact, "verify_files", verify)
        kvgraph.load(artifact)
    with pytest.raises(ArtifactError, match=CHANGED):
        kvgraph.load(artifact)


def test_the_stamp_of_all_files_serves_a_rank(
    compiled: Compiled, cache: Path, hashed: Hashed, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = compiled("tiny-llama", tp=2)
    kvgraph.load(folder)
    environment = {"RANK": "1", "WORLD_SIZE": "2"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    kvgraph.load(folder).checked()
    assert len(hashed) == 1
    (whole,) = stamps(cache)
    whole.unlink()
    for _ in range(2):
        kvgraph.load(folder).checked()
    assert len(hashed) == 2
    for name in environment:
        monkeypatch.delenv(name)
    kvgraph.load(folder)
    assert len(hashed) == 3, "the stamp of a rank is not one of all files"


def test_files_that_changed_just_now_get_no_stamp(
    artifact: Path, cache: Path, hashed: Hashed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(intact, "SETTLED_SECONDS", 3600)
    kvgraph.load(artifact)
    kvgraph.load(artifact)
    assert (len(hashed), stamps(cache)) == (2, [])


def test_a_stamp_is_of_one_manifest(artifact: Path, cache: Path) -> None:
    manifest = kvgraph.load(artifact).manifest
    entry = manifest.files[NAME]
    other = replace(entry, chunks=["0" * 64] * len(entry.chunks))
    with pytest.raises(ArtifactError, match=CHANGED):
        intact.require_intact(
            artifact, replace(manifest, files=manifest.files | {NAME: other}), again=False
        )


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"files": {}}', None])
def test_a_damaged_stamp_costs_a_check(
    artifact: Path, cache: Path, hashed: Hashed, content: bytes | None
) -> None:
    kvgraph.load(artifact)
    (stamp,) = stamps(cache)
    if content is None:
        stamp.unlink()
        os.mkfifo(stamp)
    else:
        stamp.write_bytes(content)
    kvgraph.load(artifact)
    kvgraph.load(artifact)
    assert len(hashed) == 2


@pytest.mark.parametrize("where", ["a file", "/proc/kvgraph"])
def test_a_cache_folder_that_cannot_be_written(
    artifact: Path,
    cache: Path,
    hashed: Hashed,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    where: str,
) -> None:
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / where))
    kvgraph.load(artifact)
    kvgraph.load(artifact)
    assert len(hashed) == 2


@pytest.mark.parametrize("given", ["", "relative"])
def test_without_a_cache_folder_the_home_has_one(
    artifact: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", given)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    kvgraph.load(artifact)
    assert stamps(tmp_path / "home" / ".cache" / "kvgraph")
    assert not (tmp_path / "relative").exists()


def test_processes_that_load_at_once(artifact: Path, cache: Path, hashed: Hashed) -> None:
    code = (
        "import sys, kvgraph; from kvgraph.runtime import intact; intact.SETTLED_SECONDS = 0\n"
        "for _ in range(5): kvgraph.load(sys.argv[1]); kvgraph.load(sys.argv[1], verify=True)"
    )
    command = [sys.executable, "-c", code, str(artifact)]
    running = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(120) for process in running] == [0, 0]
    assert len(stamps(cache)) == 1
    kvgraph.load(artifact)
    assert hashed == []


@pytest.mark.parametrize("name", ["model.onnx", "weights.safetensors"])
def test_a_pipe_in_place_of_a_file_is_not_waited_for(artifact: Path, name: str) -> None:
    """Not even by an artifact whose files are not hashed."""
    (artifact / name).unlink()
    os.mkfifo(artifact / name)
    with pytest.raises(ArtifactError, match=rf"{name}: expected a file, got a pipe$"):
        kvgraph.load(artifact, verify=False).session()
