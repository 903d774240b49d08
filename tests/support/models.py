"""Tiny random models of every architecture on the equivalence ladder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvgraph.compiler.described import ModelSizes

COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.15,
}

TWO_KINDS = {"sliding_window": 24, "num_hidden_layers": 3}
"""Layers with and without a window in turn: the pool of the first kind has two layers."""

LATENT: dict[str, Any] = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
"""Attention over a latent cache, as DeepSeek has it."""

EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Experts as DeepSeek has them, behind one dense layer."""

OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    "qwen2": {},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "gemma2": TWO_KINDS | {"query_pre_attn_scalar": 16},
    "gemma3_text": TWO_KINDS | {"query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "gpt_oss": TWO_KINDS
    | {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 256,
        },
    },
}


def layers(architecture: str) -> int:
    """Of the model that `make_model` makes."""
    count: int = (COMMON | OVERRIDES.get(architecture, {}))["num_hidden_layers"]
    return count


def make_model(architecture: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a random checkpoint of `architecture` into `folder`; no tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = COMMON | OVERRIDES.get(architecture, {}) | overrides
    config = AutoConfig.for_model(architecture, **settings)
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def randomize_vectors(folder: Path, more: dict[str, Any] | None = None) -> None:
    """Change norms, which are ones, and biases, which are zeros. `more`: tensors to add."""
    import torch
    from safetensors.torch import load_file, save_file

    stored, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for tensor, given in stored.items():
        if given.ndim == 1 or tensor.endswith("bias"):
            stored[tensor] = given + 0.2 * torch.randn(given.shape, generator=random)
    save_file(stored | (more or {}), folder / "model.safetensors", metadata={"format": "pt"})


def greedy_tokens(model: Any, prompt: list[int], count: int) -> list[int]:
    """What transformers' `generate` puts behind a prompt; its end of text does not end it."""
    import torch

    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None  # a least length would forbid the token itself
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
    )
    tokens: list[int] = done[0, len(prompt) :].tolist()
    return tokens


def sizes_of(folder: Path, ranks: int = 1) -> ModelSizes:
    """What a plan counts of a checkpoint, in float32, as transformers makes its model."""
    from kvgraph.compiler.frontends import huggingface, measured

    return measured.describe(huggingface.describe(folder, "float32"), "float32", ranks)
