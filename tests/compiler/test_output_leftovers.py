"""The output of a compile, whenever it is killed: what killed and live processes leave."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph.compiler import output
from kvgraph.compiler.output import OWNER, PREFIX, settle_leftovers, staging
from kvgraph.errors import ArtifactError
from kvgraph.rebuild import rebuild
from tests.support.outputs import replace, snapshot, write_artifact


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write_artifact(tmp_path / "out", **{"model.onnx": "old", "kernels/sm_90/a.cubin": "old"})
    return tmp_path / "out"


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
    (tmp_path / f"{PREFIX}empty").mkdir()
    (tmp_path / f"{PREFIX}empty-and-old").mkdir()
    os.utime(tmp_path / f"{PREFIX}empty-and-old", (0, 0))
    for folder in others:
        os.utime(folder, (0, 0))
    (tmp_path / f"{PREFIX}linked").symlink_to(others[0])
    before = set(os.listdir(tmp_path))
    with (live / OWNER).open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        replace(tmp_path / "out", new="new")
    assert before - set(os.listdir(tmp_path)) == {
        *(folder.name for folder in dead),
        f"{PREFIX}empty-and-old",
    }
    assert set(snapshot(tmp_path / "out")) == {"manifest.json", "new"}


@pytest.mark.parametrize("is_made", [False, True])
def test_a_replaced_artifact_does_not_come_back(tmp_path: Path, is_made: bool) -> None:
    """An old artifact goes back only where the new one was not yet at its place."""
    folder = leave(tmp_path, "dead", OURS)
    write_artifact(folder / "replaced", old="old")
    if not is_made:
        shutil.rmtree(folder / "made")
    settle_leftovers(tmp_path / "other")
    assert sorted(os.listdir(tmp_path)) == (["out"] if is_made else [])


def test_leftovers_are_settled_before_anything_is_computed(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    write_artifact(leave(tmp_path, "dead", OURS) / "replaced", old="old")
    stages: list[str] = []
    with pytest.raises(ArtifactError, match="expected no such folder yet, got one"):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out", progress=stages.append)
    assert not stages
    assert os.listdir(tmp_path) == ["out"]
    write_artifact(leave(tmp_path, "dead", OURS.replace('"out"', '"x"')) / "replaced", old="old")
    with pytest.raises(ArtifactError, match="schema_version: expected int"):
        rebuild(tmp_path / "x", tmp_path / "x", force=True)


@pytest.mark.parametrize("exchanges", [True, False])
def test_the_new_artifact_is_on_the_medium_before_the_old_one_goes(
    out: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    calls: list[str] = []
    fsync, exchange, remove = os.fsync, output._exchange, output._remove_listed

    def synced(file: int) -> None:
        calls.append(Path(os.readlink(f"/proc/self/fd/{file}")).name)
        fsync(file)

    def exchanged(one: Path, other: Path) -> bool:
        calls.append("exchange")
        return exchanges and exchange(one, other)

    def removed(folder: Path) -> None:
        calls.append("remove")
        remove(folder)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(output, "_exchange", exchanged)
    monkeypatch.setattr(output, "_remove_listed", removed)
    replace(out, **{"new": "new", "kernels/a": "new"})
    assert calls[-3:] == ["exchange", out.parent.name, "remove"]
    assert {"made", "manifest.json", "new", "kernels", "a"} <= {*calls[:-3]}
    calls.clear()
    with staging(out.parent / "fresh", force=False) as made:
        write_artifact(made, new="new")
    assert not calls, "nothing to lose"


@pytest.mark.parametrize("number", [errno.EIO, errno.EINVAL])
def test_a_medium_that_does_not_answer(
    out: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The old artifact is kept; a file system that cannot do it is no error."""
    before = snapshot(out)

    def fail(file: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    if number == errno.EINVAL:
        replace(out, new="new")
        assert set(snapshot(out)) == {"manifest.json", "new"}
        return
    with pytest.raises(ArtifactError, match="out: expected to write all of it, got 'Input/output"):
        replace(out, new="new")
    assert snapshot(out) == before
    assert os.listdir(out.parent) == ["out"]


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.support.outputs import replace
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
        if (folder / "out").exists():
            cleared = Path(shutil.copytree(folder, f"{folder}-cleared"))
            shutil.rmtree(cleared / "out")
            settle_leftovers(cleared / "out")
            assert not (cleared / "out").exists(), i
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


def test_a_compile_that_fails_leaves_no_parents(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for parents in ("new/a", "empty/a"):
        out = tmp_path / parents / "out"
        with pytest.raises(FileNotFoundError), staging(out, force=False) as made:
            (made / "absent").read_bytes()
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "empty"]
