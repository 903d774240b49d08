"""What a user can get wrong: one sentence with both values, exit code 2, nothing half-written."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from command_line import COMMAND, Outcome, run
from models import COMMON

import kvgraph
from kvgraph.compiler import pipeline
from kvgraph.compiler.output import PREFIX, staging
from kvgraph.compiler.shards import stored_tensors
from kvgraph.contract.manifest import hash_file, read_manifest
from kvgraph.contract.params import LAYOUT_FIELDS, KVCacheParams, KVCacheQuantization
from kvgraph.contract.plain import to_json
from kvgraph.errors import (
    ArtifactError,
    BindingError,
    KVGraphError,
    ModelError,
    ParamsError,
    UnsupportedError,
)
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime.artifact import Artifact

Compiled = Callable[..., Path]
ModelFolder = Callable[[str], Path]


def sentence(outcome: Outcome) -> str:
    """The one sentence of a refusal, without its prefix."""
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert re.fullmatch(r"kvgraph: \S[^\n]*\n", outcome.err), outcome.err
    return outcome.err.removeprefix("kvgraph: ").removesuffix("\n")


def snapshot(folder: Path) -> dict[str, Any]:
    """Every path under `folder`, hidden ones too, with its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


# -- compile: the model


def refused(model: Path, tmp_path: Path, *options: Any) -> str:
    """The sentence of a compile that leaves everything as it was."""
    out = tmp_path / "out" / "model.kvg"
    before = snapshot(tmp_path)
    text = sentence(run("compile", model, "-o", out, *options))
    assert snapshot(tmp_path) == before
    assert not out.exists()
    return text


@pytest.fixture
def model(tmp_path: Path, model_folder: ModelFolder) -> Path:
    """A copy of tiny-llama's checkpoint to damage."""
    return Path(shutil.copytree(model_folder("tiny-llama"), tmp_path / "model"))


def configure(folder: Path, **changes: Any) -> None:
    """Write config.json, or change fields of the one that is there (None removes one)."""
    path = folder / "config.json"
    folder.mkdir(exist_ok=True)
    config = json.loads(path.read_text()) if path.exists() else {}
    config |= changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))


def test_missing_model_folder(tmp_path: Path) -> None:
    model = tmp_path / "nowhere"
    expected = f"{model}: expected a model folder, got nothing there"
    assert refused(model, tmp_path) == expected


def test_folder_without_config(tmp_path: Path) -> None:
    model = tmp_path / "empty"
    model.mkdir()
    expected = f"{model}: expected config.json in a model folder, got none"
    assert refused(model, tmp_path) == expected


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


@pytest.mark.parametrize("keep", [0, 5, 1000, 4_000_000])
def test_truncated_weights(model: Path, tmp_path: Path, keep: int) -> None:
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    assert refused(model, tmp_path).startswith(f"{model}: cannot read the weights: ")


def test_missing_weights(model: Path, tmp_path: Path) -> None:
    (model / "model.safetensors").unlink()
    text = refused(model, tmp_path)
    assert text.startswith(f"{model}: cannot read the weights: ")
    assert "model.safetensors" in text


NORM = "model.layers.2.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(NORM), f"got missing_keys such as {NORM}"),
        (
            lambda tensors: tensors.update({NORM: tensors[NORM][:3].copy()}),
            rf"got mismatched_keys such as .*{NORM}.*\[3\].*\[128\]",
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

GGUF = "compile the checkpoint that it was made from, with --weights int4 or int8"


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
    """Also where its base's configuration lies next to it: transformers would look for the base."""
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "a/b"}')
    if beside == "adapter_config.json":
        (model / "config.json").unlink()
    assert either(tmp_path, model) == (
        f"{model}: expected config.json in a model folder, got a LoRA adapter; merge it into its "
        "base model (peft: merge_and_unload, then save_pretrained) and compile that folder"
    )


def test_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "gguf").mkdir()
    for name in ("gguf/b.gguf", "gguf/a.gguf", "unnamed"):
        (tmp_path / name).write_bytes(b"GGUF\x03\0\0\0")
    expected = f"{tmp_path}/gguf: expected config.json in a model folder, got the GGUF file a.gguf"
    assert either(tmp_path, tmp_path / "gguf") == f"{expected}; {GGUF}"
    for name in ("gguf/a.gguf", "unnamed"):
        expected = (
            f"{tmp_path}/{name}: expected a model folder, got the GGUF file {Path(name).name}"
        )
        assert either(tmp_path, tmp_path / name) == f"{expected}; {GGUF}"
    (tmp_path / "weights.safetensors").write_bytes(b"")
    assert either(tmp_path, tmp_path / "weights.safetensors").endswith(
        "expected a model folder, got a file; give the folder that holds config.json"
    )


