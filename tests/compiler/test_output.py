"""The output of a compile: nothing that is not ours is lost, whenever it is killed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.compiler import output
from kvgraph.compiler.output import OWNER, PREFIX, require_free, staging
from kvgraph.contract.plain import to_json
from kvgraph.errors import ArtifactError

Compiled = Callable[..., Path]


def write_artifact(folder: Path, **content: str) -> None:
    """Files under a manifest that lists them, of no schema in particular."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in content.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    files = {name: {"size": len(text)} for name, text in content.items()}
    fields: dict[str, Any] = {"files": files, "nondeterministic_files": []}
    fields["sha256"] = hashlib.sha256(to_json(fields)).hexdigest()
    (folder / "manifest.json").write_bytes(to_json(fields))


def snapshot(folder: Path) -> dict[str, str | None]:
    """Every path under `folder`, hidden ones too, with its text."""
    paths = sorted(folder.rglob("*"))
    return {str(p.relative_to(folder)): p.read_text() if p.is_file() else None for p in paths}


def replace(out: Path, **content: str) -> None:
    with staging(out, force=True) as made:
        write_artifact(made, **content)


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


def test_a_write_that_names_no_file_names_the_output(tmp_path: Path) -> None:
    error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    message = "out: expected to write all of it, got 'File too large'"
    with pytest.raises(ArtifactError, match=message), staging(tmp_path / "out", force=False):
        raise error
    assert not list(tmp_path.iterdir())


@contextmanager
def another_user(folder: Path) -> Iterator[None]:
    """Run as one who may look at `folder` and its parents."""
    was = os.geteuid()
    if was == 0:  # root may write anywhere
        for parent in folder.parents:
            if not parent.stat().st_mode & 0o001:
                parent.chmod(parent.stat().st_mode | 0o011)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_parent_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with (
        another_user(tmp_path / "closed"),
        pytest.raises(ArtifactError, match=r"expected a folder that can be written, got .*closed"),
    ):
        require_free(tmp_path / "closed" / "deep" / "out", force=True)


def test_a_mount_point_is_no_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "is_mount", lambda self: True)
    with pytest.raises(ArtifactError, match="expected a folder that can be moved, got a mount"):
        require_free(tmp_path, force=True)


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


# -- what killed and live processes leave


def leave(parent: Path, name: str, owner: str | None = None) -> Path:
    """A staging folder with half an artifact, and whose it is said to be."""
    folder = parent / f"{PREFIX}{name}"
    write_artifact(folder / "made", half="half")
    if owner is not None:
        (folder / OWNER).write_text(owner)
    return folder


OURS = json.dumps({"kvgraph": "staging", "output": "out"})


def test_only_leftovers_of_the_dead_are_removed(tmp_path: Path) -> None:
    dead = [
        leave(tmp_path, "dead", OURS),
        leave(tmp_path, "of-another", OURS.replace('"out"', '"x"')),
    ]
    live = leave(tmp_path, "live", OURS)
    others = [
        leave(tmp_path, "unmarked"),
        leave(tmp_path, "empty-marker", ""),
        leave(tmp_path, "other-marker", '{"kvgraph": "something", "output": "out"}'),
        leave(tmp_path, "no-output", '{"kvgraph": "staging"}'),
    ]
    os.mkfifo(leave(tmp_path, "pipe") / OWNER)
    (leave(tmp_path, "link") / OWNER).symlink_to(dead[0] / OWNER)
    (tmp_path / f"{PREFIX}file").write_text("mine")
    (tmp_path / ".out.123.word").mkdir()  # as staging was named once
    (tmp_path / f"{PREFIX}linked").symlink_to(others[0])
    before = set(os.listdir(tmp_path))
    with (live / OWNER).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        replace(tmp_path / "out", new="new")
    assert before - set(os.listdir(tmp_path)) == {folder.name for folder in dead}
    assert set(snapshot(tmp_path / "out")) == {"manifest.json", "new"}


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.compiler.test_output import replace
from kvgraph.compiler import output

out, exchanges = Path(sys.argv[1]), sys.argv[2] == "True"
if not exchanges:
    output._exchange = lambda one, other: False

def run(limit):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename == output.__file__ and event in ("line", "return"):
            count += 1
            if count == limit:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace
    sys.settrace(trace)
    replace(out, new="new", second="new")
    os._exit(0)

import shutil
for limit in range(1, 10_000):
    shutil.copytree(out, f"{out}-{limit}/out")
    pid = os.fork()
    if not pid:
        out = Path(f"{out}-{limit}/out")
        run(limit)
    if os.waitpid(pid, 0)[1] == 0:
        break
print(limit)
"""


@pytest.mark.parametrize("exchanges", [True, False])
def test_killed_at_any_line_the_old_artifact_or_the_new_one_is_left(
    out: Path, exchanges: bool
) -> None:
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(out), str(exchanges)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    limit = int(done.stdout)
    assert limit > 100
    old, seen = snapshot(out), []
    for i in range(1, limit + 1):
        folder = Path(f"{out}-{i}")
        if exchanges:
            assert (folder / "out").exists(), "at every moment"
        with staging(folder / "other", force=False):
            pass
        left = snapshot(folder / "out")
        assert left == old or set(left) == {"manifest.json", "new", "second"}
        seen.append(left == old)
        hidden = set(os.listdir(folder)) - {"other", "out"}
        unmarked = [path for name in hidden for path in (folder / name).iterdir()]
        assert not any(path.name != OWNER or path.read_text() for path in unmarked), i
    assert seen == sorted(seen, reverse=True)
    assert {*seen} == {True, False}
