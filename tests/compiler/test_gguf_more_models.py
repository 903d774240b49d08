"""GGUF files of models with layer norms, with biases, with shared experts, and of Llama 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import kvgraph
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.ops.packed import E2M1, INT8, Form
from tests.compiler.test_gguf_architectures import (
    MULTIPLIERS,
    OTHERWISE,
    TEXT,
    loaded,
    plain,
    read_back,
    refused,
)
from tests.compiler.test_gguf_experts import checkpoint
from tests.compiler.test_stored_weights import meant
from tests.support import gguf_files
from tests.support.models import greedy_tokens, make_model, randomize_vectors

PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
HALF = {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
BIASES = {"attention_bias": True}
FEW = {"num_experts": 4, "num_experts_per_tok": 2}
LLAMA4 = {"num_hidden_layers": 5, "intermediate_size_mlp": 128, "num_local_experts": 4}
SCOUT = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0}
SCOUT |= {"low_freq_factor": 1.0, "high_freq_factor": 1.0}
SCOUT |= {"original_max_position_embeddings": 8192}
SHARED = {"num_local_experts": 4, "shared_intermediate_size": 64} | MULTIPLIERS

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama4": ("llama4_text", LLAMA4 | {"interleave_moe_layer_step": 2}),
    "llama4 scaled": ("llama4_text", LLAMA4 | {"rope_parameters": SCOUT}),
    "llama4 without norms": (
        "llama4_text",
        LLAMA4 | {"num_local_experts": 128, "use_qk_norm": False, "num_hidden_layers": 1},
    ),
    "starcoder2": ("starcoder2", {"sliding_window": 4096}),
    "starcoder2 without biases": ("starcoder2", {"sliding_window": 4096, "use_bias": False}),
    "cohere": ("cohere", {"logit_scale": 0.5}),
    "cohere norms": ("cohere", {"use_qk_norm": True} | BIASES),
    "cohere2": ("cohere2", {"num_hidden_layers": 5, "sliding_window": 24, "logit_scale": 0.5}),
    "stablelm": ("stablelm", {"use_qkv_bias": True} | HALF),
    "stablelm parallel": ("stablelm", {"use_parallel_residual": True} | HALF),
    "nemotron": ("nemotron", HALF),
    "nemotron biases": ("nemotron", BIASES | {"mlp_bias": True} | HALF),
    "gpt2": ("gpt2", {"n_inner": 96, "num_key_value_heads": 4}),
    "gpt2 with a head": (
        "gpt2",
        {"n_inner": 96, "num_key_value_heads": 4, "tie_word_embeddings": False},
    ),
    "granite shared": ("granitemoeshared", SHARED),
    "hunyuan moe": ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}),
    "llama biases": ("llama", BIASES | {"mlp_bias": True}),
    "granite biases": ("granite", BIASES | MULTIPLIERS),
    "qwen3 biases": ("qwen3", BIASES),
    "qwen3moe biases": (
        "qwen3_moe",
        BIASES | FEW | {"moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}

LACKED = {"head_dim", "num_key_value_heads", "intermediate_size"}
"""Fields of tests' checkpoints that their models do not read."""


def make(name: str, tmp_path: Path, **more: Any) -> tuple[Path, Path]:
    """A checkpoint whose vectors are random too, and its file."""
    architecture, settings = MODELS[name]
    folder = make_model(architecture, tmp_path / "model", **{"vocab_size": 258} | settings)
    randomize_vectors(folder)
    if "low_freq_factor" in settings.get("rope_parameters", {}):
        lengths = 2 * np.pi * SCOUT["rope_theta"] ** (np.arange(0, 16, 2) / 16)
        more.setdefault("factors", np.where(lengths < 8192, 1.0, 16.0))
    more = {"text": TEXT} | more
    return folder, gguf_files.make(folder, tmp_path / "model.gguf", **more)


@pytest.mark.parametrize("name", MODELS)
def test_configuration_and_weights(name: str, tmp_path: Path) -> None:
    model, path = make(name, tmp_path)
    expected, found, weights = read_back(model, path)
    for field, value in expected.items():
        if field not in OTHERWISE and field in found:
            assert plain(found[field]) == plain(value), field
    assert expected.keys() - found.keys() <= LACKED | {*OTHERWISE}
    assert found["model_type"] == expected["model_type"]
    wanted = loaded(model)
    assert weights.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.allclose(weights[tensor], value, rtol=0, atol=1e-6), tensor