@pytest.mark.parametrize("method", ["gptq", "awq", "bitsandbytes", "compressed-tensors", None])
@pytest.mark.parametrize("where", ["quantization_config", "text_config"])
def test_quantised_checkpoints(model: Path, tmp_path: Path, method: str | None, where: str) -> None:
    quantised: dict[str, Any] = {"quantization_config": {"quant_method": method, "bits": 4}}
    configure(model, **(quantised if where == "quantization_config" else {where: quantised}))
    assert either(tmp_path, model) == (
        f"{model}/config.json: quantization_config: expected plain weights, got a checkpoint "
        f"quantised by {method!r}; compile the one that it was made from, with --weights int4 or "
        "int8"
    )


def test_a_pipe_in_place_of_the_configuration(model: Path, tmp_path: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    assert either(tmp_path, model) == f"{model}: expected config.json in a model folder, got none"


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


PRECOMPILED = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
"""At which the library panics, with an exception that is no Exception."""


def retokenize(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


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
        ("deepseek_v2", r"its latent attention \(MLA\) has no kernel yet"),
        ("musicgen", "Multiple valid text configs were found.*"),
        ("perceptron", "transformers does not know it"),
    ],
)
def test_unsupported_architecture(tmp_path: Path, architecture: str, why: str) -> None:
    """The configuration is enough to know: no weights are read."""
    configure(tmp_path / "model", model_type=architecture)
    assert_unsupported(refused(tmp_path / "model", tmp_path), architecture, why)


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


def test_operator_that_the_exporter_lacks(tmp_path: Path, model_folder: ModelFolder) -> None:
    """The cause of its error, not its page of advice."""
    import torch.onnx

    def lower(*_: Any) -> None:
        try:
            raise torch.onnx.OnnxExporterError("No ONNX function found for aten.x")
        except torch.onnx.OnnxExporterError as error:
            raise torch.onnx.OnnxExporterError("Failed.\nNext steps:\n- debug it") from error

    with mock.patch.object(pipeline, "lowering", return_value=lower):
        outcome = run("compile", model_folder("llama"), "-o", tmp_path / "out")
    assert outcome.code == 2
    last = outcome.err.splitlines()[-1]
    assert last.startswith("kvgraph: architecture 'llama': expected operators that the onnx ")
    assert last.endswith("No ONNX function found for aten.x")
    assert not list(tmp_path.iterdir())


# -- compile: options


@pytest.mark.parametrize("page_size", [0, -16, 65537])
def test_page_size_that_the_kernels_lack(
    model_folder: ModelFolder, tmp_path: Path, page_size: int
) -> None:
    text = refused(model_folder("tiny-llama"), tmp_path, "--page-size", page_size)
    assert text == f"page_size: expected 1 to 65536 tokens from the cpu kernels, got {page_size}"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cpu:avx512", "target: expected 'cpu' without an instruction set, got 'cpu:avx512'"),
        ("cuda", "target 'cuda': expected one of ['sm_75', "),
        ("cuda:sm_1", "target 'cuda:sm_1': expected one of ['sm_75', "),
        ("tpu", "target: expected kind cpu or cuda, got 'tpu'"),
    ],
)
def test_target(model_folder: ModelFolder, tmp_path: Path, target: str, message: str) -> None:
    text = refused(model_folder("tiny-llama"), tmp_path, "--target", target)
    assert text.startswith(message)


@pytest.mark.parametrize("option", ["--dtype", "--cache-dtype"])
def test_a_choice_that_is_not_one(tmp_path: Path, option: str) -> None:
    """The option parser's own message: what it expected, and what it got."""
    outcome = run("compile", tmp_path, "-o", tmp_path / "x", option, "int4")
    assert (outcome.code, outcome.out) == (2, "")
    assert option in outcome.err
    assert "int4" in outcome.err
    assert not list(tmp_path.iterdir())


