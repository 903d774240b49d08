"""Layers that read another layer's keys and values store none of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvgraph
from tests.support.models import greedy_tokens, make_model, sizes_of

TYPES = ["sliding_attention", "full_attention"] * 2
SHARED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": TYPES,
    "sliding_window": 24,
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "gemma3n_text": SHARED
    | {
        "intermediate_size": [96] * 4,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "laurel_rank": 8,
    },
    "gemma4_text": SHARED | {"global_head_dim": 32, "num_global_key_value_heads": 1},
}
PROMPTS = [[3 + (7 * i + 5 * j) % 150 for j in range(n)] for i, n in enumerate((1, 9, 60))]
GREEDY = kvgraph.SamplingParams(max_new_tokens=12, ignore_eos=True)
LEAVES = ["sliding", "full", "sliding", "full"]


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    folder = make_model(architecture, tmp_path / "model", **MODELS[architecture])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16)
    assert [(place.leaf, place.index) for place in manifest.layers] == [(p, 0) for p in LEAVES]
    leaves = kvgraph.load(tmp_path / "out").params().leaves
    assert [leaf.num_layers for leaf in leaves.values()] == [1, 1]
    with kvgraph.Engine(tmp_path / "out", num_pages=32) as engine:
        for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, GREEDY), strict=True):
            assert done.token_ids == greedy_tokens(model, prompt, 12)


def test_the_cache_of_a_plan_has_the_layers_that_store(tmp_path: Path) -> None:
    folder = make_model("gemma4_text", tmp_path / "model", **MODELS["gemma4_text"])
    assert [need.reads for need in sizes_of(folder).layers] == [
        None,
        None,
        0,
        1,
    ]


@pytest.mark.parametrize("cache", ["padded", "continuous"])
def test_other_kinds_of_caches(cache: str, tmp_path: Path) -> None:
    """Whose layers have one head layout."""
    sizes = MODELS["gemma3n_text"] | {"num_key_value_heads": 2}
    folder = make_model("gemma3n_text", tmp_path / "model", **sizes)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    manifest = kvgraph.compile(folder, tmp_path / "out", cache=cache, check=False)
    assert [place.index for place in manifest.layers] == [0, 1, 0, 1]
    with kvgraph.Engine(tmp_path / "out", max_batch_size=2) as engine:
        (done,) = engine.generate(PROMPTS[2:], GREEDY)
    assert done.token_ids == greedy_tokens(model, PROMPTS[2], 12)
