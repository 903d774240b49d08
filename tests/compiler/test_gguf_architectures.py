"""GGUF files of each architecture: the configuration and the weights are those of the checkpoint
that was converted; tokenizers that some of them need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

import kvgraph
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.errors import KVGraphError
from tests.support import gguf_files
from tests.support.models import greedy_tokens, make_model, randomize_vectors

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
LINEAR = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
LOCAL = {"rope_type": "default", "rope_theta": 20000.0}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "attention_factor": 1.25}
LONG |= {"original_max_position_embeddings": 256, "partial_rotary_factor": 0.5}
LONG |= {"short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.0, 2.0, 4.0, 8.0]}

HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
TEMPERATURE = {"llama_4_scaling_beta": 0.125}
MULTIPLIERS = {"attention_multiplier": 0.125, "embedding_multiplier": 6.0}
MULTIPLIERS |= {"residual_multiplier": 0.5, "logits_scaling": 4.0}

LATENT = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_rope_head_dim": 16, "head_dim": 16}
LATENT |= {"qk_nope_head_dim": 20, "v_head_dim": 28, "num_key_value_heads": 4}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
LATENT |= {"n_shared_experts": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1}
GROUPS = {"topk_method": "group_limited_greedy"}
MIXED = {"mlp_layer_types": ["dense", "sparse"]}
DEEP = YARN | {"mscale": 0.75, "mscale_all_dim": 0.75}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text", {"num_hidden_layers": 7, "sliding_window_pattern": 6}),
    "gemma3 scaled": (
        "gemma3_text",
        {
            "sliding_window_pattern": 6,
            "num_hidden_layers": 6,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL},
            "final_logit_softcapping": 20.0,
        },
    ),
    "gemma2": (
        "gemma2",
        {"attn_logit_softcapping": 40.0, "final_logit_softcapping": 25.0, "head_dim": 32}
        | {"query_pre_attn_scalar": 32},
    ),
    "gpt-oss": ("gpt_oss", {"rope_parameters": YARN | {"truncate": False}}),
    "phi3": ("phi3", {"sliding_window": 24}),
    "phi3 long": (
        "phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": 256, "sliding_window": None},
    ),
    "qwen2moe": ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 48}),
    "mixtral": ("mixtral", {"num_local_experts": 4}),
    "mistral3": ("mistral", {"sliding_window": None}),
    "ministral3": (
        "ministral3",
        {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0} | TEMPERATURE},
    ),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}),
    "granite": ("granite", MULTIPLIERS),
    "granitemoe": ("granitemoe", MULTIPLIERS | {"num_local_experts": 4}),
    "glm4": ("glm4", {"attention_bias": True, "rope_parameters": HALF}),
    "glm4moe": (
        "glm4_moe",
        {"num_hidden_layers": 3, "head_dim": 32, "use_qk_norm": True, "attention_bias": True}
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"routed_scaling_factor": 1.5, "rope_parameters": HALF},
    ),
    "deepseek v2": ("deepseek_v2", LATENT | {"n_group": 4, "topk_group": 2} | GROUPS),
    "deepseek v2 lite": (
        "deepseek_v2",
        LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "rope_parameters": DEEP},
    ),
    "deepseek v3": (
        "deepseek_v3",
        LATENT | {"n_group": 4, "topk_group": 2, "rope_parameters": DEEP},
    ),
    "glm flash": ("glm4_moe_lite", LATENT | {"n_group": 1, "topk_group": 1} | MIXED),
    "gemma": ("gemma", {}),
    "llama yarn": ("llama", {"rope_parameters": YARN}),
    "qwen3 linear": ("qwen3", {"rope_parameters": LINEAR}),
}

TEXT = gguf_files.byte_level("gpt-2", {"<s>": 3, "</s>": 3}, bos_token_id=256, eos_token_id=257)

OTHERWISE = ("architectures", "dtype", "transformers_version", "initializer_range")
OTHERWISE += (
    "mlp_layer_types",
    "model_type",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "sliding_window_pattern",
)
"""Fields that say nothing about a model's results, or that the file's tokenizer has."""


Tensors = dict[str, torch.Tensor]


def make(name: str, tmp_path: Path, kind: str = "F32", **more: Any) -> tuple[Path, Path]:
    """A checkpoint whose vectors are random too, and its file."""
    architecture, settings = MODELS[name]
    folder = make_model(architecture, tmp_path / "model", vocab_size=258, **settings)
    randomize_vectors(folder)
    return folder, gguf_files.make(folder, tmp_path / "model.gguf", kind, text=TEXT, **more)


def read_back(model: Path, path: Path) -> tuple[dict[str, Any], dict[str, Any], Tensors]:
    """The configuration of a checkpoint, and configuration and weights of its file."""
    expected = json.loads((model / "config.json").read_text())
    with as_folder(path) as folder:
        return expected, json.loads((folder / "config.json").read_text()), loaded(folder)


def loaded(folder: Path) -> Tensors:
    module = huggingface.load(folder, "float32").module
    return {name.removeprefix("model."): each for name, each in module.state_dict().items()}


def plain(value: object) -> object:
    """Numbers as float32, which a file has."""
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


@pytest.mark.parametrize("name", MODELS)
def test_configuration_and_weights(name: str, tmp_path: Path) -> None:
    model, path = make(name, tmp_path)
    expected, found, weights = read_back(model, path)
    for field, value in expected.items():
        if field not in OTHERWISE and field in found:
            assert plain(found[field]) == plain(value), field
    assert expected.keys() - found.keys() <= {*OTHERWISE, "head_dim"}
    types = {"glm4_moe_lite": "deepseek_v3"}
    assert found["model_type"] == types.get(expected["model_type"], expected["model_type"])
    for tensor, value in loaded(model).items():
        assert torch.allclose(weights[tensor], value, rtol=0, atol=1e-6), tensor


def test_a_vector_as_the_gate_of_a_shared_expert(tmp_path: Path) -> None:
    """As older files have it."""
    model, path = make("qwen2moe", tmp_path, vector="blk.0.ffn_gate_inp_shexp.weight")
    with as_folder(path) as folder:
        weights = loaded(folder)
    for tensor, value in loaded(model).items():
        assert torch.equal(weights[tensor], value), tensor


def test_a_latent_as_older_files_have_it(tmp_path: Path) -> None:
    model, path = make("deepseek v2 lite", tmp_path, is_old=True)
    with as_folder(path) as folder:
        weights = loaded(folder)
    for tensor, value in loaded(model).items():
        assert torch.equal(weights[tensor], value), tensor


@pytest.mark.parametrize("name", ["qwen3vl", "qwen2vl"])
def test_language_parts_of_models_that_see(name: str, tmp_path: Path) -> None:
    """Positions of text alone are equal in all sections of a head."""
    folder = make_model(name.removesuffix("vl"), tmp_path / "model", vocab_size=258)
    sections = {f"{name}__rope__dimension_sections": [4, 2, 2, 0]}
    path = gguf_files.make(folder, tmp_path / "model.gguf", text=TEXT, name=name, **sections)
    with as_folder(path) as found:
        weights = loaded(found)
    for tensor, value in loaded(folder).items():
        assert torch.equal(weights[tensor], value), tensor


def test_layers_that_predict_more_tokens_are_not_read(tmp_path: Path) -> None:
    more = {"more_layers": 1, "extra": "blk.3.nextn.eh_proj.weight"}
    _, path = make("glm4moe", tmp_path, glm4moe__nextn_predict_layers=1, **more)
    with as_folder(path) as folder:
        assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
        assert not any("layers.3" in name for name in loaded(folder))
    _, path = make("gemma", tmp_path, extra=more["extra"])
    assert "blk.3.nextn.eh_proj.weight: expected tensors of 'gemma' alone" in refused(path)


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "gpt-oss",
        "phi3",
        "mixtral",
        "ministral3",
        "smollm3",
        "granitemoe",
        "glm4moe",
        "deepseek v2",
        "deepseek v3",
        "glm flash",
    ],
)
def test_tokens_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """A prompt beyond the window, and beyond YaRN's original length."""
    from transformers import AutoModelForCausalLM

    model, path = make(name, tmp_path)
    prompt = [int(token) for token in np.random.default_rng(1).integers(3, 250, 90)]
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = gguf_files.greedy_tokens_of(path, tmp_path / "a.kvg", prompt, 8)
    assert found == greedy_tokens(theirs, prompt, 8)


