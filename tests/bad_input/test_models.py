"""Model folders that compile refuses: their weights, files and architectures."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvgraph.compiler import pipeline
from kvgraph.compiler.checkpoint_files import stored_tensors
from kvgraph.compiler.frontends.folder import QUANTIZED
from kvgraph.errors import ModelError
from tests.bad_input.damage import NORM, PRECOMPILED, configure, refused, retokenize, sentence
from tests.support import gguf_files
from tests.support.command_line import run
from tests.support.models import COMMON

ModelFolder = Callable[[str], Path]


def test_missing_model_folder(tmp_path: Path) -> None:
    model = tmp_path / "nowhere"
    expected = f"{model}: expected a model folder, got nothing there"
    assert refused(model, tmp_path) == expected


def test_folder_without_config(tmp_path: Path) -> None:
    model = tmp_path / "empty"
    model.mkdir()
    expected = f"{model}: expected config.json in a model folder, got none"
    assert refused(model, tmp_path) == expected


def test_an_artifact_in_place_of_a_model(tmp_path: Path) -> None:
    artifact = tmp_path / "tiny.kvg"
    artifact.mkdir()
    (artifact / "manifest.json").write_text("{}")
    expected = (
        f"{artifact}: expected config.json in a model folder, got a compiled artifact; "
        f"kvgraph inspect {artifact} shows it"
    )
    assert either(tmp_path, artifact) == expected


def test_the_hubs_cache_in_place_of_a_model(tmp_path: Path) -> None:
    kept = tmp_path / "models--a--b" / "snapshots" / "0123"
    kept.mkdir(parents=True)
    (kept / "config.json").write_text("{}")
    cache = tmp_path / "models--a--b"
    expected = f"{cache}: expected config.json in a model folder, got the Hub's cache of it; "
    assert refused(cache, tmp_path) == f"{expected}give {kept}"


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_file_that_git_lfs_keeps(name: str, model: Path, tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n"
    (model / name).write_bytes(pointer)
    expected = f"{model / name}: expected the file, got a pointer of git-lfs to it; fetch it with "
    assert refused(model, tmp_path) == f"{expected}git lfs pull"
    (tmp_path / "x.gguf").write_bytes(pointer)
    assert "x.gguf: expected the file, got a pointer of" in refused(tmp_path / "x.gguf", tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "expected JSON, got a damaged file"),
        (b'{"model_type": "llama", "hidden', "expected JSON, got a damaged file"),
        (b'{"model_type": "ll\xff\xfema"}', "expected JSON, got a damaged file"),
        (b"[1, 2]", "expected a model_type, got none"),
        (b"{}", "expected a model_type, got none"),
        (b'{"model_type": ["llama"]}', "expected a model_type, got none"),
    ],
)
def test_damaged_config(model: Path, tmp_path: Path, content: bytes, message: str) -> None:
    (model / "config.json").write_bytes(content)
    assert refused(model, tmp_path).startswith(f"{model}/config.json: {message}")


def test_config_that_transformers_refuses(model: Path, tmp_path: Path) -> None:
    configure(model, hidden_size="wide")
    assert refused(model, tmp_path).startswith(f"{model}/config.json: ")


@pytest.mark.parametrize("length", [1 << 31, 10**12])
def test_a_context_that_no_graph_has(model: Path, tmp_path: Path, length: int) -> None:
    configure(model, max_position_embeddings=length)
    assert either(tmp_path, model) == (
        f"config.json: max_position_embeddings: expected at most 2147483647, got {length}; correct "
        "it, or give --max-seq-len"
    )


@pytest.mark.parametrize("keep", [0, 5, 1000, 4_000_000])
def test_truncated_weights(model: Path, tmp_path: Path, keep: int) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert refused(model, tmp_path).startswith(f"{model}: cannot read the weights: ")


def test_missing_weights(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    text = refused(model, tmp_path)
    assert text.startswith(f"{model}: expected weights in model.safetensors or ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"got none for some, such as {NORM}"),
        (
            lambda tensors: tensors.update({NORM: tensors[NORM][:3].copy()}),
            rf"got other shapes than its config.json says, such as .*{NORM}.*\[3\].*\[128\]",
        ),
    ],
    ids=["missing", "mismatched"],
)
def test_incomplete_weights(
    model: Path, tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    change(tensors)
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    text = refused(model, tmp_path)
    assert re.fullmatch(rf"{model}: expected weights for every parameter, {message}.*", text)


# -- compile: what is no checkpoint


def either(tmp_path: Path, model: Path | str) -> str:
    """The sentence in which both compile and plan refuse a model."""
    text = refused(Path(model), tmp_path)
    assert sentence(run("plan", model, "--memory", "1GiB")) == text
    return text


def test_a_name_on_the_hub(tmp_path: Path) -> None:
    assert either(tmp_path, "meta-llama/Llama-3-8B") == (
        "meta-llama/Llama-3-8B: expected a model folder, got nothing there; if it is a name on the "
        "Hugging Face hub, download it first: hf download meta-llama/Llama-3-8B --local-dir DIR"
    )


@pytest.mark.parametrize("beside", ["adapter_config.json", "config.json"])
def test_a_lora_adapter(model: Path, tmp_path: Path, beside: str) -> None:
    """Also where a model lies next to it: transformers would look for the adapter's base."""
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    if beside == "adapter_config.json":
        (model / "config.json").unlink()
        said = "config.json in a model folder, got a LoRA adapter; merge it into its base model"
    else:
        said = (
            "a model folder, got a model and a LoRA adapter in one; if the model is the merged "
            "one, move adapter_config.json and the adapter's weights away, else merge the adapter "
            "into its base model"
        )
    assert either(tmp_path, model) == (
        f"{model}: expected {said} (peft: merge_and_unload, then save_pretrained) and compile that "
        "folder"
    )


