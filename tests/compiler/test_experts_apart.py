"""Experts that a checkpoint stores one by one, as tools that quantise linear layers do, of models
that have all experts in one parameter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph.compiler.frontends import huggingface
from tests.compiler.conftest import EXPERTS
from tests.compiler.test_all_experts import SIZES
from tests.compiler.test_language_parts import AXES, QWEN_VISION
from tests.support import quantized
from tests.support.models import COMMON, make_model, randomize_vectors

Tensors = dict[str, torch.Tensor]
TRANSPOSED = ("gpt_oss", "llama4_text")


def make(architecture: str, folder: Path) -> Path:
    if architecture != "qwen3_vl_moe":
        make_model(architecture, folder, **(SIZES if architecture == "llama4_text" else EXPERTS))
        randomize_vectors(folder)
        return folder
    text = COMMON | EXPERTS | {"rope_parameters": AXES, "decoder_sparse_step": 1}
    config = transformers.AutoConfig.for_model(
        architecture, text_config=text, vision_config=QWEN_VISION
    )
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    return folder


def taken_apart(plain: Path, out: Path, path: str) -> Path:
    """The checkpoint with its experts one by one. `path`: where its layers have experts."""
    architecture = plain.name
    stored: Tensors = {}
    for name, tensor in state(plain).items():
        stem, _, parameter = name.rpartition(".")
        if not stem.endswith(".experts"):
            continue
        for expert, each in enumerate(tensor):
            prefix = f"{stem.partition('.layers.')[2].partition('.')[0]}.{path}.{expert}"
            stored |= {
                f"layers.{prefix}.{layer}": part
                for layer, part in layers_of(architecture, parameter, each).items()
            }
    given = load_file(plain / "model.safetensors")
    place = next(name for name in given if ".layers." in name).partition("layers.")[0]
    kept = {name: each for name, each in given.items() if ".experts." not in name}
    quantized.save(plain, out, kept | {place + name: t for name, t in stored.items()}, None)
    return out


def layers_of(architecture: str, parameter: str, each: torch.Tensor) -> Tensors:
    end = "bias" if parameter.endswith("_bias") else "weight"
    if end == "weight" and architecture in TRANSPOSED:
        each = each.T
    if parameter.startswith("down"):
        return {f"down_proj.{end}": each}
    gate, up = (each[0::2], each[1::2]) if architecture == "gpt_oss" else each.chunk(2)
    return {f"gate_proj.{end}": gate, f"up_proj.{end}": up}


def state(folder: Path) -> Tensors:
    """The parameters of the model, by its own names."""
    loaded = huggingface.load(folder, "float32", weightless=True)
    assert loaded.checkpoint is not None, loaded.loaded
    loaded.checkpoint.fill(loaded.module)
    found: Tensors = loaded.module.state_dict()
    return found


@pytest.mark.parametrize("form", ["", "w4a16-zero-points", "fp8-channel"])
@pytest.mark.parametrize(
    ("architecture", "path"),
    [
        ("gpt_oss", "mlp.experts"),
        ("llama4_text", "feed_forward.experts"),
        ("mixtral", "mlp.experts"),
        ("mixtral", "block_sparse_moe.experts"),
        ("qwen3_vl_moe", "mlp.experts"),  # gate and up are square
    ],
)
def test_parameters_are_those_of_the_whole(
    architecture: str, path: str, form: str, tmp_path: Path
) -> None:
    plain = make(architecture, tmp_path / architecture)
    apart = taken_apart(plain, tmp_path / "apart", path)
    if form:
        meant = tmp_path / "meant"
        quantized.make(form, apart, tmp_path / form, meant)
        found, expected = state(tmp_path / form), state(meant)
    else:
        found, expected = state(apart), state(plain)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_they_run_as_they_are_stored(tmp_path: Path) -> None:
    """Compile's own check runs the mixture; its experts keep their groups of 4 bits."""
    apart = taken_apart(make("gpt_oss", tmp_path / "gpt_oss"), tmp_path / "apart", "mlp.experts")
    folder = quantized.make("w4a16", apart, tmp_path / "packed")
    manifest = kvgraph.compile(folder, tmp_path / "a.kvg", page_size=16)
    assert not [note for note in manifest.notes if "rounded" in note]
    (mixture,) = manifest.mixtures
    assert mixture.bytes < mixture.parameters
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")


def remove(tensors: Tensors, name: str) -> None:
    del tensors[name]


def cut(tensors: Tensors, name: str) -> None:
    tensors[name] = tensors[name][1:].clone()


NAME = "model.layers.1.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (remove, f"expected such tensors of all 4 experts, got none for {NAME}"),
        (cut, f"{NAME}: expected [96, 64], as "),
    ],
)
def test_damaged_experts(edit: Callable[[Tensors, str], Any], said: str, tmp_path: Path) -> None:
    folder = taken_apart(make("mixtral", tmp_path / "mixtral"), tmp_path / "apart", "mlp.experts")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors, NAME)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert said in quantized.refused(folder)


def test_a_layer_of_another_shape_is_named(tmp_path: Path) -> None:
    """Not one that fits, and not turned."""
    folder = taken_apart(make("mixtral", tmp_path / "mixtral"), tmp_path / "apart", "mlp.experts")
    tensors = load_file(folder / "model.safetensors")
    for name in tensors:
        if name.startswith("model.layers.1.") and name.endswith("down_proj.weight"):
            tensors[name] = tensors[name][:, :-16].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = "such as model.layers.1.mlp.experts.down_proj [4, 64, 80] for [4, 64, 96]"
    assert said in quantized.refused(folder)


def test_a_parameter_that_is_there_already_wins(tmp_path: Path) -> None:
    """And the manifest says what has no place."""
    plain = make("gpt_oss", tmp_path / "gpt_oss")
    apart = taken_apart(plain, tmp_path / "apart", "mlp.experts")
    both = load_file(apart / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    both[name] = torch.zeros_like(load_file(plain / "model.safetensors")[name])
    save_file(both, apart / "model.safetensors", metadata={"format": "pt"})
    loaded = huggingface.load(apart, "float32", weightless=True)
    said = "weights: no place in the model for 4 tensors of the checkpoint, such as "
    assert [
        note
        for note in loaded.notes
        if note.startswith(f"{said}{name.replace('.down', '.0.down')}")
    ]
    assert not state(apart)[f"model.{name}"].any()
