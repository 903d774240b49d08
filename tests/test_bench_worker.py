"""What the bench's worker makes of a model for a peer, by the peer's own tool."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvgraph.bench import worker
from kvgraph.bench.peers import adapter


def prepare(folder: Path, code: str) -> None:
    """By a tool that runs `code`."""
    wanted = folder, "tool", [sys.executable, "-c", f"import os, sys; {code}"]
    worker.prepare({}, SimpleNamespace(prepare=lambda job: wanted), lambda event, **fields: None)


def test_a_folder_is_made_once(tmp_path: Path) -> None:
    prepare(tmp_path / "model", "os.makedirs(sys.argv[1] + '/weights')")
    prepare(tmp_path / "model", "sys.exit(1)")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "model", "model/weights",
    ]  # fmt: skip


def test_a_folder_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^tool: exit status 1: disk full$"):
        prepare(tmp_path / "model", "os.mkdir(sys.argv[1]); sys.exit('no more:\\ndisk full')")
    assert not list(tmp_path.iterdir())
    (tmp_path / "model.partial").mkdir()  # a user's own
    prepare(tmp_path / "model", "os.mkdir(sys.argv[1])")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.partial"]


@pytest.mark.parametrize(
    ("name", "tool", "last"),
    [
        ("onnxruntime-genai", "onnxruntime_genai builder", "-o"),
        ("openvino", "optimum-cli export", "int4"),
    ],
)
def test_what_peers_have_made(tmp_path: Path, name: str, tool: str, last: str) -> None:
    job = {"folder": str(tmp_path), "model": "checkpoint", "precision": "int4"}
    folder, said, command = adapter(name).prepare(job)
    assert (folder, said) == (tmp_path / f"{name}-int4", tool)
    assert command[command.index("-m" if name == "openvino" else "-i") + 1] == "checkpoint"
    assert command[-1] == last
