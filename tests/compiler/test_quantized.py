"""Checkpoints in fewer bits: each stands for the numbers that its package says, or is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph.compiler import quantized as readers
from kvgraph.compiler import values
from kvgraph.compiler.checkpoint_files import stored_tensors
from kvgraph.compiler.frontends import folder as folders
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.folder import read_config
from kvgraph.compiler.quantized import weights_of
from tests.support import quantized


def state(folder: Path) -> dict[str, torch.Tensor]:
    return huggingface.load(folder, "float32").module.state_dict()


def test_every_method_has_a_reader() -> None:
    assert tuple(sorted(readers.METHODS)) == folders.QUANTIZED


CASES = [("llama", form) for form in quantized.FORMS if form != "mxfp4"]
CASES += [("qwen3_moe", "w4a16"), ("qwen3_moe", "fp8"), ("mixtral", "gptq"), ("gpt_oss", "mxfp4")]


@pytest.mark.parametrize(("architecture", "form"), CASES)
def test_weights_are_those_that_it_stands_for(
    architecture: str,
    form: str,
    plain: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the last bit, read in pieces that cut groups and blocks."""
    monkeypatch.setattr(values, "PIECE_BYTES", 11 * 64 * 4)
    folder, meant = tmp_path / "packed", tmp_path / "meant"
    quantized.make(form, plain(architecture), folder, meant)
    found, expected = state(folder), state(meant)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_decoded_experts_run_like_the_model_that_they_stand_for(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Compile's own check, whatever the layers are kept in."""
    forms = {"w4a16": "int4", "w8a8": "stored", "fp8": None, "mxfp8": None, "mxfp4-modelopt": None}
    for form, weights in forms.items():
        folder = quantized.make(form, plain("qwen3_moe"), tmp_path / form)
        out = tmp_path / f"{form}.kvg"
        manifest = kvgraph.compile(folder, out, page_size=16, weights=weights)
        assert manifest.weights == (weights or "stored")
        method = quantized.FORMS[form][0]["quant_method"]
        said = [
            n for n in manifest.notes if n.startswith(f"weights: the checkpoint's are {method}, ")
        ]
        assert len(said) == 1
        assert manifest.notes[-1].startswith("check: logits of two ragged rows")


Edit = Callable[[dict[str, torch.Tensor]], object]
LAYER = "model.layers.1.mlp.up_proj"


def cut(name: str) -> Edit:
    return lambda tensors: tensors.update({name: tensors[name][1:].clone()})


def put(name: str, number: float) -> Edit:
    return lambda tensors: tensors[name].view(-1).__setitem__(3, number)


def cast(name: str, dtype: torch.dtype) -> Edit:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


def add(name: str, *shape: int) -> Edit:
    return lambda tensors: tensors.update({name: torch.ones(*shape, dtype=torch.int32)})


@pytest.mark.parametrize(
    ("form", "edit", "message"),
    [
        (
            "gptq",
            lambda t: t.pop(f"{LAYER}.scales"),
            f"expected {LAYER}.scales beside {LAYER}.qweight, as gptq stores a weight, got none",
        ),
        (
            "gptq",
            cut(f"{LAYER}.qzeros"),
            "expected [2, 12] from the tensors beside it, got [1, 12]",
        ),
        ("awq", cast(f"{LAYER}.qweight", torch.float), "qweight: expected int32, got F32"),
        ("awq", cast(f"{LAYER}.qzeros", torch.int64), "qzeros: expected int32, got I64"),
        ("gptq", cast(f"{LAYER}.qweight", torch.half), "qweight: expected int32, got F16"),
        ("gptq", cast(f"{LAYER}.g_idx", torch.half), "g_idx: expected int32 or int64, got F16"),
        ("w4a16", cast(f"{LAYER}.weight_packed", torch.float), "expected int32 or uint8, got F32"),
        ("fp8", cast(f"{LAYER}.weight_scale_inv", torch.int32), "floats or exponents, got I32"),
        ("gptq", put(f"{LAYER}.g_idx", 2), "g_idx: expected groups 0 to 1, got 0 to 2"),
        (
            "gptq-act-order",
            lambda t: t[f"{LAYER}.g_idx"].fill_(0),
            f"{LAYER}.g_idx: expected one, as desc_act says, got one that is not filled in",
        ),
        (
            "fp8-inverse",
            put(f"{LAYER}.weight_scale_inv", 0),
            "weight_scale_inv[3]: expected a finite scale, got inf",
        ),
        *(
            (form, put(f"{LAYER}.scales", bad), f"scales[0, 3]: expected a finite scale, got {bad}")
            for form, bad in (("gptq", math.nan), ("awq", math.inf))
        ),
        ("w4a16", put(f"{LAYER}.weight_scale", math.nan), "expected a finite scale, got nan"),
        ("fp8", put(f"{LAYER}.weight", math.nan), "weight[0, 3]: expected a finite number"),
        (
            "w4a16",
            lambda t: t[f"{LAYER}.weight_shape"].fill_(5),
            "weight_shape: expected 96 outputs and its inputs, got [5, 5]",
        ),
        ("awq", cut(f"{LAYER}.scales"), "qzeros: expected [1, 12] from the tensors beside it"),
        ("w4a16", cut(f"{LAYER}.weight_scale"), "expected [96, 2] or [1] or [] from the tensors"),
        (
            "w4a16",
            lambda t: t.pop(f"{LAYER}.weight_shape"),
            f"expected {LAYER}.weight_shape beside",
        ),
        ("w8a8", lambda t: t.pop(f"{LAYER}.weight"), f"expected {LAYER}.weight beside {LAYER}.wei"),
        ("fp8", cut(f"{LAYER}.weight_scale_inv"), "from the tensors beside it, got [1, 2]"),
        (
            "fp8",
            lambda t: t.pop(f"{LAYER}.weight_scale_inv"),
            f"expected {LAYER}.weight_scale_inv b",
        ),
        ("nvfp4", cut(f"{LAYER}.weight_scale"), "weight_scale: expected [96, 4] from the tensors"),
        (
            "nvfp4",
            lambda t: t.pop(f"{LAYER}.weight_scale_2"),
            f"expected {LAYER}.weight_scale_2 beside {LAYER}.weight_scale",
        ),
        (
            "nvfp4",
            lambda t: t.update({f"{LAYER}.pre_quant_scale": torch.ones(64)}),
            f"modelopt: {LAYER}.pre_quant_scale: expected none, got scales that activations are",
        ),
        (
            "nvfp4",
            lambda t: t.update({f"{LAYER}.svdquant_lora_a": torch.ones(4, 64)}),
            f"modelopt: {LAYER}.svdquant_lora_a: expected none, got a part of low rank; ",
        ),
        (
            "nvfp4",
            lambda t: t.update({f"{LAYER}.weight_scale": torch.ones(96, 2)}),
            f"{LAYER}.weight: expected NVFP4, MXFP4, FP8 or MXFP8, got U8 with scales in F32; ",
        ),
        ("nvfp4", put(f"{LAYER}.weight_scale", math.nan), "expected a finite scale, got nan"),
        (
            "nvfp4-packed",
            lambda t: t[f"{LAYER}.weight_global_scale"].zero_(),
            "weight_global_scale[0]: expected a finite scale, got inf",
        ),
        (
            "nvfp4-packed",
            lambda t: t.update({f"{LAYER}.weight_global_scale": torch.ones(96)}),
            "weight_global_scale: expected [] or [1] from the tensors beside it, got [96]",
        ),
        ("mxfp8", put(f"{LAYER}.weight_scale", 255), "expected a finite scale, got nan"),
        ("mxfp4-packed", put(f"{LAYER}.weight_scale", 255), "expected a finite scale, got nan"),
        (
            "w8a8",
            add(f"{LAYER}.weight_g_idx", 63),
            "weight_g_idx: expected [64] from the tensors beside it, got [63]",
        ),
        (
            "fp8-group",
            add(f"{LAYER}.weight_g_idx", 64),
            f"compressed-tensors: {LAYER}.weight_g_idx: expected none, got a part of {LAYER}.weight"
            " that is not read; compile the checkpoint that it was made from",
        ),
        *(
            (
                form,
                add(f"{LAYER}.weight_zero_point", 96, 2),
                f"{LAYER}.weight_zero_point: expected none, got a part of {LAYER}.weight that is n",
            )
            for form in ("fp8-channel", "mxfp4-packed", "nvfp4-packed", "nvfp4")
        ),
    ],
)
def test_damaged_weights(
    form: str, edit: Edit, message: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = quantized.refused(folder)
    assert message in said
    assert said.endswith(quantized.INSTEAD)


def changed(
    folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], **config: Any
) -> dict[str, torch.Tensor]:
    """Edits the tensors, and the quantization_config; what the weights then are."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    given = json.loads((folder / "config.json").read_text())
    given["quantization_config"] |= config
    (folder / "config.json").write_text(json.dumps(given))
    found, _ = weights_of(folder, read_config(folder), stored_tensors(folder))
    return {name: values.read() for name, values in found.items()}


def test_scales_that_are_exponents(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("fp8", plain("llama"), tmp_path / "packed")
    meant: dict[str, torch.Tensor] = {}

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_scale_inv")]:
            exponents = tensors[name].log2().round()
            tensors[name] = (exponents + 127).to(torch.uint8)
            weight = tensors[name.removesuffix("_scale_inv")]
            spread = exponents.exp2().repeat_interleave(64, 0).repeat_interleave(32, 1)
            height, width = weight.shape
            meant[name.removesuffix("_scale_inv")] = weight.float() * spread[:height, :width]

    found = changed(folder, edit, scale_fmt="ue8m0")
    assert meant
    for name, weight in meant.items():
        assert torch.equal(found[name], weight)


def require_groups_out_of_order(
    folder: Path, groups_of: Callable[[int], torch.Tensor], **config: Any
) -> None:
    """Gives its bytes groups, `groups_of` that many inputs, and reads what they stand for."""
    meant: dict[str, torch.Tensor] = {}

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            outputs, inputs = tensors[name].shape
            index = groups_of(inputs)
            scales = torch.rand(outputs, int(index.max()) + 1)
            tensors |= {f"{name}_scale": scales, f"{name}_g_idx": index.int()}
            meant[name] = tensors[name].float() * scales[:, index]

    found = changed(folder, edit, **config)
    assert meant
    for name, weight in meant.items():
        assert torch.equal(found[name], weight)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_zero_points_that_are_not_packed(
    dtype: torch.dtype, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Their shape says so: the package writes int32 where `zp_dtype` asks for it."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

    def unpack(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("weight_zero_point")]:
            shape = tensors[name.replace("zero_point", "scale")].shape
            tensors[name] = (
                unpack_from_int32(tensors[name], 4, shape, packed_dim=0).to(dtype).contiguous()
            )

    folder = quantized.make("w4a16-zero-points", plain("llama"), tmp_path / "packed")
    expected, found = changed(folder, lambda tensors: None), changed(folder, unpack)
    assert any(name.endswith("down_proj.weight") for name in expected)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight)


def test_bytes_in_groups_out_of_order(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("w8a8", plain("llama"), tmp_path / "packed")
    require_groups_out_of_order(folder, lambda inputs: torch.randperm(inputs) % 2)


def test_uneven_groups_out_of_order(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """The index says how many inputs each has; one that was never filled does not."""
    folder = quantized.make("w8a8", plain("llama"), tmp_path / "packed")
    weights = {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 40}
    scheme = {"group_0": {"targets": ["Linear"], "weights": weights}}
    require_groups_out_of_order(
        folder, lambda inputs: torch.randperm(inputs) // 40, config_groups=scheme
    )
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_g_idx")]:
        tensors[name].fill_(-1)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert "expected groups of 40 that divide the " in quantized.refused(folder)


def test_what_older_exports_say_beside_the_configuration(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("nvfp4", plain("llama"), tmp_path / "packed")
    path, beside = folder / "config.json", folder / "hf_quant_config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    said = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": said}))
    expected = state(quantized.make("nvfp4", plain("llama"), tmp_path / "newer"))
    for name, tensor in state(folder).items():
        assert torch.equal(tensor, expected[name])
    for text, message in (("[]", "expected quantization, an object"), ("{", "expected JSON")):
        beside.write_text(text)
        assert f"{beside}: {message}" in quantized.refused(folder)


def test_zero_points_of_0_borrow_from_the_next(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Words of zero points have a word of ones subtracted, as GPTQModel packs them."""
    folder = quantized.make("gptq", plain("llama"), tmp_path / "packed")
    name = f"{LAYER}.qzeros"

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        zeros = torch.tensor([0, 3, 0, 0, 15, 8, 1, 0]).repeat(tensors[name].shape[1])
        words = quantized.packed(zeros, 4).long() - 0x11111111
        tensors[name][:] = (words & 0xFFFFFFFF).to(torch.uint32).view(torch.int32)

    weight = changed(folder, edit)[f"{LAYER}.weight"]
    tensors = load_file(folder / "model.safetensors")
    packed, scales = tensors[f"{LAYER}.qweight"], tensors[f"{LAYER}.scales"].float()
    first = (packed[0] >> 0) & 15  # the first input of each output
    group = int(tensors[f"{LAYER}.g_idx"][0])
    zeros = torch.tensor([0, 3, 0, 0, 15, 8, 1, 0]).repeat(len(first) // 8)
    assert torch.equal(weight[:, 0], (first - zeros) * scales[group])


def test_scales_of_an_activation_are_refused(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("awq", plain("llama"), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.act.scales"] = torch.ones(4)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    said = "mlp.act.scales: expected scales of weights alone, got scales of an activation; "
    assert said in quantized.refused(folder)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("weight_block_size", [64], "two sizes, got [64]"),
        ("weight_block_size", "64x32", "two sizes, got '64x32'"),
        ("weight_block_size", [64, 0], "two sizes, got [64, 0]"),
        ("config_groups", ["Linear"], "objects or lists by name, got ['Linear']"),
        ("config_groups", {"a": "b"}, "objects or lists by name, got {'a': 'b'}"),
        ("sparsity_config", "dense", "an object, got 'dense'"),
    ],
)
def test_fields_of_another_kind(
    name: str, value: object, expected: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("fp8", plain("llama"), tmp_path / "packed")
    given = json.loads((folder / "config.json").read_text())
    given["quantization_config"][name] = value
    (folder / "config.json").write_text(json.dumps(given))
    assert quantized.refused(folder).endswith(f"quantization_config: {name}: expected {expected}")


def test_a_scheme_by_its_name(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("w8a8", plain("llama"), tmp_path / "packed")
    before = changed(folder, lambda tensors: None)
    found = changed(folder, lambda tensors: None, config_groups={"W8A8": ["Linear"]})
    assert all(torch.equal(found[name], weight) for name, weight in before.items())
    kvgraph.compile(folder, tmp_path / "out", check=False)
