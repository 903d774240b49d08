"""GGUF files of models whose layers differ: in heads, widths, windows, experts, what they store."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from kvgraph.compiler.frontends.gguf import as_folder
from tests.compiler.test_gguf_architectures import (
    OTHERWISE,
    TEXT,
    loaded,
    plain,
    read_back,
    refused,
)
from tests.support import gguf_files
from tests.support.models import EXPERTS, greedy_tokens, make_model, randomize_vectors

TYPES = ["sliding_attention", "full_attention"]
GEMMA: dict[str, Any] = {"vocab_size": 258, "sliding_window": 24, "global_head_dim": 32}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
YARN |= {"original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4 small": (
        "gemma4_text",
        GEMMA
        | {"num_hidden_layers": 4, "layer_types": TYPES * 2, "num_kv_shared_layers": 2}
        | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 258}
        | {"use_double_wide_mlp": True},
    ),
    "gemma4 dense": (
        "gemma4_text",
        GEMMA
        | {"num_hidden_layers": 2, "layer_types": TYPES, "hidden_size_per_layer_input": 0}
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"final_logit_softcapping": 20.0},
    ),
    "gemma4 experts": (
        "gemma4_text",
        GEMMA
        | {"num_hidden_layers": 2, "layer_types": TYPES, "hidden_size_per_layer_input": 0}
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
        | {"moe_intermediate_size": 32},
    ),
    "ernie": ("ernie4_5", {}),
    "ernie experts": (
        "ernie4_5_moe",
        {"num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"num_hidden_layers": 5, "sliding_window": 24}
        | {
            "rope_parameters": {
                TYPES[1]: YARN,
                TYPES[0]: PLAIN,
            }
        },
    ),
    "exaone4": (
        "exaone4",
        {"num_hidden_layers": 4, "sliding_window": 24, "sliding_window_pattern": "LLLG"}
        | {"layer_types": TYPES[:1] * 3 + TYPES[1:]},
    ),
    "exaone4 without windows": ("exaone4", {"sliding_window": None, "layer_types": TYPES[1:] * 2}),
    "seed-oss": ("seed_oss", {}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "minimax-m2": (
        "minimax_m2",
        {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}},
    ),
    "dots1": (
        "dots1",
        EXPERTS | {"num_key_value_heads": 4, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    ),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
}
FACTORS = np.array([1.0] * 4 + [1e30] * 12)
"""A quarter of the pairs of a head turns."""

SHARED = "model.layers.3.self_attn."
"""A layer of "gemma4 small" that reads keys and values of another."""


def make(name: str, tmp_path: Path, **more: Any) -> tuple[Path, Path]:
    """A checkpoint whose vectors are random too, and its file."""
    architecture, settings = MODELS[name]
    folder = make_model(architecture, tmp_path / "model", **{"vocab_size": 258} | settings)
    unread = {f"{SHARED}{part}_proj.weight": torch.ones(64, 64) for part in "kv"}
    unread[f"{SHARED}k_norm.weight"] = torch.ones(32)
    # Published checkpoints have them, and no model reads them.
    randomize_vectors(folder, unread if name == "gemma4 small" else None)
    factors = FACTORS if architecture == "gemma4_text" else None
    more = {"text": TEXT, "factors": factors} | more
    return folder, gguf_files.make(folder, tmp_path / "model.gguf", **more)


@pytest.mark.parametrize("name", MODELS)
def test_configuration_and_weights(name: str, tmp_path: Path) -> None:
    model, path = make(name, tmp_path)
    expected, found, weights = read_back(model, path)
    for field, value in expected.items():
        if field not in (*OTHERWISE, "head_dim"):
            assert plain(found[field]) == plain(value), field
    assert found["model_type"] == expected["model_type"]
    wanted = loaded(model)
    assert weights.keys() == wanted.keys()
    for tensor, value in wanted.items():
        assert torch.equal(weights[tensor], value), tensor


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    folder, path = make(name, tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    prompt = [3 + 7 * i % 250 for i in range(60)]
    found = gguf_files.greedy_tokens_of(path, tmp_path / "out", prompt, 8)
    assert found == greedy_tokens(model, prompt, 8)


WIDTHS = {"gemma4__feed_forward_length": [96, 96, 192, 96]}
THRICE = {"gemma4__feed_forward_length": [64, 64, 192, 192]}
HEADS = {"gemma4__attention__head_count_kv": [2, 1, 2, 1]}
FEW = {"gemma4__attention__head_count_kv": [2, 1]}
PATTERN = {"gemma4__attention__sliding_window_pattern": [True]}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (WIDTHS, "feed_forward_length: expected one number above 0 for each of two kinds of"),
        (THRICE, "feed_forward_length: expected the same or twice as much in the last layers"),
        (HEADS, "head_count_kv: expected one number with projections of values, got [2, 1, 2, 1]"),
        (FEW, "head_count_kv: expected a number, or one for each of 4 layers, got [2, 1]"),
        (PATTERN, "sliding_window_pattern: expected a number, or one for each of 4 layers"),
        ({"gemma4__attention__scale": 0.25}, "attention.scale: expected 1, got 0.25"),
        ({"gemma4__rope__dimension_count_swa": 8}, "dimension_count_swa: expected 16, got 8"),
        ({"without": "per_layer_token_embd.weight"}, "per_layer_token_embd.weight: expected a m"),
        ({"gemma4__attention__shared_kv_layers": 1}, "feed_forward_length: expected one number ab"),
    ],
)
def test_layers_that_no_configuration_can_hold(
    fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    _, path = make("gemma4 small", tmp_path, **fields)
    assert said in refused(path)


SOFTMAX = {"expert_gating_func": 1}


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("minimax-m2", SOFTMAX, "expert_gating_func: expected 2, the sigmoid, got 1"),
        ("dots1", SOFTMAX, "expert_gating_func: expected 2, the sigmoid, got 1"),
        ("exaone4", {"attention__sliding_window_pattern": [True]}, "expected a number, or one for"),
        ("seed-oss", {"attention__sliding_window": 24}, "attention.sliding_window: expected none"),
    ],
)
def test_fields_that_no_configuration_can_hold(
    name: str, fields: dict[str, Any], said: str, tmp_path: Path
) -> None:
    _, path = make(name, tmp_path, **gguf_files.prefixed(MODELS[name][0], fields))
    assert said in refused(path)


def test_factors_that_turn_pairs_a_little(tmp_path: Path) -> None:
    _, path = make("gemma4 dense", tmp_path, factors=np.array([1.0] * 4 + [2.0] * 12))
    assert "rope_freqs.weight: expected factors 1, then factors of 1e+30, got o" in refused(path)


def test_the_tokenizer_of_gemma4(tmp_path: Path) -> None:
    """Texts begin with the file's first token. transformers leaves it out."""
    said = gguf_files.sentencepiece(add_space_prefix=False, add_bos_token=True)
    said |= {"model": "gemma4", "merges": ["h i", "▁ hi"]}
    said["tokens"].append("<turn|>")
    said["scores"].append(0.0)
    said["token_type"].append(3)
    settings = MODELS["gemma4 dense"][1] | {"vocab_size": 265}
    folder = make_model("gemma4_text", tmp_path / "model", **settings)
    path = gguf_files.make(folder, tmp_path / "model.gguf", text=said, factors=FACTORS)
    with as_folder(path) as found:
        tokenizer = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
        config = json.loads((found / "config.json").read_text())
    assert tokenizer.encode("hi hi<turn|>é").ids == [1, 260, 259, 264, 198, 172]
    assert tokenizer.decode([260, 259, 198, 172]) == "hi hié"
    assert config["eos_token_id"] == [2, 264]