TENSORRT = {"backend": "tensorrt", "target": "cuda:sm_86"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "tensorrt"},
            r"backend: .* \['onnx', 'torch'\] for target cpu, got 'tensorrt'",
        ),
        ({"dtype": "int4"}, r"dtype: expected one of \['float32', .*\], got 'int4'"),
        (
            {"cache_dtype": "int4"},
            r"cache_dtype: expected one of \['float32', .*\] for a paged cache, got 'int4'",
        ),
        (
            {"max_batch": 8},
            "max_batch: expected none for backend onnx, whose graph takes .*, got 8",
        ),
        (
            {"max_tokens": 8, "backend": "torch"},
            "max_tokens: expected none for backend torch, .* 8",
        ),
        (TENSORRT | {"max_batch": 0}, "max_batch: expected 1 to 4096, got 0"),
        (TENSORRT | {"max_batch": 4097}, "max_batch: expected 1 to 4096, got 4097"),
        (TENSORRT | {"max_tokens": 0}, "max_tokens: expected 1 to 1048576, got 0"),
        (TENSORRT | {"max_batch": 8, "max_tokens": 7}, "max_tokens: expected 8 to 1048576, got 7"),
    ],
)
def test_compile_function(
    model_folder: ModelFolder, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


# -- compile: the output folder


def test_output_that_exists_is_kept(tmp_path: Path, model_folder: ModelFolder) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    command = ("compile", model_folder("tiny-llama"), "-o", out)
    expected = f"{out}: expected no such folder yet, got one (kept); use --force"
    assert sentence(run(*command)) == expected
    expected = f"{out}: expected an artifact or an empty folder to replace, got something else"
    assert sentence(run(*command, "--force")) == f"{expected} (kept)"
    assert snapshot(tmp_path) == before


def test_output_that_is_a_file_is_kept(tmp_path: Path, model_folder: ModelFolder) -> None:
    out = tmp_path / "precious"
    out.write_text("mine")
    for options in ([], ["--force"]):
        text = sentence(run("compile", model_folder("tiny-llama"), "-o", out, *options))
        assert text.startswith(f"{out}: expected ")
    assert out.read_text() == "mine"


def test_output_that_appears_during_the_compile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "late"
    made = staging(out, force=False)
    (made.__enter__() / "new").write_text("new")
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(ArtifactError, match="expected no such folder yet, got one"):
        made.__exit__(None, None, None)
    assert snapshot(tmp_path) == {"late": None, "late/precious": b"mine"}


@pytest.mark.parametrize("error", [UnsupportedError("no"), KeyboardInterrupt(), OSError("full")])
def test_a_compile_that_fails_in_the_middle_leaves_nothing(
    tmp_path: Path, model_folder: ModelFolder, error: BaseException
) -> None:
    def lower(traced: Any, folder: Path) -> None:
        (folder / "weights.safetensors").write_text("half")
        raise error

    with (
        mock.patch.object(pipeline, "lowering", return_value=lower),
        pytest.raises(type(error)),
    ):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_killed_in_the_middle(tmp_path: Path, model_folder: ModelFolder) -> None:
    """Nothing that reads as an artifact is left; the next compile works and removes the rest."""
    out = tmp_path / "model.kvg"
    command = [*COMMAND, "compile", str(model_folder("llama")), "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (left := sorted(tmp_path.glob(f"{PREFIX}*/made"))):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    assert [path.is_dir() for path in left] == [True]
    assert not out.exists()
    assert sentence(run("verify", out)) == f"{out}: expected an artifact folder, got nothing there"
    text = sentence(run("verify", left[0]))
    assert text.startswith(f"{left[0]}: expected manifest.json in an artifact, got none (not an ")
    assert "did not finish" in text

    assert run("compile", model_folder("llama"), "-o", out, "--page-size", 16).code == 0
    assert os.listdir(tmp_path) == ["model.kvg"]
    assert run("verify", out).code == 0


# -- artifacts: their files

FILES = (
    "generation_config.json",
    "model.onnx",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "weights.safetensors",
)


@pytest.fixture
def artifact(tmp_path: Path, compiled: Compiled) -> Path:
    """A copy of tiny-llama's artifact to damage."""
    return Path(shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact"))


def edit_manifest(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change fields as a program would that writes manifests: the hash is right again."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    edit(fields)
    fields["sha256"] = hashlib.sha256(to_json(fields)).hexdigest()
    path.write_text(json.dumps(fields))


def test_these_are_all_files(artifact: Path) -> None:
    manifest = kvgraph.load(artifact).manifest
    assert tuple(manifest.files) == FILES
    assert sorted(os.listdir(artifact)) == sorted([*FILES, "manifest.json"])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_changed_byte(artifact: Path, name: str, place: float) -> None:
    path = artifact / name
    content = bytearray(path.read_bytes())
    before = hashlib.sha256(content).hexdigest()
    content[int(place * (len(content) - 1))] ^= 1
    path.write_bytes(content)
    after = hashlib.sha256(content).hexdigest()
    assert sentence(run("verify", artifact)) == (
        f"{path}: chunk 0: expected SHA-256 {before[:16]} from the manifest, got {after[:16]}: "
        "the file was changed"
    )
    with pytest.raises(ArtifactError, match="the file was changed"):
        kvgraph.Engine(artifact)
    assert kvgraph.load(artifact, verify=False).folder == artifact


@pytest.mark.parametrize("bit", [0x01, 0x20, 0x80])
def test_a_changed_byte_of_the_manifest(artifact: Path, bit: int) -> None:
    """Wherever it is, unless it is white space between fields and stays that."""
    path = artifact / "manifest.json"
    content = path.read_bytes()
    intact = read_manifest(artifact)
    unnoticed = 0
    for at, byte in enumerate(content):
        path.write_bytes(content[:at] + bytes([byte ^ bit]) + content[at + 1 :])
        try:
            assert read_manifest(artifact) == intact
            unnoticed += 1
            assert chr(byte).isspace()
        except ArtifactError as error:
            assert str(error).startswith(f"{path}: ")
    assert unnoticed < 0.02 * len(content)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file(artifact: Path, name: str) -> None:
    size = (artifact / name).stat().st_size
    (artifact / name).unlink()
    expected = f"{artifact / name}: expected {size} bytes from the manifest, got none"
    assert sentence(run("verify", artifact)) == expected


@pytest.mark.parametrize("change", [-1, 1, 1000])
def test_a_file_of_another_size(artifact: Path, change: int) -> None:
    path = artifact / "weights.safetensors"
    size = path.stat().st_size
    os.truncate(path, size + change)
    expected = f"{path}: expected {size} bytes from the manifest, got {size + change}"
    assert sentence(run("verify", artifact)) == expected


@pytest.mark.parametrize("name", ["../outside", "{tmp_path}/outside", "link", "folder/outside"])
def test_a_path_that_leaves_the_folder(artifact: Path, tmp_path: Path, name: str) -> None:
    """By its name, or by a link; although the file is there and its hash is right."""
    name = name.format(tmp_path=tmp_path)
    (tmp_path / "outside").write_text("secret")
    (artifact / "link").symlink_to(tmp_path / "outside")
    (artifact / "folder").symlink_to(tmp_path)
    entry = {"size": 6, "chunks": [hashlib.sha256(b"secret").hexdigest()]}
    edit_manifest(artifact, lambda fields: fields["files"].update({name: entry}))
    expected = f"{artifact}: expected files inside the folder, got {name!r}"
    assert sentence(run("verify", artifact)) == expected


def test_a_file_replaced_by_a_link_to_the_outside(artifact: Path, tmp_path: Path) -> None:
    path = artifact / "weights.safetensors"
    path.rename(tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    expected = f"{artifact}: expected files inside the folder, got 'weights.safetensors'"
    assert sentence(run("verify", artifact)) == expected


# -- artifacts: the manifest


@pytest.mark.parametrize("command", [("verify",), ("inspect",), ("generate",)])
def test_no_artifact(tmp_path: Path, command: tuple[str]) -> None:
    rest = ("text",) if command == ("generate",) else ()
    nowhere = tmp_path / "nowhere"
    expected = f"{nowhere}: expected an artifact folder, got nothing there"
    assert sentence(run(*command, nowhere, *rest)) == expected
    expected = f"{tmp_path}: expected manifest.json in an artifact, got none"
    assert sentence(run(*command, tmp_path, *rest)).startswith(expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("version", [0, 1, 99])
def test_another_schema(artifact: Path, version: int) -> None:
    """Said first, whatever else another schema has."""

    def edit(fields: dict[str, Any]) -> None:
        fields.clear()
        fields.update(schema_version=version, novelty=[1])

    edit_manifest(artifact, edit)
    for command in ("verify", "inspect"):
        expected = f"schema_version: expected 2 from this kvgraph, got {version}"
        assert sentence(run(command, artifact)) == f"{artifact}/manifest.json: {expected}"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"null", b"[]", b"{}", b'{"schema_version": "one"}', b"\xff\xfe", b'{"a": "\xff"}'],
)
def test_a_damaged_manifest(artifact: Path, content: bytes) -> None:
    (artifact / "manifest.json").write_bytes(content)
    text = sentence(run("verify", artifact))
    assert text.startswith(f"{artifact}/manifest.json: expected a manifest, got a damaged one (")


def test_a_truncated_manifest(artifact: Path) -> None:
    path = artifact / "manifest.json"
    path.write_bytes(path.read_bytes()[:-100])
    assert "got a damaged one" in sentence(run("verify", artifact))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda fields: fields.pop("model"), r"model: expected ModelInfo, got none"),
        (
            lambda fields: fields["model"].update(vocab_size="many"),
            r"model\.vocab_size: expected int, got 'many'",
        ),
        (lambda fields: fields.update(files=[]), r"files: expected dict, got \[\]"),
    ],
)
def test_a_manifest_of_other_fields(
    artifact: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit_manifest(artifact, edit)
    text = sentence(run("verify", artifact))
    assert re.search(f"expected a manifest, got a damaged one .*{message}", text), text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("target", "cpu:avx2", "target: expected 'cpu' from this machine's .*'cpu:avx2'"),
        ("op_abi_version", 77, r"op_abi_version: expected \d+ from this kvgraph, got 77"),
    ],
)
def test_an_artifact_for_another_machine(
    artifact: Path, field: str, value: Any, message: str
) -> None:
    edit_manifest(artifact, lambda fields: fields.update({field: value}))
    text = sentence(run("generate", artifact, "The"))
    assert re.fullmatch(f"{artifact}/manifest.json: {message}", text)
    with pytest.raises(ArtifactError, match=message):
        kvgraph.load(artifact, verify=False)
    assert run("inspect", artifact).code == 0


