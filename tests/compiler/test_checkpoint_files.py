"""Files of a checkpoint that do not fit each other, or that are no files."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph.compiler.checkpoint_files import INDEX, WHOLE, stored_tensors
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.found_instead import INSTEAD
from kvgraph.errors import KVGraphError, ModelError, UnsupportedError
from tests.support import quantized
from tests.support.models import make_model
from tests.support.plans import plan

QUERIES = "model.layers.0.self_attn.q_proj.weight"
NORM = "model.norm.weight"


@pytest.fixture
def folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(model_folder("llama"), tmp_path / "model"))


def refused(folder: Path, kind: type[KVGraphError] = ModelError) -> str:
    with pytest.raises(kind) as error:
        huggingface.load(folder, "float32", weightless=True)
    return str(error.value)


def change(folder: Path, name: str, dtype: torch.dtype) -> None:
    tensors = load_file(folder / WHOLE)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.int16, "I16"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.complex64, "C64"),
    ],
)
def test_a_weight_that_is_no_float(dtype: torch.dtype, kind: str, folder: Path) -> None:
    change(folder, QUERIES, dtype)
    assert refused(folder, UnsupportedError) == (
        f"{folder}: {QUERIES}: expected floats of 16, 32 or 64 bits in a plain weight, got {kind}; "
        "save the model in its own dtype"
    )


@pytest.mark.parametrize(("dtype", "kind"), [(torch.uint8, "U8"), (torch.uint32, "U32")])
def test_a_weight_that_may_be_packed(dtype: torch.dtype, kind: str, folder: Path) -> None:
    """As bitsandbytes and MLX pack 4 bits: no one can save it in floats."""
    change(folder, QUERIES, dtype)
    assert refused(folder, UnsupportedError) == (
        f"{folder}: {QUERIES}: expected floats of 16, 32 or 64 bits in a plain weight, got {kind}; "
        f"{INSTEAD}"
    )


def test_a_weight_under_another_name_that_is_no_float(folder: Path) -> None:
    """Names of a model without a head are those of its parameters without a prefix."""
    change(folder, QUERIES, torch.int64)
    tensors = load_file(folder / WHOLE)
    shorter = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(shorter, folder / WHOLE, metadata={"format": "pt"})
    said = f"{QUERIES}: expected floats of 16, 32 or 64 bits in a plain weight, got int64;"
    assert said in refused(folder, UnsupportedError)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(QUERIES, torch.float64), (QUERIES, torch.bfloat16), (NORM, torch.int64)],
)
def test_weights_in_other_types_that_are_read(name: str, dtype: torch.dtype, folder: Path) -> None:
    change(folder, name, dtype)
    huggingface.load(folder, "float32", weightless=True)


def in_two_shards(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors, and the shard of each; the files are written."""
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    names = sorted(tensors)
    shards = {n: f"{'ab'[i % 2]}.safetensors" for i, n in enumerate(names)}
    for shard in set(shards.values()):
        own = {n: tensors[n] for n in names if shards[n] == shard}
        save_file(own, folder / shard, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": shards}))
    return tensors, shards


def streamed(folder: Path) -> object:
    return huggingface.load(folder, "float32", weightless=True)


def describe(folder: Path) -> object:
    return plan(folder, max_seq_len=None)


def test_a_tensor_in_two_shards(folder: Path) -> None:
    tensors, shards = in_two_shards(folder)
    assert set(stored_tensors(folder)) == set(tensors)
    last = load_file(folder / "b.safetensors")
    name = next(name for name, shard in shards.items() if shard == "a.safetensors")
    save_file(last | {name: tensors[name] * 2}, folder / "b.safetensors", {"format": "pt"})
    assert refused(folder) == (
        f"{folder}: {name}: expected one shard with this tensor, got a.safetensors and "
        "b.safetensors; download the shards of one checkpoint"
    )
    shards[name] = "b.safetensors"  # as transformers takes it: from the last shard
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()[name]
    assert torch.equal(loaded, tensors[name] * 2)
    found = streamed(folder).checkpoint.values  # type: ignore[attr-defined]
    (read,) = (values.read() for own, values in found.items() if own.endswith(name))
    assert torch.equal(read, loaded)


@pytest.mark.parametrize(
    ("shards", "got"),
    [
        ({}, "none"),
        ({NORM: 3}, "int 3"),
        ({NORM: ["a.safetensors"]}, "list ['a.safetensors']"),
        ({NORM: None}, "NoneType None"),
    ],
)
def test_an_index_without_names_of_shards(
    shards: dict[str, object], got: str, folder: Path
) -> None:
    in_two_shards(folder)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    expected = f"{folder}/{INDEX}: weight_map: expected the name of each tensor's file, got {got}"
    assert refused(folder) == expected


def move(folder: Path, name: str, to: str) -> None:
    """Move a tensor to the shard `to`, or remove it if `to` is empty; the index stays."""
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:
            moved = tensors.pop(name)
            save_file(tensors, path, metadata={"format": "pt"})
    if to:
        others = load_file(folder / to) if (folder / to).is_file() else {}
        save_file(others | {name: moved}, folder / to, metadata={"format": "pt"})


def misplaced(folder: Path, name: str, shard: str, got: str) -> str:
    return (
        f"{folder}/{INDEX}: weight_map: expected {name} in {shard}, got it in {got}; download the "
        "index and the shards of one checkpoint"
    )


PLACES = {
    "c.safetensors": "c.safetensors, which the index does not name",
    "": "no file of the folder",
}


@pytest.mark.parametrize("to", PLACES)
@pytest.mark.parametrize(
    "read",
    [
        lambda folder: huggingface.load(folder, "float32"),
        describe,
        *(
            lambda folder, given=given: kvgraph.compile(folder, folder / "out", **given)
            for given in (
                {},
                {"backend": "torch", "weights": "int8"},
                {"target": "cuda:sm_90", "check": False},
                {"target": "cuda:sm_90", "backend": "onnx", "check": False},
            )
        ),
    ],
    ids=["loaded", "plan", "onnx", "torch", "cuda", "cuda-onnx"],
)
def test_a_tensor_in_another_place_than_the_index_says(
    read: Callable[[Path], object], to: str, folder: Path
) -> None:
    _, shards = in_two_shards(folder)
    name = next(name for name, shard in shards.items() if shard == "a.safetensors")
    move(folder, name, to)
    with pytest.raises(ModelError) as error:
        read(folder)
    assert str(error.value) == misplaced(folder, name, "a.safetensors", PLACES[to])


def test_a_tensor_in_another_shard_of_the_index(folder: Path) -> None:
    """It is the tensor of this name, and transformers reads it too."""
    expected = kvgraph.compile(folder, folder / "first").files["weights.safetensors"]
    _, shards = in_two_shards(folder)
    name = next(name for name, shard in shards.items() if shard == "a.safetensors")
    move(folder, name, "b.safetensors")
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    huggingface.load(folder, "float32")
    found = kvgraph.compile(folder, folder / "second").files["weights.safetensors"]
    assert found == expected


@pytest.mark.parametrize("read", [streamed, describe])
@pytest.mark.parametrize(
    ("form", "part"),
    [
        ("gptq", "g_idx"),
        ("gptq", "scales"),
        ("awq", "qzeros"),
        ("w4a16-zero-points", "weight_zero_point"),
        ("fp8-channel", "weight_scale"),
        ("nvfp4", "weight_scale_2"),
    ],
)
def test_a_part_of_a_quantised_weight_that_only_the_index_names(
    form: str, part: str, read: Callable[[Path], object], folder: Path, tmp_path: Path
) -> None:
    made = quantized.make(form, folder, tmp_path / form)
    _, shards = in_two_shards(made)
    name = QUERIES.removesuffix("weight") + part
    move(made, name, "")
    with pytest.raises(ModelError) as error:
        read(made)
    assert str(error.value) == misplaced(made, name, shards[name], PLACES[""])


@pytest.mark.parametrize("weightless", [True, False])
def test_an_expert_that_only_the_index_names(weightless: bool, tmp_path: Path) -> None:
    """Its parameter is made of several tensors, and an error about it names none of them."""
    sizes = {"num_local_experts": 4, "num_experts_per_tok": 2}
    made = make_model("mixtral", tmp_path / "model", **sizes)
    _, shards = in_two_shards(made)
    name = next(name for name in shards if ".experts.2." in name)
    move(made, name, "")
    with pytest.raises(ModelError) as error:
        huggingface.load(made, "float32", weightless=weightless)
    assert str(error.value) == misplaced(made, name, shards[name], PLACES[""])


def test_a_tensor_without_use_that_only_the_index_names(folder: Path) -> None:
    """As where a part of a model was taken out of its shards."""
    tensors, shards = in_two_shards(folder)
    more = {"visual.blocks.0.weight": "b.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": shards | more}))
    for weightless in (True, False):
        huggingface.load(folder, "float32", weightless=weightless)
    plan(folder, max_seq_len=None)
    move(folder, next(iter(tensors)), "")
    assert f"expected {next(iter(tensors))} in " in refused(folder)


