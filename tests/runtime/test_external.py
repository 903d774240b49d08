"""Weights that ONNX Runtime reads by place: they are where the model says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph.errors import ArtifactError
from kvgraph.runtime.artifact import verify
from kvgraph.runtime.external import _graph, _places, require_model
from tests.support.artifacts import Compiled, rehash

MODEL, WEIGHTS = "model.onnx", "weights.safetensors"
HEAD = "model.lm_head.weight"


@pytest.fixture
def artifact(compiled: Compiled, tmp_path: Path) -> Path:
    return Path(shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact"))


Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize(
    ("edit", "note", "got"),
    [
        (lambda tensors: tensors, "x" * 999, r"\d+ from byte \d+"),
        (lambda tensors: {n: t for n, t in tensors.items() if n != HEAD}, "", "none"),
        (lambda tensors: tensors | {HEAD: tensors[HEAD][:8].clone()}, "", r"\d+ from byte \d+"),
    ],
)
def test_weights_that_were_written_again(
    edit: Callable[[Tensors], Tensors], note: str, got: str, artifact: Path
) -> None:
    """With hashes that fit. Other bytes would give other tokens without an error."""
    path = artifact / WEIGHTS
    save_file(edit(load_file(path)), path, {"note": note})
    rehash(artifact)
    expected = (
        rf"{path}: {HEAD if got == 'none' else '.*'}: expected \d+ bytes from byte \d+, as "
        rf"model.onnx says, got {got}; compile "
        "the model again"
    )
    with pytest.raises(ArtifactError, match=expected):
        verify(artifact)
    for session in ("onnxruntime", "reference"):
        with pytest.raises(ArtifactError, match=expected):
            kvgraph.load(artifact).session(session)


def test_the_places_are_those_that_onnx_reads(compiled: Compiled) -> None:
    for options in ({}, {"weights": "int4"}, {"tp": 2}):
        folder = compiled("tiny-llama", **options)
        graph = onnx.load(folder / MODEL, load_external_data=False).graph
        said = {
            tensor.name: {entry.key: entry.value for entry in tensor.external_data}
            for tensor in graph.initializer
            if tensor.external_data
        }
        expected = {n: (int(e["offset"]), int(e["length"])) for n, e in said.items()}
        assert expected
        assert _places(_graph(folder / MODEL), WEIGHTS) == expected
        assert _places(_graph(folder / MODEL), "other") == {}
        artifact = verify(folder)
        for rank in range(artifact.ranks):
            require_model(replace(artifact, rank=rank))


@pytest.mark.parametrize("keep", [0, 1, 3, 100, -1])
def test_a_damaged_model_is_left_to_onnx_runtime(keep: int, artifact: Path) -> None:
    path = artifact / MODEL
    path.write_bytes(path.read_bytes()[:keep])
    rehash(artifact)
    with pytest.raises(ArtifactError, match=r"model\.onnx: expected a model that onnxruntime"):
        kvgraph.load(artifact).session()