def test_an_artifact_of_an_unknown_backend(artifact: Path) -> None:
    edit_manifest(artifact, lambda fields: fields.update(backend="neuron"))
    text = sentence(run("generate", artifact, "The"))
    assert text == (
        f"{artifact}/manifest.json: backend: expected one of ['onnx', 'torch', 'tensorrt'], got "
        "'neuron'; the package that adds it must be installed here"
    )


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m["files"].pop("model.onnx"), "files: expected model.onnx for backend 'onnx'"),
        (
            lambda m: m["model"].update(vocab_size=7),
            r"bindings: expected logits float32 \['num_logits', 7\]",
        ),
        (lambda m: m["layout"].update(page_size="16"), "layout.page_size: expected int, got '16'"),
        (lambda m: m["layout"].update(flavour=1), "layout: expected fields of a cache.*flavour"),
        (lambda m: m["inputs"][3].update(device="cpu:x"), "layout and bindings: .*cpu.*|.*'x'"),
        (
            lambda m: m["inputs"].pop(),
            "bindings: expected max_lengths int32 .*, got logits float32",
        ),
        (lambda m: m["inputs"][3].update(dims=[1]), "bindings: expected .*kv_blocks"),
    ],
)
def test_a_manifest_that_contradicts_itself(
    artifact: Path, edit: Callable[[dict[str, Any]], Any], message: str
) -> None:
    edit_manifest(artifact, edit)
    text = sentence(run("verify", artifact))
    assert re.search(message, text), text