FILES = ("config.json", "tokenizer.json", "generation_config.json", WHOLE)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(("make", "kind"), [(os.mkfifo, "pipe"), (os.mkdir, "folder")])
@pytest.mark.parametrize("is_linked", [False, True])
def test_what_is_no_file(
    name: str, make: Callable[[Path], None], kind: str, is_linked: bool, folder: Path
) -> None:
    (folder / name).unlink(missing_ok=True)
    make(folder / "other" if is_linked else folder / name)
    if is_linked:
        (folder / name).symlink_to("other")
    assert refused(folder) == (
        f"{folder / name}: expected a file, got a {kind}; remove it, or put the file in its place"
    )


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_a_circle(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(name)
    assert refused(folder) == (
        f"{folder / name}: expected the file, got a link to {name}, which leads in a circle; "
        "download it again"
    )


@pytest.mark.parametrize(
    ("given", "beyond"), [(9999, "9999"), (-1, "-1"), ([2, 256, 9999], "256, 9999"), (2, "")]
)
def test_end_tokens_that_the_model_does_not_have(given: object, beyond: str, folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    model = huggingface.load(folder, "float32", weightless=True)
    said = f"end tokens: the model's table of {model.vocab_size} rows has none for {beyond}"
    found = [note for note in model.notes if note.startswith("end tokens: ")]
    assert found == ([said] if beyond else [])