def test_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    for name in ("gguf/b.gguf", "gguf/a.gguf", "unnamed"):
        (tmp_path / name).write_bytes(b"GGUF\x03\0\0\0")
    assert either(tmp_path, tmp_path / "gguf") == (
        f"{tmp_path}/gguf: expected config.json in a model folder, got 2 GGUF files, a.gguf, "
        "b.gguf; give one of them"
    )
    for name in ("gguf/a.gguf", "unnamed"):
        expected = f"{tmp_path}/{name}: expected a GGUF file, {gguf_files.DAMAGED}"
        assert either(tmp_path, tmp_path / name) == expected
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert either(tmp_path, tmp_path / "weights.safetensors").endswith(
        "expected a model folder, got a file; give the folder that holds config.json"
    )


@pytest.mark.parametrize("method", ["bitsandbytes", "quanto", "gguf", None])
@pytest.mark.parametrize("where", ["quantization_config", "text_config"])
def test_quantised_checkpoints(model: Path, tmp_path: Path, method: str | None, where: str) -> None:
    quantised: dict[str, Any] = {"quantization_config": {"quant_method": method, "file": "/a.gguf"}}
    configure(model, **(quantised if where == "quantization_config" else {where: quantised}))
    got = f"a checkpoint quantised by {method!r}" if method else "no quant_method"
    file = "give its .gguf file if there is one, or " if method == "gguf" else ""
    assert either(tmp_path, model) == (
        f"{model}/config.json: quantization_config: expected one of {list(QUANTIZED)}, got {got}; "
        f"{file}compile the checkpoint that it was made from, with --weights int4 or int8"
    )


@pytest.mark.parametrize("names", [["quantization"], ["quantization", "quantization_config"]])
def test_checkpoints_of_mlx(model: Path, tmp_path: Path, names: list[str]) -> None:
    configure(model, **{name: {"group_size": 64, "bits": 4} for name in names})
    assert either(tmp_path, model) == (
        f"{model}/config.json: quantization: expected none, got a checkpoint of MLX (mlx-lm); "
        "compile the checkpoint that it was made from, with --weights int4 or int8"
    )