# -- params that differ


@pytest.fixture(scope="module")
def loaded(compiled: Compiled) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


DIFFERENT: dict[str, Any] = {
    "dtype": "bfloat16",
    "n_kv_heads": 2,
    "head_dim": 32,
    "num_layers": 3,
    "page_size": 128,
    "is_mla": True,
    "quantization": KVCacheQuantization("int8"),
}
"""Layout fields that a buffer's type shows."""


@pytest.mark.parametrize("field", DIFFERENT)
def test_a_buffer_of_another_type_is_not_allocated(loaded: Artifact, field: str) -> None:
    params = loaded.params()
    assert isinstance(params, KVCacheParams)
    other = replace(params, **{field: DIFFERENT[field]})
    symbol = other.get_symbolic_inputs()[0].kv_blocks
    with pytest.raises(BindingError) as caught:
        loaded.session().allocate(symbol, {"num_page_slots": 9})
    mine, theirs = (
        f"kv_blocks {s.dtype} {list(s.shape)} on cpu:0"
        for s in (params.get_symbolic_inputs()[0].kv_blocks, symbol)
    )
    assert str(caught.value) == f"kv_blocks: expected {mine} from the artifact, got {theirs}"


OTHER_LAYOUTS = DIFFERENT | {"window_size": 64, "v_head_dim": 8, "cache_strategy": "continuous"}


