"""What a user's shell sees of a refusal, and a caller of its errors."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from kvgraph.errors import (
    ArtifactError,
    BindingError,
    KVGraphError,
    ModelError,
    ParamsError,
    UnsupportedError,
)
from tests.bad_input.damage import NORM, sentence
from tests.support.command_line import COMMAND, Outcome, run

# -- the shape of it, from outside


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "{here}/[bold]:cat:", "-o", "{here}/x"], "expected a model folder, got"),
        (["verify", "{here}/[bold]:cat:"], "expected an artifact folder, got nothing there"),
    ],
)
def test_a_process_exits_with_2_and_one_sentence(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    """Paths are printed as they are, whatever markup they look like."""
    command = [*COMMAND, *(argument.format(here=tmp_path) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    text = sentence(Outcome(done.returncode, done.stdout, done.stderr))
    assert text.startswith(f"{tmp_path}/[bold]:cat:: {message}")
    assert not list(tmp_path.iterdir())


def test_a_file_is_no_artifact_folder(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("x")
    said = sentence(run("inspect", tmp_path / "model.onnx"))
    assert said.endswith("model.onnx: expected an artifact folder, got a file")


def test_the_libraries_stay_silent(tmp_path: Path, model: Path) -> None:
    """transformers reports missing weights on its own; only our sentence comes out."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    command = [*COMMAND, "compile", str(model), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert NORM in sentence(Outcome(done.returncode, done.stdout, done.stderr))
    assert os.listdir(tmp_path) == ["model"]


def test_errors_are_value_errors_too() -> None:
    """So that a caller that knows nothing of kvgraph can catch them."""
    for error in (ModelError, UnsupportedError, ArtifactError, BindingError, ParamsError):
        assert issubclass(error, KVGraphError)
        assert issubclass(error, ValueError)
