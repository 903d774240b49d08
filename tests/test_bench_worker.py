"""What the bench's worker makes of a model for a peer, by the peer's own tool."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvgraph.bench import worker
from kvgraph.bench.peers import adapter


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def peers(tmp_path: Path) -> Path:
    """The folder of --peer-models."""
    folder = tmp_path / "peers"
    folder.mkdir()
    return folder


def prepare(folder: Path, model: Path, code: str) -> None:
    """By a tool that runs `code`."""
    wanted = folder, "tool", [sys.executable, "-c", f"import os, sys; {code}"]
    partial = folder.parent.with_name("partial")
    partial.mkdir(exist_ok=True)
    job = {"model": str(model), "partial": str(partial)}
    worker.prepare(job, SimpleNamespace(prepare=lambda job: wanted), lambda event, **fields: None)


def test_a_folder_is_made_once(peers: Path, model: Path) -> None:
    prepare(peers / "model", model, "os.makedirs(sys.argv[1] + '/weights')")
    (model / "README.md").write_text("new")
    prepare(peers / "model", model, "sys.exit(1)")
    assert sorted(path.relative_to(peers).as_posix() for path in peers.rglob("*")) == [
        "model", "model/kvgraph-bench-source", "model/weights",
    ]  # fmt: skip


def test_a_folder_is_made_whole_or_not_at_all(peers: Path, model: Path) -> None:
    with pytest.raises(RuntimeError, match=r"^tool: exit status 1: disk full$"):
        prepare(peers / "model", model, "os.mkdir(sys.argv[1]); sys.exit('no more:\\ndisk full')")
    assert not list(peers.iterdir())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: (model / "config.json").write_text('{"hidden_size": 1}'),
        lambda model: (model / "model.safetensors").write_bytes(b"others, longer"),
        lambda model: os.utime(model / "model.safetensors", (1, 1)),
        lambda model: (model / "model-2.safetensors").write_bytes(b""),
    ],
    ids=["config", "size", "time", "name"],
)
def test_a_folder_of_another_model_is_refused(peers: Path, model: Path, change: object) -> None:
    prepare(peers / "model", model, "os.mkdir(sys.argv[1])")
    assert callable(change)
    change(model)
    with pytest.raises(ValueError, match="got one of another model or of other weights; remove it"):
        prepare(peers / "model", model, "sys.exit(1)")


def test_a_folder_that_does_not_say_its_model_is_refused(peers: Path, model: Path) -> None:
    (peers / "model").mkdir()
    expected = (
        rf"^{peers}/model: expected a conversion of the checkpoint of --model, got one without a "
        r"file kvgraph-bench-source; remove it to convert again, or give another --peer-models$"
    )
    with pytest.raises(ValueError, match=expected):
        prepare(peers / "model", model, "sys.exit(1)")


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
