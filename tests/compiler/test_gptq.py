"""GPTQ's layers of several kinds in one checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import ModelError, UnsupportedError
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.folder import read_config
from kvgraph.compiler.frontends.left_plain import left_plain
from kvgraph.compiler.frontends.stored_forms import stored_forms
from kvgraph.compiler.quantized.parts import group_size
from tests.support import quantized

LAYER = "model.layers.1.mlp.up_proj"
DOWN = "model.layers.0.mlp.down_proj"
FIRST = "model.layers.0.self_attn.q_proj"  # in the order of the model
DYNAMIC = {"-:.*lm_head": {}, r"+:.*\.1\.mlp\.up_proj": {"bits": 8}}


@pytest.fixture
def mixed(plain: Callable[[str], Path], tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint of 4 bits with a layer of 8, and the numbers that it stands for."""
    made = {form: (tmp_path / form, tmp_path / f"{form}-meant") for form in ("gptq", "gptq-8")}
    for form, (folder, meant) in made.items():
        quantized.make(form, plain("llama"), folder, meant)
    for folder, other in zip(made["gptq"], made["gptq-8"], strict=True):
        quantized.mixed(folder, other, LAYER)
    say(made["gptq"][0], dynamic=DYNAMIC)
    return made["gptq"]


def say(folder: Path, **more: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= more
    path.write_text(json.dumps(config))


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def state(folder: Path) -> dict[str, torch.Tensor]:
    return huggingface.load(folder, "float32").module.state_dict()


def test_bits_of_a_layer_are_those_of_its_tensors(mixed: tuple[Path, Path], tmp_path: Path) -> None:
    folder, meant = mixed
    found, expected = state(folder), state(meant)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16)
    said = "weights: the checkpoint's are gptq, 4 bits in groups of 32, 8 bits in groups of 32"
    assert said in manifest.notes
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")


def test_a_plan_counts_the_most_bits(mixed: tuple[Path, Path]) -> None:
    config = json.loads((mixed[0] / "config.json").read_text())
    assert stored_forms(config).linears.bits == 8
    config["quantization_config"]["dynamic"] = {"-:.*up_proj": {"bits": 8}}
    assert stored_forms(config).linears.bits == 4


def test_groups_of_another_size(mixed: tuple[Path, Path]) -> None:
    """Without an index, groups in order have one of the sizes that are said."""
    folder, meant = mixed
    change(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith(".g_idx")])
    say(
        folder,
        group_size=64,
        dynamic=DYNAMIC | {r".*": {"group_size": 32}, "b": {"group_size": -1}},
    )
    found, expected = state(folder), state(meant)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    say(folder, dynamic=DYNAMIC)
    with pytest.raises(UnsupportedError, match=f"{FIRST}.g_idx: expected one, for groups of 64"):
        state(folder)


def test_zero_points_of_3_bits(mixed: tuple[Path, Path]) -> None:
    folder, _ = mixed
    name = f"{LAYER}.qzeros"
    change(folder, lambda t: t.update({name: t[name][:, :9].clone()}))  # 96 of 3 bits
    with pytest.raises(UnsupportedError, match=f"{name}: expected 2, 4 or 8 bits, got 3; "):
        state(folder)


def test_a_rule_that_says_other_bits(mixed: tuple[Path, Path]) -> None:
    folder, _ = mixed
    say(folder, dynamic={f"+:{LAYER}": {"bits": 2}})
    expected = f"dynamic: bits of {LAYER}: expected 8, as the shape of its qzeros says, got 2; "
    with pytest.raises(UnsupportedError, match=expected):
        state(folder)


def test_an_index_that_was_never_filled(mixed: tuple[Path, Path]) -> None:
    """All of it is 0: groups are in order, and of the size that is said."""
    folder, meant = mixed
    change(folder, lambda t: [t[name].zero_() for name in t if name.endswith(".g_idx")])
    found, expected = state(folder), state(meant)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    say(folder, group_size=64)
    with pytest.raises(
        UnsupportedError, match=f"{FIRST}.g_idx: expected one, for groups of 64, go"
    ):
        state(folder)


def test_an_index_that_act_order_needs(mixed: tuple[Path, Path]) -> None:
    """Without it groups would be in order."""
    folder, _ = mixed
    say(folder, desc_act=True)
    state(folder)
    change(folder, lambda t: t.pop(f"{DOWN}.g_idx"))
    with pytest.raises(UnsupportedError, match=f"{DOWN}.g_idx: expected one, as desc_act says, g"):
        state(folder)
    say(folder, static_groups=True)
    state(folder)


@pytest.mark.parametrize(("form", "packing"), [("gptq", "auto_gptq"), ("awq", "auto_awq")])
def test_auto_round(form: str, packing: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    """Its own checkpoints have the layout of another method, without an index."""
    folder = quantized.make(form, plain("llama"), tmp_path / form, tmp_path / "meant")
    change(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith(".g_idx")])
    own = {"packing_format": f"auto_round:{packing}", "bits": 4, "group_size": 128, "sym": False}
    own["extra_config"] = {".*": {"group_size": 32}}
    configure(folder, {"quant_method": "auto-round", "data_type": "int", **own})
    found, expected = state(folder), state(tmp_path / "meant")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_layers_of_auto_round_with_other_bits(mixed: tuple[Path, Path]) -> None:
    folder, meant = mixed
    change(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith(".g_idx")])
    quantized.mixed(folder, meant, DOWN)
    others = {LAYER: {"bits": 8, "group_size": 32}, DOWN: {"bits": 16, "data_type": "float"}}
    own = {"packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 64}
    configure(folder, {"quant_method": "auto-round", "extra_config": others, **own})
    found, expected = state(folder), state(meant)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    config = read_config(folder)
    assert stored_forms(config).linears.bits == 8
    is_plain = left_plain(config)
    assert [is_plain(name) for name in (DOWN, LAYER, f"{DOWN}_2")] == [True, False, False]
    configure(folder, {"quant_method": "auto-round", "extra_config": [], **own})
    with pytest.raises(ModelError, match="extra_config: expected an object"):
        state(folder)


def configure(folder: Path, given: dict[str, Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": given}
    path.write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("inputs", "count", "size"),
    [(128, 4, 32), (128, 1, 128), (160, 3, 64), (1408, 11, 128), (48, 3, 16), (100, 3, 34)],
)
def test_the_size_of_groups_that_a_note_tells(inputs: int, count: int, size: int) -> None:
    assert group_size(inputs, count) == size
