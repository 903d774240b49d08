"""GGUF files: the model that transformers reads from them, or a refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from safetensors.torch import load_file

import kvgraph
from kvgraph import KVGraphError
from kvgraph.cli import app
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.frontends.gguf_file import is_decoded
from kvgraph.errors import ModelError
from tests.support import gguf_files, quantized
from tests.support.artifacts import TINY_LLAMA
from tests.support.models import make_model

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""A row of the larger types is a block of 256."""


def theirs(path: Path) -> dict[str, torch.Tensor]:
    """What transformers makes of a file's tensors."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    read = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)
    return {name: tensor.float() for name, tensor in read["tensors"].items()}


def ours(path: Path) -> dict[str, torch.Tensor]:
    with as_folder(path) as folder:
        module = huggingface.load(folder, "float32").module
    return {name.removeprefix("model."): each for name, each in module.state_dict().items()}


TYPES = [kind.name for kind in gguf.GGMLQuantizationType if is_decoded(kind)]
CASES = [("llama", kind) for kind in TYPES]
CASES += [(name, "Q8_0") for name in ("qwen2", "qwen3", "qwen3_moe")]


@pytest.mark.parametrize(("architecture", "kind"), CASES)
def test_weights_are_those_that_transformers_reads(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    """To the last bit: by the plain decoder of the gguf package, and the same permutations."""
    elements, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    sizes = (WIDE if elements > 32 else {}) | (EXPERTS if "moe" in architecture else {})
    folder = make_model(architecture, tmp_path / "model", **sizes)
    path = gguf_files.make(folder, tmp_path / "model.gguf", kind)
    found, expected = ours(path), theirs(path)
    assert found.keys() - expected.keys() <= {"lm_head.weight"}  # tied
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_a_file_is_compiled_with_its_tokenizer_and_template(tmp_path: Path) -> None:
    path = gguf_files.make(TINY_LLAMA, tmp_path / "tiny.gguf", "F32")
    sampling = kvgraph.SamplingParams(max_new_tokens=12)
    text = []
    for source in (path, TINY_LLAMA):
        out = tmp_path / f"{source.name}.kvg"
        manifest = kvgraph.compile(source, out, weights="fp32", page_size=16)
        with kvgraph.Engine(out) as engine:
            text.append(engine.generate(["The import statement"], sampling)[0].text)
    assert text[0] == text[1]
    manifest = kvgraph.load(tmp_path / "tiny.gguf.kvg").manifest
    assert manifest.notes[1] == "weights: the checkpoint's are gguf, F32"
    assert manifest.model.eos_token_ids == [1]
    assert str(tmp_path) not in json.dumps([*manifest.notes, manifest.tools])
    with kvgraph.Engine(tmp_path / "tiny.gguf.kvg") as engine:
        said = engine.apply_chat_template([{"role": "user", "content": "Hi"}])
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tiny.gguf.kvg" / "tokenizer.json"))
    assert tokenizer.decode(said) == "Hi"


def test_the_command_states_what_it_cost(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    path = gguf_files.make(TINY_LLAMA, tmp_path / "tiny.gguf", "Q4_0")
    done = CliRunner().invoke(app, ["compile", str(path), "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert kvgraph.load(tmp_path / "out").manifest.weights == "stored"
    assert "quality: perplexity" in done.output
    done = CliRunner().invoke(app, ["plan", str(path), "--memory", "1GiB"])
    assert done.exit_code == 0, done.output
    assert "weights (stored)" in done.output


IN_A_LOCALE = """
import locale, pathlib, sys
from kvgraph.compiler.frontends.gguf import as_folder
assert locale.getpreferredencoding(False).upper() != "UTF-8"
with as_folder(pathlib.Path(sys.argv[1])) as folder:
    sys.stdout.buffer.write((folder / "tokenizer.json").read_bytes())
