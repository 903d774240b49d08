"""What a plan counts where config.json alone says the forms of weights, against what it counts, and
a compile stores, with the weights at hand."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from kvgraph.compiler.frontends import measured
from kvgraph.compiler.frontends import ranks as ranks_of
from kvgraph.compiler.frontends.left_plain import EXPERT
from kvgraph.compiler.frontends.stored_forms import stored_forms
from kvgraph.compiler.model import Model
from kvgraph.ops.packed import E4M3, Form
from tests.compiler.test_plan_mixed_forms import as_compiled, counted
from tests.support import quantized
from tests.support.models import make_model

DOWN = [f"model.layers.{i}.mlp.experts.{n}.down_proj" for i in range(2) for n in range(4)]
GATE_UP = [name.replace("down", each) for name in DOWN for each in ("gate", "up")]


def alone(folder: Path, out: Path, **fields: Any) -> Path:
    """A folder with the configuration alone, and fields of its quantization_config changed."""
    out.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (out / "config.json").write_text(json.dumps(config))
    return out


@pytest.mark.parametrize(
    "form", ["w4a16-128", "w4a16-zero-points", "w8a16", "w8a16-channel", "awq", "fp8", "nvfp4"]
)
def test_a_share_that_ends_within_a_group(form: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 32}
    shape = sizes | {"intermediate_size": 320 if form == "fp8" else 384}
    folder = make_model("llama", tmp_path / "plain", num_hidden_layers=1, **shape)
    folder = quantized.make(form, folder, tmp_path / "packed")
    config = alone(folder, tmp_path / "config")
    for ranks in (1, 2, 4):
        assert counted(config, ranks) == counted(folder, ranks)


def test_a_share_of_experts_that_ends_within_a_group(tmp_path: Path) -> None:
    """gpt-oss stores inputs before outputs."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96}
    folder = make_model("gpt_oss", tmp_path / "plain", num_hidden_layers=1, **sizes)
    folder = quantized.make("mxfp4", folder, tmp_path / "packed")
    config = alone(folder, tmp_path / "config")
    for ranks in (1, 2):
        assert counted(config, ranks) == counted(folder, ranks)


def modelopt(form: str, names: list[str]) -> Mapping[str, Any]:
    return {name: {"quant_algo": form} for name in names}


APART: Mapping[str, tuple[str, str, dict[str, Any]]] = {
    "ignored": ("w4a16", "", {"ignore": ["lm_head", "re:.*down_proj"]}),
    "targets": ("w4a16", "w8a16", {}),
    "dynamic": ("gptq", "gptq-8", {"dynamic": {r"+:.*\.down_proj": {"bits": 8}}}),
    "left out": ("gptq", "", {"dynamic": {r"-:.*\.down_proj": {}}}),
    "mixed": (
        "nvfp4",
        "mxfp8",
        {"quantized_layers": {**modelopt("NVFP4", GATE_UP), **modelopt("MXFP8", DOWN)}},
    ),
    "some": ("nvfp4", "", {"quantized_layers": modelopt("NVFP4", GATE_UP)}),
}
"""Case -> form of gate and up, form of down (none: plain), and what the configuration says."""


@pytest.mark.parametrize("case", APART)
def test_down_of_experts_in_another_form_than_gate_and_up(
    case: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    first, second, fields = APART[case]
    given = plain("qwen3_moe")
    folder = quantized.make(first, given, tmp_path / "packed")
    whole = counted(folder)
    other = quantized.make(second, given, tmp_path / "other") if second else given
    for name in DOWN:
        quantized.mixed(folder, other, f"{name}.")
    if case == "targets":
        quantized.add_group(folder, second, "down_proj")
    if "quantized_layers" in fields:
        attention = [f"model.layers.{i}.self_attn.{n}_proj" for i in range(2) for n in "qkvo"]
        layers = {**fields["quantized_layers"], **modelopt("NVFP4", attention)}
        fields = {"quantized_layers": layers}
    config = alone(folder, tmp_path / "config", **fields)
    shutil.copy(config / "config.json", folder)
    assert counted(config) == counted(folder) > 1.05 * whole
    assert counted(config, 2) == counted(folder, 2)
    assert counted(config) == pytest.approx(as_compiled(folder, tmp_path / "a.kvg"), rel=0.02)


def test_a_model_is_cut_once_for_a_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = []

    def cut(model: Model, ranks: int, rank: int) -> Model:
        cuts.append(ranks)
        return ranks_of.cut(model, ranks, rank)

    monkeypatch.setattr(measured, "cut", cut)
    plain = make_model("llama", tmp_path / "plain", num_hidden_layers=1)
    counted(quantized.make("w4a16", plain, tmp_path / "packed"), 2)
    assert cuts == [2]


def test_a_layer_has_the_form_that_names_it() -> None:
    groups = {
        "group_0": quantized.FORMS["w4a16"][0]["config_groups"]["group_0"],
        "group_1": {"targets": ["re:.*down_proj"], "weights": quantized.integer(8)},
    }
    given = {"quant_method": "compressed-tensors", "config_groups": groups}
    config = {"quantization_config": given}
    assert stored_forms(config).linears == Form(8)
    assert stored_forms(config, ["model.layers.0.mlp.down_proj"]).linears == Form(8)
    assert stored_forms(config, ["model.layers.0.mlp.up_proj"]).linears == Form(4, 32)
    down = [f"model.layers.0.mlp.experts{end}" for end in EXPERT["down_proj"]]
    assert stored_forms(config, down).experts == Form(8)
    mixed = {"model.language_model.layers.0.mlp.up_proj": {"quant_algo": "MXFP8"}}
    mixed |= {"b": {"quant_algo": "W4A16_AWQ"}}
    config = {"quantization_config": {"quant_method": "modelopt", "quantized_layers": mixed}}
    found = stored_forms(config, ["model.layers.0.mlp.up_proj"])
    assert found.linears == Form(8, 32, E4M3)
