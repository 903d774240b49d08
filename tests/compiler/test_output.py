"""The output of a compile: nothing that is not ours is lost."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvgraph
from kvgraph.compiler import output
from kvgraph.compiler.output import OWNER, PREFIX, require_free, staging
from kvgraph.contract.plain import to_json
from kvgraph.errors import ArtifactError, UnsupportedError
from tests.support.command_line import run
from tests.support.outputs import another_user, replace, snapshot, write_artifact

Compiled = Callable[..., Path]


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "out", **{"model.onnx": "old", "kernels/sm_90/a.cubin": "old"})
    return tmp_path / "out"


# -- what may be replaced


@pytest.mark.parametrize("exchanges", [True, False])
def test_force_replaces_an_artifact_and_an_empty_folder(
    out: Path, exchanges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not exchanges:
        monkeypatch.setattr(output, "_exchange", lambda one, other: False)
    (out.parent / "empty").mkdir()
    for folder in (out, out.parent / "empty"):
        replace(folder, **{"model.pt2": "new"})
        assert set(snapshot(folder)) == {"manifest.json", "model.pt2"}
    assert sorted(os.listdir(out.parent)) == ["empty", "out"]


def test_an_artifact_with_its_build_log_is_replaced(compiled: Compiled, tmp_path: Path) -> None:
    """The log is in no list of hashed files."""
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    whole = compiled("tiny-llama", "torch", target="cuda:sm_90")
    out = Path(shutil.copytree(whole, tmp_path / "out"))
    assert (out / "build.json").exists()
    (out / ".kvgraph-0123456789abcdef.partial").touch()  # of a manifest that a kill left
    assert require_free(out, force=True) >= {"build.json", "kernels/sm_90/kernels.json"}
    replace(out, **{"model.pt2": "new"})
    assert set(snapshot(out)) == {"manifest.json", "model.pt2"}


OTHERS: dict[str, Callable[[Path], Any]] = {
    "notes.txt": lambda out: (out / "notes.txt").write_text("mine"),
    "kernels/sm_90/b.cubin": lambda out: (out / "kernels/sm_90/b.cubin").write_text("mine"),
    "build.json": lambda out: (out / "build.json").write_text("mine"),
    "results/": lambda out: (out / "results").mkdir(),
    "linked/": lambda out: (out / "linked").symlink_to(out.parent),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_a_user_put_into_an_artifact_is_kept(out: Path, name: str) -> None:
    OTHERS[name](out)
    before = snapshot(out.parent)
    message = rf"out: expected only files of its artifact to replace, got 1 more \(kept\): {name};"
    with pytest.raises(ArtifactError, match=message):
        require_free(out, force=True)
    with pytest.raises(ArtifactError, match=message):
        replace(out, new="new")
    assert snapshot(out.parent) == before


def test_many_of_them_are_counted(out: Path) -> None:
    for i in range(5):
        (out / f"{i}.txt").touch()
    with pytest.raises(ArtifactError, match=r"got 5 more \(kept\): 0.txt, 1.txt, 2.txt, ...;"):
        require_free(out, force=True)


WEB_APP = json.dumps({"name": "app", "manifest_version": 3})
OUTSIDE: dict[str, Any] = {"files": {"../notes.txt": {}}, "nondeterministic_files": []}
OUTSIDE["sha256"] = hashlib.sha256(to_json(OUTSIDE)).hexdigest()


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (WEB_APP, "sha256: expected"),
        ("[1]", "got a damaged one"),
        ("{", "got a damaged one"),
        ("", "got a damaged one"),
        ('{"sha256": 1}', "sha256: expected"),
        (json.dumps(OUTSIDE), "expected files inside the folder, got '../notes.txt'"),
    ],
)
def test_a_folder_with_another_manifest_is_kept(tmp_path: Path, manifest: str, why: str) -> None:
    out = tmp_path / "app"
    out.mkdir()
    (out / "manifest.json").write_text(manifest)
    (tmp_path / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    message = (
        rf"app: expected an artifact or an empty folder .* is of no artifact \(kept\): .*{why}"
    )
    with pytest.raises(ArtifactError, match=message):
        replace(out, new="new")
    assert snapshot(tmp_path) == before


def test_a_file_that_comes_while_the_artifact_is_replaced_is_kept(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exchange = output._exchange

    def late(one: Path, other: Path) -> bool:
        (other / "late.txt").write_text("mine")
        return exchange(one, other)

    monkeypatch.setattr(output, "_exchange", late)
    with pytest.warns(UserWarning, match="while it was replaced are kept there"):
        replace(out, new="new")
    (kept,) = out.parent.glob(f"{PREFIX}*/replaced/late.txt")
    assert kept.read_text() == "mine"
    assert set(snapshot(out)) == {"manifest.json", "new"}


# -- decided before anything is computed


def test_an_output_that_cannot_be_made(out: Path, tmp_path: Path) -> None:
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "linked").symlink_to(out)
    (tmp_path / "file").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    before = sorted(os.listdir(tmp_path))
    for name, message in {
        "dangling": r"expected a folder, got a link to .*nowhere; give that folder",
        "linked": r"expected a folder, got a link to .*out; give that folder",
        "file/x": r"expected a folder at .*file to make it in, got a file",
        "file/x/y": r"expected a folder at .*file to make it in, got a file",
        "pipe/x": r"expected a folder at .*pipe to make it in, got a pipe",
        "dangling/x": r"expected a folder at .*dangling to make it in, got a link that leads",
        "pipe": r"expected an artifact or an empty folder to replace, got something else",
        "n" * 300: r"expected a path to make, got 'File name too long'",
        "new\0": r"expected a path to make",
        "none/../new": r"/none/\.\./new: expected a folder at .*/none before '\.\.', got none$",
        "none/a/../../new": r"expected a folder at .*/none/a before '\.\.', got none$",
        "file/../new": r"expected a folder at .*/file before '\.\.', got a file$",
    }.items():
        with pytest.raises(ArtifactError, match=message):
            require_free(tmp_path / name, force=True)
    assert sorted(os.listdir(tmp_path)) == before
    for name in ("new", "new/deep", "linked/new", "out/../new"):
        assert require_free(tmp_path / name, force=False) == frozenset()


def test_a_path_that_is_not_utf_8(
    tmp_path: Path, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a\udcff"
    folder.mkdir()
    message = r"expected a path in UTF-8 for libraries that write there, got b'.*a\\xff/out'"
    with pytest.raises(ArtifactError, match=message):
        kvgraph.compile(model_folder("tiny-llama"), folder / "out")
    monkeypatch.chdir(folder)
    with pytest.raises(ArtifactError, match=message):
        require_free(Path("out"), force=False)
    assert not list(folder.iterdir())


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(
        ArtifactError, match=r"^out: expected a working folder .*, got one that was"
    ):
        require_free(Path("out"), force=False)
    assert require_free(tmp_path / "out", force=False) == frozenset()


@pytest.mark.parametrize(("files"), [(), ("source", None, "copy")])
def test_a_disk_that_is_full_names_the_output(tmp_path: Path, files: tuple[Any, ...]) -> None:
    """Also where a copy fails, whose error names its source first."""
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG), *files)
    message = "out: expected to write all of it, got 'File too large'"
    with pytest.raises(ArtifactError, match=message), staging(tmp_path / "out", force=False):
        raise error
    assert not list(tmp_path.iterdir())


def test_an_error_names_the_output_and_not_the_hidden_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError) as raised, staging(tmp_path / "out", force=False) as made:
        raise UnsupportedError(f"{made / 'model.onnx'}: refused")
    assert str(raised.value) == f"{tmp_path / 'out' / 'model.onnx'}: refused"


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with (
        another_user(tmp_path / "closed"),
        pytest.raises(ArtifactError, match=r"expected a folder that can be written, got .*closed"),
    ):
        require_free(tmp_path / "closed" / "deep" / "out", force=True)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's /proc")
def test_a_parent_that_takes_no_folder() -> None:
    """It may be one that permissions allow; nothing is computed before that is known."""
    message = r"^/proc/kvgraph/x: expected a folder that can be written, got /proc"
    with pytest.raises(ArtifactError, match=message):
        require_free(Path("/proc/kvgraph/x"), force=False)
    with pytest.raises(ArtifactError, match=r"^/proc/x: expected a folder at /proc to make it in"):
        staging(Path("/proc/x"), force=False).__enter__()


def test_a_full_disk_at_the_end_refuses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artifact is whole then, and is only moved."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with staging(tmp_path / "out", force=False) as made:
        (made / "a").write_text("made")
        monkeypatch.setattr(output.tempfile, "mkdtemp", mock.Mock(side_effect=full))
    assert (tmp_path / "out/a").read_text() == "made"


def test_a_mount_point_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os.path, "ismount", lambda path: True)
    with pytest.raises(ArtifactError, match="expected a folder that can be replaced, got a mount"):
        require_free(tmp_path, force=True)


@pytest.mark.parametrize("name", [".", "../out", "./."])
def test_a_working_folder_is_no_mount_point(
    name: str, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(out)
    assert require_free(Path(name), force=True) == require_free(out, force=True)


def test_a_folder_that_cannot_be_moved_is_no_output(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one in a lower layer of overlayfs; nothing is computed before that is known."""
    before, rename = snapshot(out), os.rename

    def refuse(path: Path, to: Path) -> None:
        if path == out:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(path), None, str(to))
        rename(path, to)

    monkeypatch.setattr(os, "rename", refuse)
    message = r"out: expected a folder that can be replaced, got one that the file system cannot m"
    with pytest.raises(ArtifactError, match=message), staging(out, force=True):
        pytest.fail("it was computed")
    assert snapshot(out) == before
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize(
    ("mode", "got"), [(0o000, "one that cannot be written"), (0o333, "one that cannot be read")]
)
def test_a_folder_that_cannot_be_opened_is_no_output(out: Path, mode: int, got: str) -> None:
    out.parent.chmod(0o777)
    out.chmod(mode)
    message = re.escape(f"{out}: expected a folder that can be replaced, got {got} (kept)")
    with another_user(out), pytest.raises(ArtifactError, match=message):
        require_free(out, force=True)
    out.chmod(0o755)