@pytest.mark.parametrize("field", OTHER_LAYOUTS)
def test_require_layout_names_the_field_and_both_values(loaded: Artifact, field: str) -> None:
    params = loaded.params()
    assert isinstance(params, KVCacheParams)
    params.require_layout(loaded.manifest.layout, source="the artifact")
    changes = {field: OTHER_LAYOUTS[field]}
    if field == "head_dim":
        changes["v_head_dim"] = params.v_head_dim
    other = replace(params, **changes)
    expected, got = loaded.manifest.layout[field], other.layout_dict()[field]
    message = re.escape(f"{field}: expected {expected!r} from the artifact, got {got!r}")
    with pytest.raises(ParamsError, match=f"^{message}$"):
        other.require_layout(loaded.manifest.layout, source="the artifact")
    if field != "cache_strategy":  # a paged manager takes paged params
        with pytest.raises(ParamsError, match=f"^{message}$"):
            PagedKVCacheManager(other, loaded.session(), 8, max_batch_size=1)
    assert {*OTHER_LAYOUTS, "layout", "n_shards"} == set(LAYOUT_FIELDS)


def test_shards_of_an_artifact_for_one_device(loaded: Artifact) -> None:
    devices = [kvgraph.Device("cpu:0"), kvgraph.Device("cpu:1")]
    with pytest.raises(ParamsError, match="n_shards: expected 1 from the layout, got 2"):
        loaded.params(devices)


# -- generate


LONG = "The import statement. " * 1000


def test_more_threads_than_the_machine_has(loaded: Artifact) -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(kvgraph.RequestError, match=f"expected 1 to {cores} .*, got 5000"):
        loaded.session(num_threads=5000)


@pytest.mark.parametrize("prompt", [b"abc", [1.5], [None], "\udcff"])
def test_prompts_of_another_kind(loaded: Artifact, prompt: Any) -> None:
    engine = kvgraph.Engine(loaded, num_pages=8)
    with pytest.raises(kvgraph.RequestError, match="prompt: expected text"):
        engine.submit(prompt)
    assert not engine.busy


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([""], "request 'request-0': expected a prompt, got an empty one"),
        (
            [LONG],
            r"request 'request-0': expected a prompt of at most 2047 tokens \(the model's "
            r"max_seq_len is 2048\), got \d{4,}",
        ),
        (
            ["The import statement " * 10, "--num-pages", 1],
            r"request 'request-0': expected at most 1 pages from the pool, got \d+ tokens "
            r"\(prompt and output\) that need \d+",
        ),
        (["The", "--num-pages", 0], "num_pages: expected >= 1 or None, got 0"),
        (["The", "--num-pages", 1 << 40], r"Unable to allocate .*iB.*"),
        (
            ["The", "--session", "tensorrt"],
            r"session: expected one of \['onnxruntime', 'reference'\] for an artifact of backend "
            "'onnx', got 'tensorrt'",
        ),
        (
            ["The", "--session", "torch"],
            r"session: expected one of \['onnxruntime', 'reference'\] .*got 'torch'",
        ),
        (["The", "--max-new-tokens", 0], "max_new_tokens: expected >= 1, got 0"),
        (["The", "--temperature", -1], r"temperature: expected >= 0 and finite, got -1.0"),
        (["The", "--temperature", "nan"], r"temperature: expected >= 0 and finite, got nan"),
        (["The", "--top-k", -2], "top_k: expected >= 0, got -2"),
        (["The", "--top-p", 0], r"top_p: expected in \(0, 1\], got 0.0"),
        (["The", "--top-p", 1.5], r"top_p: expected in \(0, 1\], got 1.5"),
        (["The", "--seed", -1], "seed: expected >= 0 or None, got -1"),
    ],
)
def test_generate(compiled: Compiled, arguments: Sequence[Any], message: str) -> None:
    for options in ([], ["--json"]):
        text = sentence(run("generate", compiled("tiny-llama"), *arguments, *options))
        assert re.fullmatch(message, text), text


