"""Models that no flag of transformers lets in: their attention shows that they can be compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import kvgraph
from tests.support.models import EXPERTS, LATENT, greedy_tokens, make_model

PROMPTS = [
    [3 + (7 * i + 5 * j) % 150 for j in range(length)] for i, length in enumerate((1, 9, 40))
]
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v2": LATENT | EXPERTS | {"head_dim": 16},  # its rotary embedding is complex
    "deepseek_v3": LATENT | EXPERTS | {"head_dim": 16},
    "glm4_moe_lite": LATENT | EXPERTS | {"head_dim": 16},
    "minicpm3": LATENT,
    "llama4_text": {  # chunks; a layer without rope that numbers its tokens itself
        "num_hidden_layers": 4,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 1, 1, 0],
        "floor_scale": 8,
        "num_local_experts": 4,
        "intermediate_size_mlp": 96,
    },
    "nemotron": {},  # hands no keyword on to its attention
    "biogpt": {"hidden_act": "gelu"},  # makes a padding mask of ones
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
}


@pytest.mark.parametrize("architecture", MODELS)
def test_tokens_are_those_of_transformers(tmp_path: Path, architecture: str) -> None:
    folder = make_model(architecture, tmp_path / "model", **MODELS[architecture])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16)
    engine = kvgraph.Engine(tmp_path / "out", num_pages=32)
    greedy = kvgraph.SamplingParams(max_new_tokens=12, ignore_eos=True)
    for prompt, done in zip(PROMPTS, engine.generate(PROMPTS, greedy), strict=True):
        assert done.token_ids == greedy_tokens(model, prompt, 12)
    latent = [note for note in manifest.notes if "latent attention (MLA)" in note]
    assert len(latent) == ("kv_lora_rank" in MODELS[architecture])
    if latent:
        assert latent[0].endswith("192 elements of a token in a layer, 4.0 times its latent 48")