@pytest.mark.parametrize(("kind", "layers"), [("gemma3", 62), ("gemma2", 46)])
def test_the_scale_of_the_largest_gemma(kind: str, layers: int, tmp_path: Path) -> None:
    architecture, settings = MODELS[kind]
    few = {"hidden_size": 16, "intermediate_size": 8, "num_attention_heads": 2, "head_dim": 2}
    settings = settings | few | {"num_key_value_heads": 1, "num_hidden_layers": layers}
    folder = make_model(architecture, tmp_path / "model", vocab_size=258, **settings)
    with as_folder(gguf_files.make(folder, tmp_path / "model.gguf", text=TEXT)) as found:
        config = json.loads((found / "config.json").read_text())
    assert config["query_pre_attn_scalar"] == 8


def test_a_pattern_of_windows_that_the_file_names(tmp_path: Path) -> None:
    pattern = [False, True, True, False, True, True, True]
    name = "gemma3.attention.sliding_window_pattern".replace(".", "__")
    _, path = make("gemma3", tmp_path, **{name: pattern})
    with as_folder(path) as folder:
        config = json.loads((folder / "config.json").read_text())
    assert [kind == "sliding_attention" for kind in config["layer_types"]] == pattern
    _, path = make("gemma3", tmp_path, **{name: pattern[1:]})
    assert (
        "sliding_window_pattern: expected a number, or one for each of 7 layers, got "
        in refused(path)
    )


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "gemma3",
            {"gemma3__rope__scaling__type": "yarn", "gemma3__rope__scaling__factor": 2.0},
            "gemma3.rope.scaling.type: expected none or 'linear', got 'yarn'; compile the",
        ),
        (
            "gemma2",
            {"gemma2__rope__freq_base_swa": 5.0},
            "gemma2.rope.freq_base_swa: expected 10000, got 5.0; compile the checkpoint",
        ),
        (
            "gemma2",
            {"gemma2__attention__value_length_swa": 8},
            "gemma2.attention.value_length_swa: expected 32, got 8; compile the checkpoint",
        ),
        (
            "gpt-oss",
            {"gpt-oss__attention__sliding_window_pattern": "x"},
            "sliding_window_pattern: expected a whole number or a list of true or false, got 'x'; ",
        ),
        (
            "phi3",
            {"phi3__rope__scaling__type": "linear", "phi3__rope__scaling__factor": 2.0},
            "phi3.rope.scaling.type: expected none or 'longrope', got 'linear'; compile the",
        ),
        (
            "qwen3 linear",
            {"qwen3__rope__scaling__attn_factor": 2.0},
            "qwen3.rope.scaling.attn_factor: expected 1, got 2.0; compile the checkpoint",
        ),
        (
            "granite",
            {"granite__rope__scaling__finetuned": False},
            "granite.rope.scaling.finetuned: expected 1, got False; compile the checkpoint",
        ),
        (
            "glm4",
            {"glm4__rope__dimension_sections": [1, 1, 2, 0]},
            "glm4.rope.dimension_sections: expected none, got [1, 1, 2, 0]; compile the",
        ),
        (
            "glm4moe",
            {"glm4moe__expert_gating_func": 1},
            "glm4moe.expert_gating_func: expected 2, the sigmoid, got 1; compile the checkpoint",
        ),
        (
            "deepseek v2",
            {"deepseek2__expert_weights_norm": True},
            "deepseek2.expert_weights_norm: expected 0, got True; compile the checkpoint",
        ),
        (
            "deepseek v3",
            {"deepseek2__expert_gating_func": 3},
            "deepseek2.expert_gating_func: expected 1, the softmax, or 2, the sigmoid, got 3; comp",
        ),
        (
            "mistral3",
            {"mistral3__attention__temperature_scale": 0.1},
            "mistral3.rope.scaling.type: expected 'yarn' with attention.temperature_scale, got n",
        ),
        (
            "mixtral",
            {"llama__expert_weights_scale": 2.0},
            "llama.expert_weights_scale: expected 1, got 2.0; compile the checkpoint",
        ),
        (
            "llama yarn",
            {"llama__rope__scaling__yarn_attn_factor": 2.0},
            "llama.rope.scaling.yarn_attn_factor: expected 1.13863, got 2.0; compile the",
        ),
    ],
)
def test_fields_that_fit_no_configuration(
    name: str, fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    assert message in refused(make(name, tmp_path, **fields)[1])


def test_factors_of_rotary_frequencies_beside_a_scaling(tmp_path: Path) -> None:
    _, path = make("qwen3 linear", tmp_path, factors=np.ones(8))
    assert "rope.scaling.type: expected none beside rope_freqs.weight, got 'l" in refused(path)


def test_half_of_the_factors_of_longrope(tmp_path: Path) -> None:
    _, path = make("phi3", tmp_path, extra="rope_factors_long.weight")
    assert "rope_factors_short.weight: expected a tensor beside the other of" in refused(path)


def test_spaces_that_are_tokens(tmp_path: Path) -> None:
    """As Gemma has them."""
    said = gguf_files.sentencepiece(add_space_prefix=False)
    said["tokens"] += ["  ", "▁h", "\n"]
    said["scores"] += [-1000.0, -1.5, -1000.0]
    said["token_type"] += [4, 1, 4]
    folder = make_model("gemma3_text", tmp_path / "model", vocab_size=267, num_hidden_layers=2)
    path = gguf_files.make(folder, tmp_path / "model.gguf", text=said)
    with as_folder(path) as found:
        tokenizer = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
    assert tokenizer.encode("hi  hi\n h").ids == [1, 260, 264, 260, 266, 265]
    assert tokenizer.decode([260, 264, 260, 266, 265]) == "hi  hi\n h"


@pytest.mark.parametrize(
    ("name", "ids"), [("Phi-3-mini", [1, 264, 259]), ("x", [1, 264, 261, 259])]
)
def test_a_space_behind_a_token_of_phi_3(
    name: str, ids: list[int], model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """llama.cpp drops it for models of that name."""
    said = gguf_files.sentencepiece()
    said["tokens"].append("<|user|>")
    said["scores"].append(0.0)
    said["token_type"].append(3)
    path = gguf_files.make(
        model_folder("llama"), tmp_path / "model.gguf", text=said, general__name=name
    )
    with as_folder(path) as folder:
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode("<|user|> hi").ids == ids


def test_the_tokenizer_of_gpt_oss(tmp_path: Path) -> None:
    """transformers cannot read the configuration of such a file."""
    folder = make_model("gpt_oss", tmp_path / "model", vocab_size=260)
    said = gguf_files.byte_level(
        "gpt-4o", {"<|return|>": 3, "<|call|>": 3, "<|end|>": 3}, eos_token_id=257
    )
    with as_folder(gguf_files.make(folder, tmp_path / "model.gguf", text=said)) as found:
        tokenizer = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
        config = json.loads((found / "config.json").read_text())
    assert tokenizer.encode("a  <|end|>").tokens == ["a", "ĠĠ", "<|end|>"]
    assert config["eos_token_id"] == [257, 258]


def refused(path: Path) -> str:
    with pytest.raises(KVGraphError) as error:
        kvgraph.compile(path, path.with_name("out"), check=False)
    return str(error.value)
