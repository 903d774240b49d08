"""Files of weights that are damaged, or that have names which nothing says."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph import ModelError
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.found_instead import INSTEAD
from tests.support import quantized
from tests.support.plans import plan

WHOLE, PICKLED = "model.safetensors", "pytorch_model.bin"


@pytest.fixture
def folder(model_folder: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(model_folder("llama"), tmp_path / "model")


def refused(folder: Path) -> str:
    with pytest.raises(ModelError) as error:
        huggingface.load(folder, "float32")
    return str(error.value)


ONE = "gptq_model-4bit-32g.safetensors"
SEVERAL = ("a.safetensors", "b.safetensors")


@pytest.mark.parametrize("is_quantized", [False, True])
@pytest.mark.parametrize(
    ("names", "said"),
    [
        ((ONE,), f"{ONE}; rename it to {WHOLE}"),
        (
            SEVERAL,
            f"{SEVERAL[0]} and 1 more; rename the one with all weights to {WHOLE}, or add "
            f"{WHOLE}.index.json, which names them",
        ),
    ],
)
def test_safetensors_of_another_name(
    is_quantized: bool, names: tuple[str, ...], said: str, folder: Path, tmp_path: Path
) -> None:
    if is_quantized:
        folder = quantized.make("gptq", folder, tmp_path / "packed")
    for name in names:
        shutil.copyfile(folder / WHOLE, folder / name)
    (folder / WHOLE).unlink()
    expected = f"{folder}: expected weights in {WHOLE} or {WHOLE}.index.json, got {said}"
    assert refused(folder) == quantized.refused(folder) == expected
    with pytest.raises(ModelError) as error:
        plan(folder, target="cpu", max_seq_len=None)
    assert str(error.value) == expected
    (folder / names[0]).rename(folder / WHOLE)
    kvgraph.compile(folder, tmp_path / "out", check=False)


INDEX = f"{WHOLE}.index.json"
LAYOUT = "; give the checkpoint in transformers' layout, in safetensors"
SHARD = "model-0000{}-of-00003.safetensors"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (
            (SHARD.format(2), "consolidated.safetensors"),
            f"1 of 3 shards, such as {SHARD.format(2)}, and no index; fetch {INDEX}, "
            f"{SHARD.format(1)}, {SHARD.format(3)}",
        ),
        (
            [SHARD.format(i) for i in (1, 2, 3)],
            f"3 of 3 shards, such as {SHARD.format(1)}, and no index; fetch {INDEX}",
        ),
        (
            ("model-00001-of-90000.safetensors",),
            "1 of 90000 shards, such as model-00001-of-90000.safetensors, and no index; fetch "
            f"{INDEX}, model-00002-of-90000.safetensors, model-00003-of-90000.safetensors, "
            "model-00004-of-90000.safetensors and 89996 more",
        ),
        (
            ("pytorch_model-00001-of-00002.bin",),
            "1 of 2 shards, such as pytorch_model-00001-of-00002.bin, and no index; fetch "
            f"{PICKLED}.index.json, pytorch_model-00002-of-00002.bin",
        ),
        (
            (SHARD.format(1), "model.safetensors.index.fp16.json"),
            f"the index model.safetensors.index.fp16.json; rename it to {INDEX}",
        ),
        (
            ("model-00001-of-00001.safetensors",),
            f"model-00001-of-00001.safetensors; rename it to {WHOLE}",
        ),
        (
            ("params.json", "consolidated.safetensors"),
            f"consolidated.safetensors, weights in the layout of the authors' own code{LAYOUT}",
        ),
        (
            [f"consolidated.0{i}.pth" for i in range(6)],
            "consolidated.00.pth, consolidated.01.pth, consolidated.02.pth, consolidated.03.pth "
            f"and 2 more, weights in the layout of the authors' own code{LAYOUT}",
        ),
        (("tf_model.h5",), f"tf_model.h5, weights of TensorFlow{LAYOUT}"),
        (("flax_model.msgpack",), f"flax_model.msgpack, weights of Flax{LAYOUT}"),
        (("qmodel.pt",), f"qmodel.pt, weights that HQQ quantised; {INSTEAD}"),
        (("model.onnx", "optimizer.pt"), f"model.onnx, a graph of ONNX{LAYOUT}"),
        (("q4.gguf", "mmproj.gguf"), "the GGUF file q4.gguf; give that file"),
        (
            ("adapter_model.safetensors",),
            "adapter_model.safetensors, a LoRA adapter; merge it into its base model (peft: "
            "merge_and_unload, then save_pretrained) and compile that folder",
        ),
    ],
)
def test_weights_in_place_of_those_that_are_read(
    names: Sequence[str], said: str, folder: Path
) -> None:
    (folder / WHOLE).unlink()
    for name in names:
        (folder / name).write_bytes(b"")
    expected = f"{folder}: expected weights in {WHOLE} or {INDEX}, got {said}"
    assert refused(folder) == expected
    with pytest.raises(ModelError) as error:
        plan(folder, target="cpu", max_seq_len=None)
    assert str(error.value) == expected


@pytest.mark.parametrize("name", [WHOLE, PICKLED, INDEX, "config.json", "tokenizer.json"])
def test_a_link_to_nothing(name: str, folder: Path) -> None:
    """A snapshot in a hub's cache whose blobs were pruned."""
    for own in {name} | ({WHOLE} if name in (PICKLED, INDEX) else set()):
        (folder / own).unlink(missing_ok=True)
    (folder / name).symlink_to("../../blobs/0123")
    assert refused(folder) == (
        f"{folder}/{name}: expected the file, got a link to ../../blobs/0123, which is gone; "
        "download it again"
    )