@pytest.mark.parametrize("option", ["--top-k", "--seed", "--max-new-tokens", "--num-pages"])
def test_a_value_that_is_no_number(compiled: Compiled, option: str) -> None:
    outcome = run("generate", compiled("tiny-llama"), "The", option, "many")
    assert (outcome.code, outcome.out) == (2, "")
    assert option in outcome.err


def test_text_without_a_tokenizer(artifact: Path) -> None:
    """Token ids still work, and have no text."""
    (artifact / "tokenizer.json").unlink()
    edit_manifest(artifact, lambda fields: fields["files"].pop("tokenizer.json"))
    assert sentence(run("generate", artifact, "The")) == (
        f"{artifact}: expected tokenizer.json for a text prompt, got none; pass token ids"
    )
    completion = kvgraph.Engine(artifact, num_pages=8).generate([[5, 6, 7]])[0]
    assert completion.token_ids
    assert completion.text == ""


def test_a_damaged_tokenizer_in_an_artifact(artifact: Path) -> None:
    path = artifact / "tokenizer.json"
    path.write_text("{}")
    entry = {"size": 2, "chunks": [hashlib.sha256(b"{}").hexdigest()]}
    edit_manifest(artifact, lambda fields: fields["files"].update({path.name: entry}))
    text = sentence(run("generate", artifact, "The"))
    assert text.startswith(f"{path}: expected a tokenizer, got a damaged one (")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"normalizer": PRECOMPILED}, r"expected a tokenizer, got a damaged one \(Precompiled: "),
        (
            {"post_processor": {"type": "TemplateProcessing", "special_tokens": {}, "pair": [],
                                "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}]}},
            r"expected a tokenizer that encodes the text, got one that fails \(no entry found",
        ),
        (
            {"model": {"type": "WordLevel", "unk_token": "[U]", "vocab": {"a": 0}}},
            r"expected a tokenizer that encodes the text, got one that fails \(WordLevel error",
        ),
    ],
)  # fmt: skip
def test_a_tokenizer_of_an_artifact_that_fails(
    artifact: Path, changes: dict[str, Any], message: str
) -> None:
    path = artifact / "tokenizer.json"
    retokenize(path, **changes)
    edit_manifest(artifact, lambda fields: fields["files"].update({path.name: rehashed(path)}))
    text = sentence(run("generate", artifact, "The"))
    assert re.match(f"{path}: {message}", text), text


def rehashed(path: Path) -> dict[str, Any]:
    entry = hash_file(path)
    return {"size": entry.size, "chunks": entry.chunks}


# -- the shape of it, from outside


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compile", "{here}/[bold]:cat:", "-o", "{here}/x"], "expected a model folder, got"),
        (["verify", "{here}/[bold]:cat:"], "expected an artifact folder, got nothing there"),
    ],
)
def test_a_process_exits_with_2_and_one_sentence(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    """Paths are printed as they are, whatever markup they look like."""
    command = [*COMMAND, *(argument.format(here=tmp_path) for argument in arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    text = sentence(Outcome(done.returncode, done.stdout, done.stderr))
    assert text.startswith(f"{tmp_path}/[bold]:cat:: {message}")
    assert not list(tmp_path.iterdir())


def test_the_libraries_stay_silent(tmp_path: Path, model: Path) -> None:
    """transformers reports missing weights on its own; only our sentence comes out."""
    from safetensors.numpy import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    del tensors[NORM]
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    command = [*COMMAND, "compile", str(model), "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert NORM in sentence(Outcome(done.returncode, done.stdout, done.stderr))
    assert os.listdir(tmp_path) == ["model"]


def test_errors_are_value_errors_too() -> None:
    """So that a caller that knows nothing of kvgraph can catch them."""
    for error in (ModelError, UnsupportedError, ArtifactError, BindingError, ParamsError):
        assert issubclass(error, KVGraphError)
        assert issubclass(error, ValueError)
