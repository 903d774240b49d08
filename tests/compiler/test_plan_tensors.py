"""What a plan says of a checkpoint's own tensors, against a compile: heads that are stored apart,
weights that compile cannot read, tensors without a place."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import KVGraphError, UnsupportedError
from kvgraph.contract.safetensors import read_layout
from tests.compiler.test_plan_mixed_forms import counted
from tests.support import quantized
from tests.support.models import make_model
from tests.support.plans import plan

Tensors = dict[str, torch.Tensor]
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def changed(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tied(folder: Path, factor: float) -> Path:
    """A model whose configuration ties the head to the table, with a head all the same."""

    def add(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[TABLE].clone()
        tensors[HEAD][-1] *= factor

    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return changed(folder, add)


@pytest.mark.parametrize(("factor", "ranks"), [(1, 1), (2, 1), (2, 2)])
def test_a_tied_head_that_is_stored_too(factor: int, ranks: int, tmp_path: Path) -> None:
    """It is one of its own if it differs."""
    folder = tied(make_model("llama", tmp_path / "model", num_hidden_layers=1), factor)
    out = tmp_path / "a.kvg"
    kvgraph.compile(folder, out, page_size=16, tp=ranks, check=False)
    files = (out / "weights.safetensors", out / "rank0" / "weights.safetensors")
    layouts = [read_layout(file) for file in files if file.is_file()]
    own = sum(at.nbytes for layout in layouts for at in layout.values())
    assert counted(folder, ranks) == pytest.approx(own, rel=0.01)
    table = 160 * 64
    whole = plan(folder, max_seq_len=None).parameters
    tensors = load_file(folder / "model.safetensors").values()
    assert whole == sum(each.numel() for each in tensors) - table * (factor == 1)


def refused(folder: Path, tmp_path: Path) -> str:
    """The sentence with which a plan, of one rank and of two, and a compile refuse a checkpoint."""
    said = set()
    for attempt in (
        lambda: plan(folder, max_seq_len=None),
        lambda: plan(folder, target="cpu", tp=2, max_seq_len=None),
        lambda: kvgraph.compile(folder, tmp_path / "out", check=False),
    ):
        with pytest.raises(KVGraphError) as raised:
            attempt()
        said.add(str(raised.value))
    (one,) = said
    return one


def test_a_tied_head_beside_quantised_weights(tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=1)
    folder = tied(quantized.make("awq", plain, tmp_path / "packed"), 2)
    assert "tied model.embed_tokens.weight and lm_head.weight differ" in refused(folder, tmp_path)


def unsaid(folder: Path) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config.pop("quantization_config", None)
    path.write_text(json.dumps(config))
    return folder


FORMS = ("gptq", "awq", "w4a16", "w8a8", "fp8", "fp8-channel", "nvfp4", "mxfp8")


@pytest.mark.parametrize("form", FORMS)
def test_packed_weights_that_the_configuration_does_not_tell_of(form: str, tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=1)
    folder = unsaid(quantized.make(form, plain, tmp_path / "packed"))
    assert "expected numbers that quantization_config" in refused(folder, tmp_path)


def in_4_bits(tensors: Tensors) -> None:
    """As bitsandbytes stores them."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        count = tensors[name].numel()
        tensors[name] = torch.zeros(count // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.zeros(count // 64)
        tensors[f"{name}.quant_map"] = torch.zeros(16)


def in_float8(tensors: Tensors) -> None:
    """Names and shapes are those of plain weights."""
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def without_a_layer(tensors: Tensors) -> None:
    del tensors["model.layers.0.mlp.up_proj.weight"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            in_4_bits,
            "expected quantization_config in config.json for tensors such as model.layers.0",
        ),
        (in_float8, "expected numbers that quantization_config in config.json says the scales of"),
        (without_a_layer, "expected weights for every parameter, got none for some"),
    ],
)
def test_weights_that_compile_cannot_read(
    change: Callable[[Tensors], None], said: str, tmp_path: Path
) -> None:
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=1)
    assert said in refused(changed(folder, change), tmp_path)


@pytest.mark.parametrize("form", ["gptq", "w4a16", "fp8", "fp8-channel"])
def test_names_of_packed_weights_in_an_index(form: str, tmp_path: Path) -> None:
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=1)
    folder = unsaid(quantized.make(form, plain, tmp_path / "packed"))
    names = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, "a.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UnsupportedError, match=r"quantization_config in config\.json"):
        plan(folder, max_seq_len=None)


def test_a_tensor_without_a_place_is_said(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=1)
    before = plan(folder, max_seq_len=None)
    changed(folder, lambda tensors: tensors.update({"score.weight": torch.zeros(2, 64)}))
    found = plan(folder, max_seq_len=None)
    assert found.weights == before.weights
    assert found.warnings == [
        "weights: no place in the model for 1 tensor of the checkpoint, such as score.weight"
    ]
    out = tmp_path / "a.kvg"
    shutil.rmtree(out, ignore_errors=True)
    assert found.warnings[0] in kvgraph.compile(folder, out, check=False).notes