@pytest.mark.parametrize(
    "name",
    [
        "llama4",
        "llama4 scaled",
        "starcoder2",
        "cohere norms",
        "cohere2",
        "stablelm",
        "stablelm parallel",
        "nemotron",
        "gpt2",
        "granite shared",
        "hunyuan moe",
        "llama biases",
        "qwen3 biases",
    ],
)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, path = make(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [3 + 7 * i % 250 for i in range(60)]
    found = gguf_files.greedy_tokens_of(path, tmp_path / "out", prompt, 8)
    assert found == greedy_tokens(model, prompt, 8)


@pytest.mark.parametrize("name", ["llama4", "granite shared", "hunyuan moe", "gpt2"])
@pytest.mark.parametrize(
    ("kind", "form"),
    [("Q8_0", Form(8, 32, INT8)), ("Q4_0", Form(4, 32)), ("MXFP4", Form(4, 32, E2M1))],
)
def test_experts_and_linear_layers_as_they_are_stored(
    kind: str, form: Form, name: str, tmp_path: Path
) -> None:
    _, path = make(name, tmp_path, kind=kind)
    with as_folder(path) as folder:
        values = checkpoint(folder)
    is_stored = [f"{tensor} {each.form}" for tensor, each in values.items() if len(each.shape) > 1]
    assert [each for each in is_stored if not each.endswith(str(form))] == [
        f"{tensor} None" for tensor in values if tensor.endswith(("router.weight", "wg.weight"))
    ]
    for tensor, each in values.items():
        if each.form is not None:
            numbers = meant(each.open_coded()(1, 3), form)
            whole = each.read()
            if each.is_coded_transposed:
                whole = whole.transpose(-1, -2)
            assert torch.equal(numbers, whole[1:3]), tensor
    halves = [each for tensor, each in values.items() if "shared_mlp.input" in tensor]
    for each in halves:  # gate and up
        assert torch.equal(meant(each.open_coded()(62, 66), form), each.read()[62:66])
    manifest = kvgraph.compile(path, tmp_path / "a.kvg", page_size=16, check=False)
    assert manifest.weights == "stored"
    assert not any("rounded" in note for note in manifest.notes)


@pytest.mark.parametrize(("given", "length"), [(24, 24), (0, None)])
def test_a_window_of_starcoder2(given: int, length: int | None, tmp_path: Path) -> None:
    """llama.cpp's converter writes none."""
    _, path = make("starcoder2", tmp_path, starcoder2__attention__sliding_window=given)
    with as_folder(path) as folder:
        assert json.loads((folder / "config.json").read_text())["sliding_window"] == length


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("llama4", {"attention__sliding_window": 0}, "sliding_window: expected none, or a number"),
        ("llama4", {"attention__sliding_window_pattern": 2}, "pattern: expected 4, got 2; compile"),
        ("llama4", {"rope__freq_base_swa": 5.0}, "rope.freq_base_swa: expected 500000, got 5.0"),
        ("llama4", {"expert_weights_scale": 2.5}, "expert_weights_scale: expected 1, got 2.5"),
        ("llama4", {"rope__dimension_count": 8}, "rope.dimension_count: expected 16, got 8"),
        ("cohere", {"attention__sliding_window": 24}, "attention.sliding_window: expected none"),
        ("cohere", {"rope__dimension_count": 8}, "rope.dimension_count: expected 16, got 8"),
        ("cohere2", {"rope__freq_base_swa": 5.0}, "rope.freq_base_swa: expected 10000, got 5.0"),
        ("gpt2", {"attention__head_count_kv": 2}, "attention.head_count_kv: expected 4, got 2"),
        ("hunyuan moe", {"expert_shared_count": 2}, "expert_shared_count: expected 1, got 2"),
    ],
)
def test_fields_that_no_configuration_can_hold(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    _, path = make(name, tmp_path, **gguf_files.prefixed(MODELS[name][0], fields))
    assert said in refused(path)


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("llama4 scaled", {"factors": np.full(8, 2.0)}, "expected the factors of Llama 4, got ot"),
        ("stablelm", {"extra": "blk.0.attn_q_norm.weight"}, "expected tensors of 'stablelm' alone"),
        ("cohere2", {"extra": "blk.0.attn_q_norm.weight"}, "expected tensors of 'cohere2' alone"),
        ("granite shared", {"without": "blk.0.ffn_up_shexp.weight"}, "expected [128, 64] from its"),
        ("llama biases", {"without": "blk.1.attn_output.bias"}, "o_proj.bias"),
        ("llama4", {"extra": "blk.0.attn_q.bias"}, "expected tensors of 'llama4_text' alone"),
    ],
)
def test_tensors_that_no_model_has(
    name: str, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    assert said in refused(make(name, tmp_path, **more)[1])


def test_a_long_context_of_stablelm_without_its_rotary_base(tmp_path: Path) -> None:
    """llama.cpp's converter leaves it out. It is not the default in models for code."""
    context = {"max_position_embeddings": 16384}
    folder = make_model("stablelm", tmp_path / "model", vocab_size=258, **context)
    path = gguf_files.make(folder, tmp_path / "model.gguf", text=TEXT)
    assert (
        "stablelm.rope.freq_base: expected a number with a context above 4096, got none"
        in refused(path)
    )