"""


def test_a_locale_without_utf_8(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    token = "<\uff5cEnd\u2581of\u2581text\uff5c>"
    said = gguf_files.byte_level("gpt-2", {token: 3}, ["ĠĠĠĠ"])
    said["merges"].append("ĠĠ ĠĠ")  # transformers 5.10 fails at a list of one merge
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", text=said)
    without = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    command = [sys.executable, "-c", IN_A_LOCALE, str(path)]
    done = subprocess.run(command, capture_output=True, env=os.environ | without, check=True)
    assert token in (each["content"] for each in json.loads(done.stdout)["added_tokens"])


def test_frequencies_of_llama_3(tmp_path: Path) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    folder = make_model("llama", tmp_path / "model", head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig.from_pretrained(folder), "cpu")
    factors = (1.0 / 10000.0 ** (np.arange(0, 64, 2) / 64)) / scaled.numpy()
    path = gguf_files.make(folder, tmp_path / "model.gguf", factors=factors)
    with as_folder(path) as found:
        config = json.loads((found / "config.json").read_text())
    assert config["rope_parameters"] == rope
    for others in (factors * 2, np.ones(5, np.float32)):
        gguf_files.make(folder, tmp_path / "other.gguf", factors=others)
        assert refused(tmp_path / "other.gguf").startswith(
            f"{tmp_path}/other.gguf: rope_freqs.weight: expected the factors of Llama 3.1, got oth"
        )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split__count": 3}, "got part 1 of 3; give that file, with the other parts in its f"),
        (
            {"llama__rope__scaling__type": "longrope"},
            "llama.rope.scaling.type: expected none, 'linear' or 'yarn', got 'longrope'",
        ),
        (
            {"llama__rope__scaling__yarn_ext_factor": 1.0},
            "llama.rope.scaling.yarn_ext_factor: expected 0, got 1.0; compile the checkpoint",
        ),
        (
            {"llama__attention__value_length_swa": 8},
            "llama.attention.value_length_swa: expected 16, got 8; compile the checkpoint",
        ),
        (
            {"llama__expert_count": 8},
            "llama.expert_used_count: expected a number, got none; compile",
        ),
        (
            {"llama__block_count_": 8, "extra": "blk.0.attn_q_norm.weight"},
            "blk.0.attn_q_norm.weight: expected tensors of 'llama' alone, got one that it lacks; ",
        ),
        ({"split__count": "two"}, "split.count: expected a whole number, got 'two'; compile "),
        (
            {"llama__rope__dimension_count": "x"},
            "llama.rope.dimension_count: expected a whole number, got 'x'; compile the checkpoint",
        ),
        (
            {"tokenizer__ggml__eos_token_id": "x"},
            "tokenizer.ggml.eos_token_id: expected a whole number, got 'x'; compile the checkpoint",
        ),
        (
            {"tokenizer__ggml__bos_token_id": 1.5},
            "tokenizer.ggml.bos_token_id: expected a whole number, got 1.5; compile the checkpoint",
        ),
        (
            {"llama__rope__dimension_count": 8},
            "llama.rope.dimension_count: expected 16, got 8; com",
        ),
        ({"llama__attention__head_count": 0}, "head_count: expected a number above 0, got 0; com"),
        ({"llama__attention__head_count_kv": 0}, "count_kv: expected a number above 0, got 0; com"),
        ({"llama__rope__freq_base": -1.0}, "freq_base: expected a number above 0, got -1.0; comp"),
        ({"llama__context_length": 0}, "context_length: expected a number above 0, got 0; compil"),
        ({"llama__rope__scaling__attn_factor": 2.0}, "rope.scaling.attn_factor: expected 1, got 2"),
        (
            {"llama__attention__scale": 0.5},
            "llama.attention.scale: expected 0.25, got 0.5; compile",
        ),
        ({"llama__embedding_scale": 12.0}, "llama.embedding_scale: expected 1, got 12.0; compile"),
        ({"llama__residual_scale": 0.5}, "llama.residual_scale: expected 1, got 0.5; compile the"),
        ({"llama__logit_scale": 8.0}, "llama.logit_scale: expected 1, got 8.0; compile the check"),
        ({"llama__attention__causal": False}, "attention.causal: expected 1, got False; compile"),
        ({"llama__attention__sliding_window": 8}, "sliding_window: expected none, got 8; compile"),
    ],
)
def test_files_that_say_more_than_is_read(
    fields: dict[str, object], message: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    assert message in refused(path)


@pytest.mark.parametrize(
    ("architecture", "kind", "said"),
    [
        (
            "llama",
            "adapter",
            "a LoRA adapter; merge it into its base model with llama-export-lora and give that "
            "file",
        ),
        ("llama", "imatrix", "the importance of weights; give the file of the model"),
        *(
            (
                *names,
                "the part of a model that reads images or sound; give the file of its language "
                "part",
            )
            for names in (("clip", None), ("clip", "model"), ("clip", "mmproj"), ("x", "mmproj"))
        ),
        ("controlvector", None, "a control vector; give the file of the model"),
        ("llama", "new", "one of general.type 'new'; give the file of the model"),
    ],
)
def test_files_that_are_no_model(
    architecture: str, kind: str | None, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, architecture)
    if kind is not None:
        writer.add_type(kind)
    writer.add_tensor("a", np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert refused(path) == f"{path}: expected a GGUF file of a model, got {said}"


def test_metadata_that_changes_nothing(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    fields = {"llama__rope__dimension_count": 16, "llama__rope__scaling__attn_factor": 1.0}
    fields |= {"llama__attention__scale": 0.0, "llama__logit_scale": 1.0}
    fields |= {"llama__attention__sliding_window": 1 << 20}
    fields |= {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 1.0}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    with as_folder(path) as folder:
        assert json.loads((folder / "config.json").read_text())["head_dim"] == 16


def test_a_name_is_no_architecture(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """transformers takes a Llama whose name is "mistral" for one, with a sliding window."""
    made = {
        name: gguf_files.make(
            model_folder("llama"), tmp_path / f"{name}.gguf", "Q8_0", general__name=name
        )
        for name in ("llama", "mistral")
    }
    configs = []
    for path in made.values():
        with as_folder(path) as folder:
            configs.append(json.loads((folder / "config.json").read_text()))
    for config in configs:
        del config["quantization_config"]["file"]
        config.pop("_model_name_or_path", None)
    assert configs[0] == configs[1]
    found, expected = (ours(made[name]) for name in ("mistral", "llama"))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("keep", [4, 100, 20_000])
def test_damaged_files(keep: int, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf")
    path.write_bytes(path.read_bytes()[:keep])
    assert refused(path) == f"{path}: expected a GGUF file, {gguf_files.DAMAGED}"


@pytest.mark.parametrize("number", [31, 137])
def test_types_that_the_package_does_not_know(
    number: int, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """Q4_0_4_4, which is gone, and a fork's IQ2_K."""
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", "Q8_0")
    data, name = path.read_bytes(), b"blk.0.attn_q.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8  # behind the number of dims, and these
    path.write_bytes(data[:at] + number.to_bytes(4, "little") + data[at + 4 :])
    wanted = "type of a tensor: expected one that the gguf package knows"
    assert refused(path).startswith(f"{path}: {wanted}, got number {number}; compile the check")


