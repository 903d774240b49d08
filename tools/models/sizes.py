"""Small configurations of every decoder: each part that a family has is there and matters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WINDOW = 8
"""Shorter than the prompts, so that sliding layers lose tokens."""

Sizes = dict[str, Any]

SIZES: Sizes = {
    "vocab_size": 160,
    "hidden_size": 64,
    "embedding_size": 64,
    "word_embed_proj_dim": 64,
    "intermediate_size": 96,
    "ffn_dim": 96,
    "d_ff": 96,
    "ffn_hidden_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "attention_head_size": 16,
    "kv_channels": 16,
    "max_position_embeddings": 256,
    "n_positions": 256,
    "n_ctx": 256,
    "max_seq_len": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "decoder_layers": 2,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 96,
    "sliding_window": WINDOW,
    "window_size": WINDOW,
    "attention_window_size": WINDOW,
    "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 5.0,
    "final_logit_softcapping": 10.0,
    # experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "top_k_experts": 2,
    "moe_k": 2,
    "moe_intermediate_size": 48,
    "expert_ffn_hidden_size": 48,
    "intermediate_size_mlp": 96,
    "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 48,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    # latent attention and its indexer
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 32,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 2,
    # other heads in other layers
    "swa_head_dim": 16,
    "swa_v_head_dim": 16,
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    # inputs of each layer
    "vocab_size_per_layer_input": 160,
    "hidden_size_per_layer_input": 16,
    "laurel_rank": 8,
    # recurrent layers
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_state": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 8,
    "chunk_size": 8,
    "state_size": 16,
    "ssm_state_size": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "lru_width": 64,
    "num_mem_blocks": 1,
}
"""By the name of a field, set where a configuration has it."""

ROPE: Sizes = {"rope_type": "default", "rope_theta": 10000.0}
OPTIONAL = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "q_lora_rank",
    "kv_lora_rank",
)
"""A family that leaves them out by default has no such part."""


def small(kind: str, own: Sizes) -> PretrainedConfig:
    """The configuration of model type `kind`; `own` settings win over SIZES.

    Each kind of layer that the family has by default is there once, unless `own` says the layers.
    """
    from transformers.models.auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    fields = _fields(config_class, default)
    settings = {name: size for name, size in SIZES.items() if name in fields}
    for name in OPTIONAL:
        if name in settings and getattr(default, name, None) is None:
            del settings[name]
    if "kv_lora_rank" in settings:  # keys of all heads are made of one latent
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    if isinstance(getattr(config_class, "head_dim", None), property):
        settings.pop("head_dim", None)
    if "rope_parameters" not in own:
        settings |= _rope(default)
    if "layer_types" not in own and "num_hidden_layers" not in own:
        settings |= _layers(config_class, default, settings.get("num_hidden_layers", 2))
    return config_class(**settings | own)


def _fields(config_class: type[PretrainedConfig], default: PretrainedConfig) -> set[str]:
    """Names that the class takes, each once: a field, or what other families call it."""
    others: dict[str, str] = getattr(config_class, "attribute_map", {})
    known = set(vars(default)) | set(others) | set(config_class.__dataclass_fields__)
    renamed = {own for name, own in others.items() if name in SIZES}
    return known - renamed


def _rope(default: PretrainedConfig) -> Sizes:
    """Plain frequencies; of a family that stretches them, stretched ones of this size."""
    given = getattr(default, "rope_parameters", None)
    if not isinstance(given, dict) or "rope_type" not in given:
        return {}
    kept = {k: v for k, v in given.items() if k == "partial_rotary_factor"}
    if given["rope_type"] == "yarn":
        kept = given | {"factor": 2.0, "original_max_position_embeddings": 64}
    return {"rope_parameters": ROPE | kept}


def _layers(config_class: type[PretrainedConfig], default: PretrainedConfig, count: int) -> Sizes:
    """A layer of each kind, or `count` of the only one."""
    kinds = getattr(default, "layer_types", None)
    name = getattr(config_class, "attribute_map", {}).get("layer_types", "layer_types")
    derived = getattr(config_class, name, None)
    if not kinds or (isinstance(derived, property) and derived.fset is None):
        return {}
    each = list(dict.fromkeys(kinds))
    if len(each) == 1:
        return {"layer_types": each * count}
    return {"layer_types": each, "num_hidden_layers": len(each)}
