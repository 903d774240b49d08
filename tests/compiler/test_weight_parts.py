"""Each part of a weight in fewer bits that the configuration names is required, and a damaged one
is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import ModelError, UnsupportedError
from kvgraph.compiler.checkpoint_files import stored_tensors
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.folder import read_config
from kvgraph.compiler.frontends.left_plain import groups_for
from kvgraph.compiler.quantized import weights_of
from tests.support import quantized

Tensors = dict[str, torch.Tensor]
LAYER = "model.layers.1.mlp.up_proj"
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
EXPERTS = "model.layers.0.mlp.experts.down_proj"


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] |= fields
    path.write_text(json.dumps(config))


def store(folder: Path, tensors: Tensors) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name, None)
    store(folder, tensors)


def read(folder: Path) -> Tensors:
    """All weights, with their numbers as stored where they have a form."""
    found, _ = weights_of(folder, read_config(folder), stored_tensors(folder))
    for values in found.values():
        if values.form is not None:
            values.open_coded()(0, values.count)
    return {name: values.read() for name, values in found.items()}


def refused(folder: Path) -> str:
    with pytest.raises((ModelError, UnsupportedError)) as error:
        read(folder)
    return str(error.value)


def test_scales_of_nvfp4_need_their_factor(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("nvfp4-packed", plain("llama"), tmp_path / "packed")
    without(folder, f"{LAYER}.weight_global_scale")
    said = f"expected {LAYER}.weight_global_scale beside {LAYER}.weight_scale, as compressed-ten"
    assert said in refused(folder)


def group(*targets: str, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": quantized.GROUP}
    return {"targets": list(targets), "weights": given | weights}


ASYMMETRIC, SYMMETRIC = {"symmetric": False}, {"symmetric": True}


@pytest.mark.parametrize(
    ("groups", "is_refused"),
    [
        ({"a": group("Linear", **ASYMMETRIC)}, True),
        ({"a": group("Linear", **SYMMETRIC)}, False),
        ({"W4A16_ASYM": ["Linear"]}, True),
        ({"W4A16": ["Linear"]}, False),
        ({"a": group(LAYER, **ASYMMETRIC), "b": group("Linear", **SYMMETRIC)}, True),
        ({"a": group(r"re:.*up_proj", **SYMMETRIC), "b": group("Linear", **ASYMMETRIC)}, False),
        ({"a": group("re:(", **ASYMMETRIC), "b": group(r"re:.*mlp\.", **ASYMMETRIC)}, True),
        ({"a": group("Embedding", **SYMMETRIC), "b": group("Linear", **ASYMMETRIC)}, False),
        ({"a": {"targets": ["Linear"], "weights": None}}, False),
    ],
)
def test_zero_points_that_a_group_names(
    groups: dict[str, Any], is_refused: bool, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """A layer is of the groups that name it, else of those for its class; a class is not known
    here, so all of these must name the part."""
    folder = quantized.make("w4a16-zero-points", plain("llama"), tmp_path / "packed")
    configure(folder, config_groups=groups)
    read(folder)
    without(folder, f"{LAYER}.weight_zero_point")
    if not is_refused:
        read(folder)
        return
    assert refused(folder) == (
        f"{folder}: compressed-tensors: {LAYER}.weight_zero_point: expected one for weights that "
        f"are not symmetric, got none{quantized.INSTEAD}"
    )


@pytest.mark.parametrize("form", ["w4a16", "w8a16", "fp8-group", "nvfp4-packed"])
def test_an_order_of_inputs_that_a_group_names(
    form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    scheme = quantized.FORMS[form][0]["config_groups"]["group_0"]
    for order, is_refused in (("weight", False), ("group", True), (True, True)):
        weights = scheme["weights"] | {"actorder": order}
        configure(folder, config_groups={"group_0": scheme | {"weights": weights}})
        if not is_refused:
            read(folder)
            continue
        said = ".weight_g_idx: expected one, as actorder says, got none; "
        assert said in refused(folder)


def test_one_group_has_no_order(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("w8a16-channel", plain("llama"), tmp_path / "packed")
    configure(folder, config_groups={"a": group("Linear", num_bits=8, actorder="group")})
    read(folder)


def test_an_order_of_inputs_that_a_rule_names(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """GPTQ's `dynamic`: the first rule for a layer counts."""
    folder = quantized.make("gptq-act-order", plain("llama"), tmp_path / "packed")
    without(folder, f"{LAYER}.g_idx")
    rule = rf"+:.*{LAYER}"
    for everywhere, here in ((False, True), (True, True)):
        configure(folder, desc_act=everywhere, dynamic={rule: {"desc_act": here}, "(": {}})
        assert f"{LAYER}.g_idx: expected one, as desc_act says, got none; " in refused(folder)
    for everywhere, here in ((True, False), (False, False)):
        configure(folder, desc_act=everywhere, dynamic={rule: {"desc_act": here}, "(": {}})
        read(folder)


def test_a_part_with_a_dtype_that_is_not_read(plain: Callable[[str], Path], tmp_path: Path) -> None:
    folder = quantized.make("gptq", plain("llama"), tmp_path / "packed")
    tensors = load_file(folder / "model.safetensors")
    store(folder, tensors | {f"{LAYER}.g_idx": tensors[f"{LAYER}.g_idx"].to(torch.uint32)})
    assert f"{LAYER}.g_idx: expected a dtype that is read, got U32; " in refused(folder)


FP4 = ("mxfp4-modelopt", "mxfp4-packed", "nvfp4", "nvfp4-packed")
WHOLE = ("weight_global_scale", "weight_scale_2")
SCALES = (*WHOLE, "scale", "scales", "scale_inv")