def test_another_byte_order(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", byte_order="BIG")
    assert refused(path) == (
        f"{path}: expected a little-endian GGUF file, got a big-endian one; convert it with "
        "gguf-convert-endian FILE little"
    )


def refused(path: Path) -> str:
    with pytest.raises(KVGraphError) as error:
        kvgraph.compile(path, path.with_name("out"), check=False)
    assert not path.with_name("out").exists()
    return str(error.value)


def test_a_file_without_a_tensor_is_named(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    missing = "blk.1.ffn_down.weight"
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", "Q8_0", without=missing)
    with pytest.raises(ModelError) as error:
        kvgraph.compile(path, tmp_path / "out")
    assert str(error.value).startswith(f"{path}: expected weights for every parameter, got ")
    assert "layers.1.mlp.down_proj.weight" in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "name", "change"),
    [
        ("qwen3_moe", "blk.0.ffn_up_exps.weight", lambda data: data[:1]),
        ("qwen3_moe", "blk.0.ffn_gate_exps.weight", lambda data: data.reshape(-1)),
        ("qwen3_moe", "blk.0.ffn_gate_exps.weight", lambda data: data[None]),
        ("llama", "blk.0.attn_q.weight", lambda data: data[:1]),
        ("llama", "blk.0.attn_k.weight", lambda data: data[None]),
        ("llama", "blk.0.ffn_down.weight", lambda data: data[:0]),
        ("llama", "blk.0.ffn_down.weight", lambda data: np.concatenate([data, data], -1)),
    ],
)
def test_a_tensor_of_another_shape(
    architecture: str,
    name: str,
    change: Callable[[np.ndarray], np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers would repeat the numbers of a single expert."""
    whole = gguf_files.tensors

    def tensors(*given: Any) -> dict[str, Any]:
        found = whole(*given)
        data, blocks = found[name]
        return found | {name: (np.ascontiguousarray(change(data)), blocks)}

    monkeypatch.setattr(gguf_files, "tensors", tensors)
    more = EXPERTS if architecture == "qwen3_moe" else {}
    folder = make_model(architecture, tmp_path / "model", **more)
    path = gguf_files.make(folder, tmp_path / "model.gguf", "Q8_0")
    said = refused(path)
    assert " from its configuration, got [" in said
    assert said.endswith(quantized.INSTEAD)


def test_experts_stand_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """The tests' and benchmarks' own files: a checkpoint's names have 10 in front of 2."""
    folder = make_model("qwen3_moe", tmp_path / "model", **EXPERTS | {"num_experts": 11})
    read = ours(gguf_files.make(folder, tmp_path / "own.gguf", "F32"))
    found = read["model.layers.0.mlp.experts.down_proj"]
    part = "model.layers.0.mlp.experts.{}.down_proj.weight"
    stored = load_file(folder / "model.safetensors")
    assert torch.equal(found, torch.stack([stored[part.format(i)] for i in range(11)]))