UNSAFE = pickle.dumps({"a": print}, protocol=2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "EOFError"),
        (b"<html>", "UnpicklingError"),
        (UNSAFE, "Unsupported global: GLOBAL "),
        (pickle.dumps({"a": print}), "UnpicklingError"),
        (pickle.dumps(5), "Invalid magic number; corrupt file?"),
    ],
)
@pytest.mark.parametrize("is_shard", [False, True])
def test_damaged_pickles(is_shard: bool, content: bytes, why: str, folder: Path) -> None:
    """No word of how to load one that runs code, and no warning."""
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    name = "shard.bin" if is_shard else PICKLED
    if is_shard:
        index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, name)}
        (folder / f"{PICKLED}.index.json").write_text(json.dumps(index))
    (folder / name).write_bytes(content)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = refused(folder)
    file = f"a shard of {PICKLED}.index.json" if is_shard else PICKLED
    expected = "expected tensors, got a damaged file, or one that holds code"
    assert said.startswith(f"{folder}: cannot read the weights: {file}: {expected} ({why}")
    assert said.endswith("); save the model as safetensors")
    assert "weights_only" not in said
    assert "safe_globals" not in said


@pytest.mark.parametrize("keep", [5000, 300_000])
def test_a_truncated_pickle(keep: int, folder: Path) -> None:
    torch.save(load_file(folder / WHOLE), folder / PICKLED)
    (folder / WHOLE).unlink()
    assert huggingface.load(folder, "float32").loaded == ""
    (folder / PICKLED).write_bytes((folder / PICKLED).read_bytes()[:keep])
    assert f"{PICKLED}: expected tensors, got a damaged file" in refused(folder)


@pytest.mark.parametrize("weightless", [False, True])
def test_no_weights_at_all(weightless: bool, folder: Path) -> None:
    (folder / WHOLE).unlink()
    with pytest.raises(ModelError) as error:
        huggingface.load(folder, "float32", weightless=weightless)
    assert str(error.value) == (
        f"{folder}: expected weights in {WHOLE} or {INDEX}, got none; take all files of the "
        "checkpoint from its publisher"
    )


STEM = "model.layers.0.self_attn.q_proj"
QUERIES = f"{STEM}.weight"
NORM = "model.layers.1.input_layernorm.weight"
ADAPTER = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
Tensors = dict[str, torch.Tensor]


@pytest.mark.parametrize("weightless", [False, True])
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        *(
            (
                lambda t, prefix=prefix: {prefix + name: t[name] for name in t},
                f"none for some, such as (.*); strip '{prefix}' from the names of tensors, as in "
                rf"{prefix}\1",
            )
            for prefix in ("_orig_mod.", "module.", "base_model.model.")
        ),
        (
            lambda t: {name.replace("1.input_layernorm", "1.ln"): t[name] for name in t},
            f"none for some, such as {NORM}; the first tensor without a place is "
            "model.layers.1.ln.weight",
        ),
        *(
            (
                lambda t, part=part: {name.replace(QUERIES, part): t[name] for name in t},
                f"none for some, such as {QUERIES}; it is stored in another form, with a part "
                f"{part}; {INSTEAD}",
            )
            for part in (
                f"{STEM}.codebooks",
                f"{STEM}.W_q",
                f"{STEM}.B",
                f"{STEM}.centroids.weight",
            )
        ),
        (
            lambda t: {name.replace(QUERIES, f"{STEM}.bias"): t[name] for name in t},
            f"none for some, such as {QUERIES}; the first tensor without a place is {STEM}.bias",
        ),
        (
            lambda t: (
                {f"base_model.model.{name}": t[name] for name in t} | {ADAPTER: torch.ones(8, 64)}
            ),
            f"none for some, such as .*; merge the LoRA adapter, such as {ADAPTER}, into its base "
            r"model \(peft: merge_and_unload, then save_pretrained\) and compile that folder",
        ),
        (
            lambda t: t | {NORM: torch.ones(3)},
            rf"other shapes than its config.json says, such as {NORM} \[3\] for \[64\]; take all "
            "files of the checkpoint from its publisher again",
        ),
    ],
)
def test_what_a_checkpoint_has_in_place_of_weights(
    edit: Callable[[Tensors], Tensors], said: str, weightless: bool, folder: Path
) -> None:
    """In the same words whoever reads them."""
    save_file(edit(load_file(folder / WHOLE)), folder / WHOLE, metadata={"format": "pt"})
    with pytest.raises(ModelError) as error:
        huggingface.load(folder, "float32", weightless=weightless)
    expected = f"{folder}: expected weights for every parameter, got {said}"
    assert re.fullmatch(expected, str(error.value))