def damages(form: str, name: str, part: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """What may be stored instead of a part, with a text for it. One scale for all numbers is a form
    of 8 bits and of integers."""
    plain = part.view(torch.uint8) if part.dtype.itemsize == 1 else part
    is_one = name.endswith(WHOLE) or (name.endswith(("scale", "scale_inv")) and form not in FP4)
    found = {f"dim {dim} of 0": plain.narrow(dim, 0, 0) for dim in range(part.dim())}
    found["no element"] = plain.flatten()[:0]
    found |= {} if is_one else {"a number": plain.flatten()[0]}
    found |= {} if is_one or part.dim() == 1 else {"one dim": plain.flatten()}
    yield from ((said, each.contiguous().view(part.dtype)) for said, each in found.items())
    is_scale = name.endswith(SCALES)
    yield "another type", part.float().to(torch.int32 if is_scale else torch.float32)
    if is_scale and part.dtype.is_floating_point:
        spoiled = part.float().clone()
        spoiled.view(-1)[0] = torch.nan
        yield "a NaN", spoiled.to(part.dtype)
    if name.endswith("weight_shape"):
        for other in ([96, 0], [96, -64], [96], [96, 64, 1], [2**40, 64], [96, torch.nan]):
            yield str(other), torch.tensor(other)


@pytest.mark.parametrize("form", quantized.FORMS)
def test_a_damaged_part_is_refused(form: str, plain: Callable[[str], Path], tmp_path: Path) -> None:
    """By one sentence; nothing is read as something else."""
    model = plain("gpt_oss" if form == "mxfp4" else "llama")
    folder = quantized.make(form, model, tmp_path / "packed")
    stem = f"{EXPERTS}_" if form == "mxfp4" else LAYER
    tensors = load_file(folder / "model.safetensors").items()
    parts = {name: part for name, part in tensors if name.startswith(stem)}
    parts = {n: p for n, p in parts.items() if not n.endswith(("input_scale", "_bias"))}
    store(folder, parts)
    read(folder)
    for name, part in parts.items():
        for said, damaged in damages(form, name, part):
            store(folder, parts | {name: damaged})
            try:
                read(folder)
            except (ModelError, UnsupportedError):
                continue
            pytest.fail(f"{name}: {said}: is read")


def test_stacked_experts_in_fp8(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """As modelopt stores those of gpt-oss: each parameter in the model's own layout."""
    model, folder, meant = plain("gpt_oss"), tmp_path / "packed", tmp_path / "meant"
    stored = load_file(model / "model.safetensors")
    decoded = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        scale = stored[name].abs().max().float() / 448
        numbers = (stored[name].float() / scale).to(torch.float8_e4m3fn)
        decoded[name] = numbers.float() * scale
        one = {f"{name}_weight_scale": scale, f"{name}_input_scale": torch.ones(())}
        stored |= {name: numbers, **one}
    quantized.save(model, folder, stored, MODELOPT)
    quantized.save(model, meant, decoded, None)
    notes = huggingface.load(folder, "float32", weightless=True).notes
    said = ["weights: the checkpoint's are modelopt, one scale"]
    assert [note for note in notes if note.startswith("weights: ")] == said
    found, expected = (huggingface.load(f, "float32").module.state_dict() for f in (folder, meant))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    kvgraph.compile(folder, tmp_path / "out", page_size=16)


@pytest.mark.parametrize(
    ("numbers", "scale", "got"),
    [
        (
            torch.ones(2, 4, 8, dtype=torch.uint8),
            torch.ones(2, 4, 1),
            "U8 with scales F32 [2, 4, 1]",
        ),
        (
            torch.ones(2, 4, 8).to(torch.float8_e4m3fn),
            torch.ones(2, 4),
            "F8_E4M3 with scales F32 [2, 4]",
        ),
    ],
)
def test_stacked_experts_in_other_forms(
    numbers: torch.Tensor,
    scale: torch.Tensor,
    got: str,
    plain: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = quantized.make("nvfp4", plain("llama"), tmp_path / "packed")
    store(folder, {EXPERTS: numbers, f"{EXPERTS}_weight_scale": scale})
    said = f"modelopt: {EXPERTS}: expected FP8 with one scale for stacked experts, got {got}; "
    assert said in refused(folder)


def test_experts_that_are_stored_one_by_one(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """gpt-oss has no such form in transformers."""
    model, folder = plain("gpt_oss"), tmp_path / "apart"
    stored = load_file(model / "model.safetensors")
    whole = "model.layers.0.mlp.experts.down_proj"
    alone = whole.replace("down_proj", "0.w2.weight")
    stored[alone] = stored.pop(whole)[0]
    quantized.save(model, folder, stored, None)
    said = (
        f"got none for some, such as {whole}; experts of this model are not read one by one from "
    )
    assert f"{said}tensors such as {alone}; compile the checkpoint" in quantized.refused(folder)


def test_groups_name_a_layer_as_the_model_does() -> None:
    """Which is saved under other names if it is a part of a larger one."""
    named = {"targets": ["re:model.language_model.*down_proj"], "weights": {"num_bits": 8}}
    groups = {"a": {"targets": ["Linear"], "weights": {"num_bits": 4}}, "b": named}

    def found(layer: str) -> list[str]:
        return [name for name, _ in groups_for({"config_groups": groups}, layer)]

    assert found("language_model.model.layers.0.mlp.down_proj") == ["b"]
    assert found("model.language_model.layers.0.mlp.down_proj") == ["b"]
    assert found("model.layers.0.mlp.down_proj") == ["b"]
    assert found("model.layers.0.mlp.up_proj") == ["a", "b"]