@pytest.mark.parametrize(
    ("more", "got", "form"),
    [
        ({"packing_format": "auto_round:fp8"}, "'auto_round:fp8'", "auto_gptq"),
        (
            {"packing_format": "auto_round:llm_compressor"},
            "'auto_round:llm_compressor'",
            "llm_compressor",
        ),
        (
            {"packing_format": "auto_round:auto_gptq", "rotation_config": {"backend": "auto"}},
            "'auto_round:auto_gptq' with one",
            "auto_gptq",
        ),
        ({}, "None", "auto_gptq"),
    ],
)
def test_forms_of_auto_round(
    model: Path, tmp_path: Path, more: dict[str, Any], got: str, form: str
) -> None:
    configure(model, quantization_config={"quant_method": "auto-round", "bits": 4, **more})
    assert either(tmp_path, model) == (
        f"{model}/config.json: quantization_config: expected a packing_format of "
        f"['auto_round:auto_awq', 'auto_round:auto_gptq'] without a rotation_config, got {got}; "
        f'export it with format="{form}", or compile the checkpoint that it was made from, '
        "with --weights int4 or int8"
    )


def test_a_pipe_in_place_of_the_configuration(model: Path, tmp_path: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert either(tmp_path, model) == (
        f"{model}/config.json: expected a file, got a pipe; remove it, or put the file in its place"
    )


INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


def write_index(model: Path, index: str, shard: str) -> None:
    tensors = ["model.embed_tokens.weight", "model.norm.weight"]
    (model / index).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))


@pytest.mark.parametrize("index", INDEXES)
@pytest.mark.parametrize("shard", ["../secret", "{tmp_path}/secret", "link", "folder/secret", ".."])
def test_an_index_that_leads_out_of_the_folder(
    model: Path, tmp_path: Path, index: str, shard: str
) -> None:
    shard = shard.format(tmp_path=tmp_path)
    (model / "model.safetensors").rename(tmp_path / "secret")
    (model / "link").symlink_to("../secret")
    (model / "folder").symlink_to(tmp_path)
    write_index(model, index, shard)
    assert refused(model, tmp_path) == (
        f"{model}/{index}: expected shards inside the folder, got {shard!r}, which leads out of it"
    )


def test_a_snapshot_of_the_hub_s_cache_is_no_way_out(model: Path, tmp_path: Path) -> None:
    """There every file is a link into the folder of blobs next to it."""
    hub = tmp_path / "models--a--b"
    (hub / "blobs").mkdir(parents=True)
    (hub / "snapshots").mkdir()
    snapshot_folder = hub / "snapshots" / "0123"
    shutil.copytree(model, snapshot_folder)
    (snapshot_folder / "model.safetensors").rename(hub / "blobs" / "cafe")
    (snapshot_folder / "shard.safetensors").symlink_to("../../blobs/cafe")
    write_index(snapshot_folder, INDEXES[0], "shard.safetensors")
    assert stored_tensors(snapshot_folder).keys() == stored_tensors(model).keys()
    (snapshot_folder / "shard.safetensors").unlink()
    (snapshot_folder / "shard.safetensors").symlink_to("../../../secret")
    with pytest.raises(ModelError, match="leads out of it"):
        stored_tensors(snapshot_folder)


# -- compile: the model's other files


def test_damaged_tokenizer(model: Path, tmp_path: Path) -> None:
    path = model / "tokenizer.json"
    path.write_bytes(path.read_bytes()[:3000])
    text = refused(model, tmp_path)
    assert text.startswith(f"{path}: expected a tokenizer, got a damaged one (")


def test_a_tokenizer_that_panics(model: Path, tmp_path: Path) -> None:
    retokenize(model / "tokenizer.json", normalizer=PRECOMPILED)
    text = refused(model, tmp_path)
    assert text.startswith(f"{model}/tokenizer.json: expected a tokenizer, got a damaged one (Prec")