def test_the_command_says_so_in_the_same_words(
    out: Path, model_folder: Callable[[str], Path]
) -> None:
    """Not in those of its library for options."""
    with mock.patch.object(os, "access", lambda path, wanted, **_: Path(path) != out):
        said = run("compile", model_folder("tiny-llama"), "-o", out, "--force")
    message = "expected a folder that can be replaced, got one that cannot be written (kept)"
    assert (said.code, said.err) == (2, f"kvgraph: {out}: {message}\n")


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o077])
def test_permissions_follow_the_umask(tmp_path: Path, mask: int) -> None:
    was = os.umask(mask)
    try:
        with staging(tmp_path / "out", force=False) as made:
            write_artifact(made, **{"a": "", "kernels/b": ""})
            (made / "a").chmod(0o600)  # as libraries write files
            (made / "kernels/b").chmod(0o644)
    finally:
        os.umask(was)
    for path in [tmp_path / "out", *(tmp_path / "out").rglob("*")]:
        wanted = (0o777 if path.is_dir() else 0o666) & ~mask
        assert path.stat().st_mode & 0o777 == wanted, path


def test_a_file_system_that_refuses_chmod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that have the right permissions already need none."""
    refused = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(Path, "chmod", mock.Mock(side_effect=refused))
    with staging(tmp_path / "out", force=False) as made:
        (made / "a").write_text("made")
    assert (tmp_path / "out/a").read_text() == "made"


def test_no_room_for_the_first_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "write", mock.Mock(side_effect=full))
    with pytest.raises(
        ArtifactError, match=r"out: expected to write all of it, got 'No space left"
    ):
        staging(tmp_path / "out", force=False).__enter__()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", [OWNER, "made"])
def test_no_room_for_the_hidden_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    function = "open" if name == OWNER else "mkdir"
    call = getattr(os, function)

    def fail(path: Path, *given: Any, **others: Any) -> Any:
        if Path(path).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return call(path, *given, **others)

    monkeypatch.setattr(os, function, fail)
    with pytest.raises(ArtifactError, match=r"/out: expected to write all of it, got 'No space"):
        staging(tmp_path / "out", force=False).__enter__()
    assert list(tmp_path.iterdir()) == []
