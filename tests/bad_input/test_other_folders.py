"""Folders that hold no checkpoint: the sentence names what they hold, and what to give instead."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import kvgraph
from kvgraph.compiler.frontends import found_instead
from kvgraph.errors import ArtifactError
from kvgraph.runtime.prefix_file import read_prefix
from tests.bad_input.damage import refused, sentence
from tests.support.command_line import run

OWN = "weights in the layout of the authors' own code; give the checkpoint in transformers' layout"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            ["mmproj-F16.gguf", "m-Q8_0.gguf", "imatrix.gguf", "x.imatrix.gguf"],
            "the GGUF file m-Q8_0.gguf; give that file",
        ),
        (
            [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)],
            "the GGUF file m-00001-of-00003.gguf; give that file",
        ),
        (
            [f"m-Q{bits}.gguf" for bits in (2, 3, 4, 5, 6, 8)],
            "6 GGUF files, m-Q2.gguf, m-Q3.gguf, m-Q4.gguf, m-Q5.gguf and 2 more; give one of them",
        ),
        (
            ["M-MMPROJ.gguf"],
            "M-MMPROJ.gguf and no file of a whole model; give the model's GGUF file",
        ),
        (
            ["params.json", "consolidated.safetensors"],
            f"consolidated.safetensors, {OWN}, in safete",
        ),
        (["original/consolidated.00.pth"], f"original/consolidated.00.pth, {OWN}, in safetensors"),
        (["inner/config.json"], "a folder above it; give {folder}/inner"),
        (
            ["a/config.json", "b/config.json", "c/x.gguf"],
            "a folder above it; give one of {folder}/a, {folder}/b",
        ),
        (["Q4/x.gguf", "Q4/mmproj.gguf"], "a folder above it; give {folder}/Q4/x.gguf"),
        (["snapshots/0/x.gguf"], "the Hub's cache of it; give {folder}/snapshots/0/x.gguf"),
        (
            ["snapshots/0/config.json", "snapshots/1/config.json"],
            "the Hub's cache of it; give one of {folder}/snapshots/0, {folder}/snapshots/1",
        ),
        (["model_index.json", "text_encoder/config.json"], "a diffusion pipeline"),
        (["a/b/config.json"], "none"),
    ],
)
def test_what_a_folder_holds(names: list[str], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"")
    text = refused(folder, tmp_path)
    assert sentence(run("plan", folder, "--memory", "1GiB")) == text
    expected = f"{folder}: expected config.json in a model folder, got {said.format(folder=folder)}"
    assert text.startswith(expected)


def test_a_large_folder_is_not_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(found_instead, "MOST_ENTRIES", 3)
    for i in range(9):
        (tmp_path / f"{i}").mkdir()
        (tmp_path / f"{i}" / "config.json").write_bytes(b"")
    said = found_instead.instead_of_a_model(tmp_path)
    assert said.startswith("a folder above it; give one of ")
    assert said.count(str(tmp_path)) == 3


def test_a_link_to_a_model_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to("nowhere")
    assert refused(tmp_path / "model", tmp_path) == (
        f"{tmp_path}/model: expected the file, got a link to nowhere, which is gone; download it "
        "again"
    )


def test_a_pipe_in_place_of_a_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model")
    said = refused(tmp_path / "model", tmp_path)
    assert said == f"{tmp_path}/model: expected a model folder, got a pipe"


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (("compile", "model", "-o", ""), "--output"),
        (("compile", "", "-o", "out"), "model"),
        (("compile", "--from-artifact", "", "-o", "out"), "--from-artifact"),
        (("compile", "model", "-o", "out", "--dump-passes", ""), "--dump-passes"),
        (("plan", "", "--memory", "1GiB"), "model"),
        (("inspect", ""), "artifact"),
        (("generate", "", "The"), "artifact"),
        (("bench", "model", ""), "artifacts"),
        (("bench", "model", "--model", ""), "--model"),
        (("bench", "model", "--peer-models", ""), "--peer-models"),
        (("bench", "model", "--save", ""), "--save"),
        (("bench", "model", "--plot", ""), "--plot"),
        (("compile", "model", "-o", "out", "--quality-text", ""), "--quality-text"),
        (("generate", "model", "The", "--prefix", ""), "--prefix"),
        (("prefill", "model", "--prompt-file", "", "-o", "out"), "--prompt-file"),
        (("prefill", "model", "--prompt-file", "text", "-o", ""), "--output"),
        (("serve", "model", "--uds", ""), "--uds"),
        (("serve", "model", "--api-key-file", ""), "--api-key-file"),
        (("cache", "stat", ""), "folder"),
    ],
)
def test_an_empty_path_is_not_the_working_folder(
    arguments: tuple[str, ...], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a variable of the shell that is not set."""
    monkeypatch.chdir(tmp_path)
    assert sentence(run(*arguments)) == f"{name}: expected a path, got ''"


SIZES: dict[str, Any] = {"vocab_size": 8, "max_seq_len": 8}


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: read_prefix(""), "prefix"),
        (lambda: kvgraph.compile(nn.Linear(8, 8), "out", tokenizer="", **SIZES), "tokenizer"),
        (lambda: kvgraph.compile("model", "out", dump_passes=""), "dump_passes"),
    ],
)
def test_an_empty_path_of_a_call(
    call: Callable[[], object], name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ArtifactError, match=f"^{name}: expected a path, got str ''$"):
        call()
