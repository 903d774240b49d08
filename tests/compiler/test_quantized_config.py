"""What a quantization_config says of a checkpoint in fewer bits that is not read is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import ModelError
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.folder import read_config
from kvgraph.compiler.frontends.stored_forms import stored_forms
from tests.support import quantized
from tests.support.plans import plan


def in_groups_of(size: int, form: str) -> dict[str, Any]:
    """Its configuration, with groups of that size: where they do not divide a row, the last one is
    shorter, and the number of scales alone would tell other groups."""
    config = copy.deepcopy(quantized.FORMS[form][0])
    config["config_groups"]["group_0"]["weights"]["group_size"] = size
    return config


def with_bits(bits: int, form: str) -> dict[str, Any]:
    """Its configuration with other bits, whose tensors may have the same shapes: compressed-tensors
    0.9 packs 4 numbers of 7 bits into a word."""
    config = copy.deepcopy(quantized.FORMS[form][0])
    config["config_groups"]["group_0"]["weights"]["num_bits"] = bits
    return config


SHAPE = "weight_packed says, got "
GPTQ, AWQ, COMPRESSED = (quantized.FORMS[name][0] for name in ("gptq", "awq", "w4a16"))


@pytest.mark.parametrize(
    ("form", "config", "message"),
    [
        ("gptq", GPTQ | {"bits": 3}, "gptq: bits: expected 2, 4 or 8, got 3; "),
        (
            "awq",
            AWQ | {"dynamic": {"+:.*v_proj": {"bits": 8}}},
            "awq: dynamic: bits of model.layers.0.self_attn.v_proj: expected 4, got 8; compile the",
        ),
        (
            "gptq",
            GPTQ | {"checkpoint_format": "marlin"},
            "checkpoint_format: expected one of ['gptq",
        ),
        *(
            (
                "gptq",
                GPTQ | {name: ["gptq"]},
                "checkpoint_format: expected one of ['gptq', 'gptq_v2'], got ['gptq']; compile",
            )
            for name in ("checkpoint_format", "format")
        ),
        (
            "fp8",
            quantized.FORMS["fp8"][0] | {"weight_scale_semantics": "power"},
            "fp8: weight_scale_semantics: expected 'inverse', got 'power'; compile",
        ),
        (
            "fp8",
            quantized.FORMS["fp8"][0] | {"weight_scale_method": "row"},
            "fp8: weight_scale_semantics: expected 'inverse', got None; compile",
        ),
        (
            "fp8",
            quantized.FORMS["fp8"][0] | {"scale_power": 2},
            "fp8: scale_power: expected no fields of scales but ['activation_scale_ub', ",
        ),
        ("gptq", GPTQ | {"bits": 4.0}, "gptq: bits: expected 2, 4 or 8, got 4.0; "),
        (
            "nvfp4",
            {"quant_method": "modelopt", "quant_algo": "W4A8_NVFP4_FP8"},
            "modelopt: quant_algo: expected NVFP4, MXFP4, FP8 or MXFP8, got 'W4A8_NVFP4_FP8'; ",
        ),
        ("gptq", GPTQ | {"bits": "4"}, "gptq: bits: expected 2, 4 or 8, got '4'; "),
        ("gptq", GPTQ | {"rotation": "hadamard"}, "rotation: expected none, got 'hadamard'; "),
        (
            "w4a16",
            COMPRESSED | {"format": "mxfp6-pack-quantized"},
            "compressed-tensors: format: expected FP4, FP8 or integers, got 'mxfp6-pack-quantized'",
        ),
        (
            "w4a16",
            COMPRESSED | {"config_groups": {"a": [], "b": {"format": "mxfp6-pack-quantized"}}},
            "compressed-tensors: format: expected FP4, FP8 or integers, got 'mxfp6-pack-quantized'",
        ),
        ("awq", AWQ | {"version": "gemv"}, "awq: version: expected 'gemm', got 'gemv'; "),
        *(
            ("awq", AWQ | {name: "gemv"}, f"awq: {name}: expected 'gemm', got 'gemv'; ")
            for name in ("format", "checkpoint_format")
        ),
        ("awq", AWQ | {"bits": 8}, "awq: bits: expected 4, got 8; "),
        (
            "w4a16",
            COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: expected dense weights, got 'sparse-24-bitmask'; ",
        ),
        (
            "w4a16",
            COMPRESSED | {"transform_config": {"config_groups": {"u": {}}}},
            "transform_config: expected none, got transforms of activations; ",
        ),
        (
            "awq",
            AWQ | {"group_size": 48},
            "scales: expected groups of 48 that divide the ",
        ),
        *(
            (form, in_groups_of(48, form), "weight_scale: expected groups of 48 that divide the ")
            for form in ("w4a16", "w8a16", "nvfp4-packed", "mxfp4-packed")
        ),
        *(
            (
                form,
                with_bits(bits, form),
                f"_proj: expected {read}, as the shape of its {SHAPE}{bits}; ",
            )
            for form, read, bits in (
                ("w8a16", 8, 7),
                ("w4a16", 4, 3),
                ("nvfp4-packed", 4, 6),
                ("mxfp4-packed", 4, 6),
            )
        ),
        ("fp8-group", in_groups_of(48, "fp8-group"), "from the tensors beside it, got [64, 2]: "),
    ],
)
def test_forms_that_are_not_read(
    form: str, config: dict[str, Any], message: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    given = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(given | {"quantization_config": config}))
    said = quantized.refused(folder)
    assert message in said
    assert said.endswith(quantized.INSTEAD)


def with_block(folder: Path, block: object) -> Path:
    """The same checkpoint, whose group of weights names that block."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["block_structure"] = block
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    "block", [128, "128", [64], "axb", [64, 0], "0x0", [64, "48"], {"a": 1}, "", "9" * 5000 + "x1"]
)
def test_a_block_that_is_not_two_sizes(
    block: object, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = with_block(quantized.make("fp8-block", plain("llama"), tmp_path / "packed"), block)
    said = (
        f"{folder}/config.json: quantization_config: config_groups: group_0: weights: "
        f"block_structure: expected two sizes, got {block!r:.100}"
    )
    assert quantized.refused(folder) == said
    with pytest.raises(ModelError) as error:
        plan(folder, target="cpu", max_seq_len=None)
    assert str(error.value) == said


def test_a_block_as_text(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("fp8-block", plain("llama"), tmp_path / "packed")
    expected, planned = state(folder), stored_forms(read_config(folder))
    found = state(with_block(folder, "64x48"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert stored_forms(read_config(folder)) == planned


def test_older_names_of_awqs_fields_beside_null(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("awq", plain("llama"), tmp_path / "packed")
    expected, path = state(folder), folder / "config.json"
    planned = stored_forms(read_config(folder))
    config = json.loads(path.read_text())
    older = {"w_bit": 4, "q_group_size": quantized.GROUP, "version": None, "format": "gemm"}
    config["quantization_config"] |= {"bits": None, "group_size": None} | older
    path.write_text(json.dumps(config))
    assert all(torch.equal(state(folder)[name], tensor) for name, tensor in expected.items())
    assert stored_forms(read_config(folder)) == planned
    config["quantization_config"]["format"] = "gemv"
    path.write_text(json.dumps(config))
    assert "awq: format: expected 'gemm', got 'gemv'; " in quantized.refused(folder)


@pytest.mark.parametrize("form", ["fp8", "gptq", "awq", "w8a8", "nvfp4"])
def test_scales_of_activations_and_caches_are_left(
    form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """No tensor that the model has no place for: each row is scaled as it comes."""
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    ends = ("input_scale", "input_scale_ub", "activation_scale", "output_scale")
    for name in (*ends, "output_zero_point"):
        tensors[f"model.layers.0.mlp.up_proj.{name}"] = torch.ones(1)
    for name in ("k_scale", "k_zero_point", "v_zero_point"):
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    notes = huggingface.load(folder, "float32", weightless=True).notes
    assert not [note for note in notes if "no place" in note]


def test_a_configuration_over_plain_weights(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = tmp_path / "packed"
    quantized.save(plain("llama"), folder, load_file(plain("llama") / "model.safetensors"), GPTQ)
    notes = huggingface.load(folder, "float32", weightless=True).notes
    said = (
        "weights: the checkpoint's are in no quantised form, though quantization_config says gptq"
    )
    assert said in notes


def test_modelopts_own_object_in_config_json(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """It is read as it is in hf_quant_config.json, by plans and compiles alike."""
    folder = quantized.make("nvfp4", plain("llama"), tmp_path / "packed")
    planned = stored_forms(read_config(folder))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    flat = config["quantization_config"]
    nested = {"quant_method": flat.pop("quant_method"), "quantization": flat}
    path.write_text(json.dumps(config | {"quantization_config": nested}))
    assert stored_forms(read_config(folder)) == planned
    assert plan(folder, target="cpu", max_seq_len=None).warnings == []
    flat["quant_algo"] = "W4A8_NVFP4_FP8"
    path.write_text(json.dumps(config | {"quantization_config": nested}))
    assert "quant_algo: expected NVFP4, MXFP4, FP8 or MXFP8, got 'W4" in quantized.refused(folder)


@pytest.mark.parametrize("end", ["weight_scale", "weight_scale_inv", "weight.absmax", "SCB"])
def test_scales_that_no_configuration_names(
    end: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    tensors = load_file(plain("llama") / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{end}"
    quantized.save(plain("llama"), tmp_path / "m", tensors | {name: torch.ones(2)}, None)
    said = f"expected quantization_config in config.json for tensors such as {name}, got none; "
    assert said in quantized.refused(tmp_path / "m")


def state(folder: Path) -> dict[str, torch.Tensor]:
    return huggingface.load(folder, "float32").module.state_dict()


def with_blocks(plain: Path, folder: Path, block: tuple[int, int], targets: str) -> torch.Tensor:
    """Write a checkpoint whose first layer has other blocks than the rest. Its values."""
    _, pack = quantized.compressed(
        "float-quantized", **quantized.FLOAT8, strategy="block", block_structure=list(block)
    )
    quantized.make("fp8-block", plain, folder)
    tensors = load_file(folder / "model.safetensors")
    weight = load_file(plain / "model.safetensors")[f"{DOWN}.weight"].float()
    parts, meant = pack(weight * torch.linspace(0.1, 8, weight.shape[1]))
    tensors |= {f"{DOWN}.{end}": part for end, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    groups = config["quantization_config"]["config_groups"]
    own = groups["group_0"]["weights"] | {"block_structure": list(block)}
    groups["group_1"] = {"targets": [targets], "weights": own}
    (folder / "config.json").write_text(json.dumps(config))
    return meant


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("block", [(64, 56), (32, 96)], ids=str)
def test_blocks_of_two_sizes(
    block: tuple[int, int], plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """The scales of the first have the shape that the other layers' blocks would give."""
    meant = with_blocks(plain("llama"), tmp_path / "packed", block, "re:.*0.mlp.down_proj")
    found = huggingface.load(tmp_path / "packed", "float32").module.state_dict()
    (weight,) = (found[name] for name in found if name.endswith("layers.0.mlp.down_proj.weight"))
    assert torch.equal(weight, meant)


def test_blocks_of_two_sizes_in_rules(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """GPTQModel's: scales of both sizes have one shape, so only the rule tells them apart."""
    folder = quantized.make("fp8-inverse", plain("llama"), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    weight = load_file(plain("llama") / "model.safetensors")[f"{DOWN}.weight"].float()
    parts, meant = quantized.fp8(weight * torch.linspace(0.1, 8, weight.shape[1]), (64, 56))
    inverse = 1 / parts["weight_scale_inv"]
    meant = parts["weight"].float() * (1 / inverse).repeat_interleave(56, 1)[:, :96]
    tensors |= {f"{DOWN}.weight": parts["weight"], f"{DOWN}.weight_scale_inv": inverse}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["weight_block_size"] = [64, 48]
    rule = {"weight_block_size": [64, 56], "weight_scale_method": "block"}
    config["quantization_config"]["dynamic"] = {r"+:.*\.0\.mlp\.down_proj": rule}
    (folder / "config.json").write_text(json.dumps(config))
    (weight,) = (each for name, each in state(folder).items() if f"{DOWN}.weight" in name)
    assert torch.equal(weight, meant)
    rule["weight_scale_semantics"] = "plain"
    (folder / "config.json").write_text(json.dumps(config))
    said = "weight_scale_semantics: expected 'inverse', got 'plain'; "
    assert said in quantized.refused(folder)


def test_blocks_of_two_sizes_for_one_layer(plain: Callable[[str], Path], tmp_path: Path) -> None:
    with_blocks(plain("llama"), tmp_path / "packed", (64, 56), "Linear")
    assert "block_structure of model.layers.0" in (said := quantized.refused(tmp_path / "packed"))
    assert "expected one size, got 64 x 48 and 64 x 56; compile the checkpoint" in said


@pytest.mark.parametrize("form", ["nvfp4", "w4a16", "gptq", "fp8-dynamic"])
def test_draft_layers_may_be_in_another_form(
    form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """They are not read, so they keep the form of their publisher."""
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    draft = torch.ones(64, 64).to(torch.float8_e4m3fn)
    tensors |= {"mtp.proj.weight": draft, "mtp.proj.weight_scale_inv": torch.ones(1, 1)}
    save_file(tensors, path, metadata={"format": "pt"})
    found = huggingface.load(folder, "float32")
    assert not [note for note in found.notes if "mtp" in note]
    tensors["model.layers.2.proj.weight"] = tensors.pop("mtp.proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    assert "no place in the model for" in "".join(huggingface.load(folder, "float32").notes)


@pytest.mark.parametrize("form", ["awq", "fp8", "gptq", "nvfp4", "nvfp4-packed", "w4a16", "w8a8"])
@pytest.mark.parametrize("layer", [1, 2])
def test_damaged_layers_that_the_model_lacks(
    layer: int, form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """A third layer of two drafts tokens (DeepSeek, GLM): nothing of it is needed."""
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    tensors, stem = load_file(folder / "model.safetensors"), "model.layers.1.mlp.up_proj."
    for name in [name for name in tensors if name.startswith(stem) and tensors[name].dim() > 1]:
        tensors[name.replace("layers.1", f"layers.{layer}")] = tensors[name][1:].clone()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    if layer == 1:
        assert "model.layers.1.mlp.up_proj." in quantized.refused(folder)
    else:
        state(folder)


@pytest.mark.parametrize(
    ("form", "end"),
    [
        ("gptq", "channel_scales"),
        ("awq", "g_idx"),
        ("w4a16", "pre_quant_scale"),
        ("fp8", "smooth_scale"),
    ],
)
def test_a_factor_that_no_method_reads(
    form: str, end: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors") | {f"{DOWN}.{end}": torch.ones(96)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = f"{DOWN}.{end}: expected none, got a part of {DOWN}.weight that is not read; compile the"
    assert said in quantized.refused(folder)


KINDS = {"fp8": "F8_E4M3", "w8a8": "I8", "gptq": "I32", "awq": "I32", "nvfp4-packed": "U8"}


@pytest.mark.parametrize("form", KINDS)
@pytest.mark.parametrize("key", [None, "compression_config"])
def test_numbers_without_a_word_of_their_scales(
    form: str, key: str | None, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """The older key is read; where there is none, a cast of the numbers would be another model."""
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    config = json.loads((folder / "config.json").read_text())
    own = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config | ({key: own} if key else {})))
    if key is not None:
        kvgraph.compile(folder, folder.with_name("out"), check=False)
        return
    said = f"that quantization_config in config.json says the scales of, got {KINDS[form]}; "
    assert f"{said}compile the checkpoint that it was made from" in quantized.refused(folder)
    (folder / "quantize_config.json").write_text(json.dumps(own))  # as early AutoGPTQ does
    copy = "copy quantize_config.json there with its quant_method, 'gptq' or 'awq', or compile the"
    assert f"{said}{copy} checkpoint that it was made from" in quantized.refused(folder)