# -- compile: the architecture


def assert_unsupported(text: str, architecture: str, why: str) -> None:
    """Named, with what is supported, and why it is not."""
    assert text.startswith(f"architecture {architecture!r}: expected ")
    assert "llama, qwen2, qwen3, mistral, gemma2" in text
    assert re.search(f"{why}$", text), text


@pytest.mark.parametrize(
    ("architecture", "why"),
    [
        ("t5", "it is not a causal decoder"),
        ("whisper", "it is not a causal decoder"),
        ("mamba", "its attention has no interface"),
        ("bloom", "its attention has no interface"),
        ("mpt", "its attention has no interface"),
        ("deepseek_v32", r"its sparse attention \(index_topk\) has no kernel yet"),
        ("musicgen", "it has several text configurations, or one for each layer"),
        ("perceptron", "transformers does not know it"),
    ],
)
def test_unsupported_architecture(tmp_path: Path, architecture: str, why: str) -> None:
    """The configuration is enough to know: no weights are read."""
    configure(tmp_path / "model", model_type=architecture)
    assert_unsupported(refused(tmp_path / "model", tmp_path), architecture, why)


def test_a_part_that_transformers_does_not_have_alone(tmp_path: Path) -> None:
    part = {"text_config": {"model_type": "qwen2_5_omni_text"}}
    configure(tmp_path / "model", model_type="qwen2_5_omni", thinker_config=part)
    why = "transformers has no model of this part alone"
    assert_unsupported(refused(tmp_path / "model", tmp_path), "qwen2_5_omni_text", why)


@pytest.mark.parametrize(
    ("architecture", "layer_types", "why"),
    [
        ("bert", None, "its attention is not causal"),
        ("lfm2", ["conv", "full_attention"], "attention of 1 of 2 layers reaches the interface"),
        (
            "llama",
            ["full_attention", "sliding_attention"],
            "layer 1 is sliding_attention, which its attention does not say",
        ),
    ],
)
def test_attention_that_has_no_kernel(
    tmp_path: Path, architecture: str, layer_types: list[str] | None, why: str
) -> None:
    """Only the model's own code shows it, run on fake tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(architecture, **(COMMON | {"num_hidden_layers": 2}))
    if layer_types:
        config.layer_types = layer_types
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    assert_unsupported(refused(tmp_path / "model", tmp_path), architecture, why)


def test_an_encoder_whose_weights_have_no_head(tmp_path: Path) -> None:
    """What it is comes before what its weights lack."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.for_model("bert", **(COMMON | {"num_hidden_layers": 2}))
    AutoModel.from_config(config).save_pretrained(tmp_path / "model")
    text = refused(tmp_path / "model", tmp_path)
    assert_unsupported(text, "bert", "its attention is not causal")


def test_operator_that_the_exporter_lacks(tmp_path: Path, model_folder: ModelFolder) -> None:
    """The cause of its error, without its page of advice and without addresses of objects."""
    import torch.onnx

    missing = f"No ONNX function found for {run}."
    assert " at 0x" in missing

    def lower(*_: Any) -> None:
        try:
            raise torch.onnx.OnnxExporterError(missing)
        except torch.onnx.OnnxExporterError as error:
            raise torch.onnx.OnnxExporterError("Failed.\nNext steps:\n- debug it") from error

    with mock.patch.object(pipeline, "bind_lower", return_value=lower):
        outcome = run("compile", model_folder("llama"), "-o", tmp_path / "out")
    assert outcome.code == 2
    last = outcome.err.splitlines()[-1]
    assert last.startswith("kvgraph: architecture 'llama': expected operators that the onnx ")
    cause = "No ONNX function found for <function run>"
    assert last.endswith(f"{cause}; write it with other operators")
    assert not list(tmp_path.iterdir())
