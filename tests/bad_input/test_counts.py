"""Layers, experts and sizes that the weights do not have, and numbers that are not finite."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvgraph
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.folder import read_config
from kvgraph.errors import ModelError, UnsupportedError
from tests.bad_input.damage import configure, refused, sentence
from tests.support import gguf_files
from tests.support.command_line import run
from tests.support.models import make_model
from tests.support.plans import LLAMA_8B, plan

Folders = Callable[[str], Path]

MANY = 100_000
"""Layers that take minutes to make, though not hours as 2**31 would."""
LARGE = (1 << 31) - 1

STEP = "; correct it, or download the checkpoint again"


@pytest.fixture
def unmade() -> Iterator[None]:
    """Nothing may make a model: it would fill the memory."""
    with mock.patch.object(huggingface, "_make", side_effect=AssertionError("a model is made")):
        yield


def either(tmp_path: Path, model: Path) -> str:
    """The sentence in which both compile and plan refuse a model."""
    text = refused(model, tmp_path)
    assert sentence(run("plan", model, "--memory", "1GiB")) == text
    return text


@pytest.mark.usefixtures("unmade")
@pytest.mark.parametrize(
    ("name", "number", "most"),
    [
        ("num_hidden_layers", 4097, "4, the layers of its weights"),
        ("num_hidden_layers", MANY, "4, the layers of its weights"),
        ("vocab_size", LARGE, "16384, as its largest weight allows"),
        ("intermediate_size", 1 << 63, "16384, as its largest weight allows"),
    ],
)
def test_more_than_the_weights_have(
    name: str, number: int, most: str, model: Path, tmp_path: Path
) -> None:
    configure(model, **{name: number})
    said = f"{model}/config.json: {name}: expected at most {most}, got {number}{STEP}"
    assert either(tmp_path, model) == said


@pytest.mark.usefixtures("unmade")
@pytest.mark.parametrize("architecture", ["qwen3_moe", "gpt_oss"])
def test_more_experts_than_the_weights_have(architecture: str, tmp_path: Path) -> None:
    """One by one in the first, together in the second."""
    model = make_model(architecture, tmp_path / "model")
    name = "num_experts" if architecture == "qwen3_moe" else "num_local_experts"
    configure(model, **{name: LARGE})
    assert f"config.json: {name}: expected at most " in (text := either(tmp_path, model))
    assert text.endswith(f", the experts of its weights, got {LARGE}{STEP}")


@pytest.mark.usefixtures("unmade")
@pytest.mark.parametrize(
    ("name", "number", "most"),
    [
        ("num_hidden_layers", MANY, 4096),
        ("num_local_experts", MANY, 4096),
        ("vocab_size", LARGE, 1 << 24),
    ],
)
def test_more_than_a_model_has_without_weights(
    name: str, number: int, most: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B | {name: number}))
    said = f"{tmp_path}/config.json: {name}: expected at most {most}, without weights to compare "
    assert sentence(run("plan", tmp_path, "--memory", "80GiB")).startswith(said)


@pytest.mark.usefixtures("unmade")
def test_an_index_alone_says_how_many_layers_there_are(model: Path, tmp_path: Path) -> None:
    weights = {"model.layers.3.mlp.up_proj.weight": "model-00001-of-00001.safetensors"}
    (model / "model.safetensors").unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    configure(model, num_hidden_layers=MANY)
    said = sentence(run("plan", model, "--memory", "1GiB"))
    assert f"num_hidden_layers: expected at most 4, the layers of its weights, got {MANY}" in said


def test_a_size_without_memory_is_named(tmp_path: Path) -> None:
    """torch's own message is of bytes and of its allocator."""
    config = LLAMA_8B | {"vocab_size": 1 << 24, "hidden_size": 1 << 24, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = "config.json: vocab_size: expected a size for which there is memory, got 16777216; corr"
    with pytest.raises(ModelError, match=said):
        plan(tmp_path)


@pytest.mark.usefixtures("unmade")
@pytest.mark.parametrize(
    ("field", "number", "most"),
    [
        ("block_count", 3, "2, the layers of its tensors"),
        ("block_count", LARGE, "2, the layers of its tensors"),
        ("nextn_predict_layers", LARGE, "2, the layers of its tensors"),
        ("vocab_size", LARGE, "160, the largest dim of its tensors"),
        ("feed_forward_length", LARGE, "160, the largest dim of its tensors"),
        ("attention__head_count_kv", LARGE, "160, the largest dim of its tensors"),
        ("expert_count", LARGE, "160, the largest dim of its tensors"),
    ],
)
def test_more_than_the_tensors_of_a_gguf_file_have(
    field: str, number: int, most: str, model_folder: Folders, tmp_path: Path
) -> None:
    fields = {f"llama__{field}": number}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    name = field.replace("__", ".")
    said = f"{path}: llama.{name}: expected at most {most}, got {number}; compile the checkpoint "
    assert either(tmp_path, path).startswith(said)


def test_errors_of_counts_have_their_kind(
    model: Path, tmp_path: Path, model_folder: Folders
) -> None:
    configure(model, num_hidden_layers=5)
    path = gguf_files.make(model_folder("llama"), tmp_path / "x.gguf", llama__block_count=3)
    for source, kind in ((model, ModelError), (path, UnsupportedError)):
        with pytest.raises(kind):
            kvgraph.compile(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rms_norm_eps": math.inf}, "rms_norm_eps: expected a finite number, got inf"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_parameters: rope_theta: expected a "),
        ({"rms_norm_eps": {"__float__": "-Infinity"}}, "rms_norm_eps: expected a finite number, "),
    ],
)
def test_numbers_that_are_not_finite(
    model: Path, tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    """JSON has none, but Python and transformers read them."""
    configure(model, **change)
    assert either(tmp_path, model).startswith(f"{model}/config.json: {said}")


def test_a_limit_that_is_infinite_is_none(model: Path) -> None:
    configure(model, time_step_limit=[0.0, {"__float__": "Infinity"}])
    assert read_config(model)["hidden_size"] == 128
