"""Temporary folders, and what killed processes leave of them."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from kvgraph.contract import leftovers
from kvgraph.contract.leftovers import OWNER, making, owned, scratch
from kvgraph.errors import ArtifactError

KILLED = """
import os, signal
from kvgraph.contract.leftovers import scratch
with scratch("test") as folder:
    (folder / "file").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def test_a_folder_is_removed_at_the_end(temporary: Path) -> None:
    with scratch("test") as folder:
        (folder / "file").write_text("made")
        assert folder.is_relative_to(temporary)
    with pytest.raises(ZeroDivisionError), scratch("test") as folder:
        raise ZeroDivisionError
    assert list(temporary.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_one(temporary: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    (dead,) = temporary.iterdir()
    with scratch("other"):
        assert dead.exists()
    with scratch("test"):
        assert not dead.exists()


def test_what_is_in_use_or_of_others_stays(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, owner in (("mark", '{"kvgraph": "staging"}'), ("json", "[1"), ("user", "")):
        (temporary / f"kvgraph-test.{name}").mkdir()
        (temporary / f"kvgraph-test.{name}" / OWNER).write_text(owner)
    (temporary / "kvgraph-test.unmarked").mkdir()
    (temporary / "kvgraph-test.file").touch()
    (temporary / "kvgraph-test.link").symlink_to(temporary / "kvgraph-test.json")
    with scratch("test") as live:
        before = set(temporary.iterdir())
        with scratch("test"):
            assert before < set(temporary.iterdir())
        assert live.exists()
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    left = set(temporary.iterdir())
    monkeypatch.setattr(leftovers.os, "geteuid", lambda: -1)
    with scratch("test"):
        assert left < set(temporary.iterdir())


def test_what_cannot_be_removed_now_can_be_later(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As without a file descriptor that is free."""
    with monkeypatch.context() as patch, scratch("test") as folder:
        patch.setattr(leftovers.shutil, "rmtree", mock.Mock())
    assert folder.exists()
    with scratch("test"):
        assert not folder.parent.exists()


def test_a_file_system_without_locks(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = OSError(errno.ENOLCK, "No locks available")
    monkeypatch.setattr(leftovers.fcntl, "flock", mock.Mock(side_effect=refused))
    with scratch("test") as live, scratch("test"):
        assert live.exists()
    assert list(temporary.iterdir()) == []


def old(folder: Path) -> Path:
    """A folder that nothing has changed for longer than an hour."""
    os.utime(folder, (0, 0))
    return folder


def test_a_folder_whose_owner_cannot_be_made_is_removed(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a full disk."""
    full = OSError(errno.ENOSPC, "No space left on device")
    (temporary / "new").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(leftovers.os, "open", mock.Mock(side_effect=full))
        patch.setattr(leftovers.shutil, "rmtree", mock.Mock())  # which opens folders
        with pytest.raises(OSError, match="No space left"):
            owned(temporary / "new", {}).__enter__()
    assert list(temporary.iterdir()) == []


def test_what_is_empty_and_old_is_removed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process was killed as it made or removed its folder."""
    for name in ("empty", "new", "begun", "locked", "others"):
        (temporary / f"kvgraph-test.{name}").mkdir()
    for name in ("begun", "locked"):
        (temporary / f"kvgraph-test.{name}" / OWNER).touch()
    (temporary / "kvgraph-test.others" / "file").touch()
    (temporary / "kvgraph-test.link").symlink_to(temporary / "kvgraph-test.new")
    for name in ("empty", "begun", "locked", "others"):
        old(temporary / f"kvgraph-test.{name}")
    before = {path.name.rpartition(".")[2] for path in temporary.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(leftovers.os, "geteuid", lambda: -1)
        with scratch("test"):
            pass
    assert {path.name.rpartition(".")[2] for path in temporary.iterdir()} == before
    with (temporary / "kvgraph-test.locked" / OWNER).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with scratch("test"):
            pass
    left = {path.name.rpartition(".")[2] for path in temporary.iterdir()}
    assert before - left == {"empty", "begun"}


def test_no_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "gettempdir", mock.Mock(side_effect=none))
    with pytest.raises(ArtifactError, match=r"^TMPDIR: .* got .*\['/tmp'\]\"; set TMPDIR to one$"):
        scratch("test").__enter__()


@pytest.mark.parametrize("there", [(), ("new",), ("new/a",), ("new/a/b",)])
def test_folders_that_were_made_are_removed_after_an_error(
    there: tuple[str, ...], tmp_path: Path
) -> None:
    for name in there:
        (tmp_path / name).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt), making(tmp_path / "new" / "a" / "b"):
        raise KeyboardInterrupt
    assert sorted(tmp_path.rglob("*")) == before


def test_folders_that_others_use_meanwhile_are_kept(tmp_path: Path) -> None:
    new = tmp_path / "new"
    with pytest.raises(FileExistsError), making(new / "a"):
        [(new / "file").touch(exist_ok=False) for _ in range(2)]
    assert sorted(tmp_path.rglob("*")) == [new, new / "file"]


def test_folders_of_a_scope_that_ends_well_are_kept(tmp_path: Path) -> None:
    with making(tmp_path / "new" / "a"):
        assert (tmp_path / "new" / "a").is_dir()
    assert (tmp_path / "new" / "a").is_dir()


def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), making(tmp_path / "new" / ".." / "file" / "a"):
        pass
    with pytest.raises(FileExistsError), making(tmp_path / "file"):
        pass
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
