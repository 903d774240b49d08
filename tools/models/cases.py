"""The cases: every decoder that transformers has, and settings that turn its parts on."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tools.models.sizes import ROPE, SIZES, Sizes, small

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BOTH = ["full_attention", "sliding_attention"]
HALF_ROPE: Sizes = {"rope_parameters": ROPE | {"partial_rotary_factor": 0.5}}
LLAMA4: Sizes = {
    "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
    "num_hidden_layers": 4,
    "no_rope_layers": [1, 1, 1, 0],
    "attention_chunk_size": 16,
    "floor_scale": 8,
}
HYBRID = ["mamba", "mamba", "hybrid", "mamba"]
SCALED: Sizes = {
    "embedding_multiplier": 2.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}


def _rope(kind: str, **fields: float) -> Sizes:
    return {"rope_parameters": ROPE | {"rope_type": kind, **fields}}


SEEN: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 16,
}

SETTINGS: dict[str, Sizes] = {
    "llama:llama3": _rope(
        "llama3",
        factor=4.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "llama:yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=64),
    "llama:linear": _rope("linear", factor=4.0),
    "llama:bias": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"use_sliding_window": True, "layer_types": BOTH},
    "qwen2_moe": {"use_sliding_window": True, "layer_types": BOTH},
    "qwen2_moe:full": {"use_sliding_window": False, "layer_types": BOTH[:1] * 2},
    "qwen3": {"use_sliding_window": True, "layer_types": BOTH},
    "qwen3_moe": {"use_sliding_window": True, "norm_topk_prob": True},
    "phi": {"qk_layernorm": True, "rope_parameters": HALF_ROPE["rope_parameters"]},
    "phi3:partial": HALF_ROPE,
    "phimoe": {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "phimoe:full": {
        "sliding_window": None,
        "router_jitter_noise": 0.0,
        "input_jitter_noise": 0.0,
    },
    "gpt2:scale": {"scale_attn_by_inverse_layer_idx": True},
    "gptj": {"rotary_dim": 8},
    "codegen": {"rotary_dim": 8},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "alibi": False},
    "falcon:alibi": {"new_decoder_architecture": False, "alibi": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25},
    "granite": SCALED,
    "granitemoe": SCALED,
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention"],
        "num_hidden_layers": 2,
        "position_embedding_type": "rope",
    },
    "granitemoehybrid:attention": {
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
    },
    "olmo": {"clip_qkv": 1.0},
    "olmoe": {"clip_qkv": 1.0},
    "glm4_moe": {"use_qk_norm": True},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        "intermediate_size": [96] * 4,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
    },
    "gemma4_text:own": {"num_kv_shared_layers": 0},
    "llama4_text": LLAMA4,
    "llama4_text:one": LLAMA4 | {"num_experts_per_tok": 1},
    "smollm3": {"no_rope_layers": [1, 0], "use_sliding_window": False},
    "nemotron": HALF_ROPE,
    "persimmon": HALF_ROPE,
    "gpt_neox": {"rotary_pct": 0.5},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
        "mamba_dt_rank": 8,
    },
    "bamba": {"attn_layer_indices": [1]},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 1, "expand": 2},
    "nemotron_h": {"num_hidden_layers": 3, "hybrid_override_pattern": "M-*"},
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": HYBRID,
        "mamba_ngroups": 1,
        "n_mamba_heads": 8,
        "use_mem_rope": True,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "minimax": {"block_size": 8},
    "mpt": {"n_heads": 4, "d_model": 64, "n_layers": 2, "expansion_ratio": 2},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "xglm": {"d_model": 64, "num_layers": 2, "attention_heads": 4},
    "xlnet": {"d_model": 64, "n_head": 4, "d_head": 16, "n_layer": 2},
    "exaone4": {"sliding_window_pattern": 2},
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "block_ff_dim": 96,
        "block_auto_adjust_ff_dim": False,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_hidden_layers": 2,
        "num_dense_layers": 1,
    },
    "moshi": {"num_codebooks": 2},
    "hunyuan_v1_moe": {"moe_topk": 2},
    "ernie4_5_moe": {
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": 1,
    },
    "doge": {"is_moe": False, "keep_window_size": 16},
    "qwen2_5_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen2_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "qwen3_vl_text": {"rope_parameters": ROPE | {"mrope_section": [2, 3, 3]}},
    "phi4_multimodal": {
        "original_max_position_embeddings": 256,
        "partial_rotary_factor": 1.0,
        "vision_config": SEEN | {"crop_size": 32, "image_token_id": 158, "feature_layer": -2},
        "audio_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "nemo_conv_channels": 32,
            "ext_pw_out_channel": 32,
            "audio_token_id": 159,
            "downsample_rate": 1,
        },
    },
    "longcat_flash": {"num_layers": 2, "moe_topk": 2, "zero_expert_num": 2},
    "dbrx": {
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 1.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "num_hidden_layers": 2,
        "index_block_size": 8,
        "index_topk_blocks": 2,
    },
}
"""Name of a case, "model type" or "model type:variant" -> its settings; others have SIZES alone."""


class Whole(NamedTuple):
    """A checkpoint as it is published, whose decoder is a part of a model that also sees."""

    kind: str
    text: str
    own: Sizes


VISION: Sizes = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 32,
    "patch_size": 16,
    "out_hidden_size": 64,
    "num_channels": 3,
}
TOKENS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
    "boi_token_id",
    "boi_token_index",
    "eoi_token_id",
    "eoi_token_index",
    "audio_token_id",
)
"""Ids that a whole model gives to what is no text: the last ones of the vocabulary."""

WHOLE = {
    "gemma3 (whole)": Whole("gemma3", "gemma3_text", {"mm_tokens_per_image": 4}),
    "gemma4 (whole)": Whole("gemma4", "gemma4_text:own", {}),
    "llama4 (whole)": Whole("llama4", "llama4_text:one", {}),
    "llava (whole)": Whole("llava", "llama", {}),
    "mistral3 (whole)": Whole("mistral3", "mistral", {}),
    "qwen2_5_vl (whole)": Whole("qwen2_5_vl", "qwen2_5_vl_text", {}),
    "qwen3_vl (whole)": Whole("qwen3_vl", "qwen3_vl_text", {}),
}


def names() -> list[str]:
    """All cases, by name: every causal language model of transformers, and the variants above."""
    from transformers.models.auto import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    known = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    given = {name for name in SETTINGS if name.partition(":")[0] in known}
    whole = {name for name, case in WHOLE.items() if case.kind in CONFIG_MAPPING}
    return sorted(known | given | whole)


def config_of(name: str) -> PretrainedConfig:
    """The small configuration of a case."""
    if name not in WHOLE:
        return small(name.partition(":")[0], SETTINGS.get(name, {}))
    from transformers.models.auto import CONFIG_MAPPING

    kind, text, own = WHOLE[name]
    config_class = CONFIG_MAPPING[kind]
    default = config_class()
    seen = default.vision_config or CONFIG_MAPPING[f"{kind}_vision"]()
    vision = {k: v for k, v in VISION.items() if hasattr(seen, k)}
    vision["model_type"] = seen.model_type
    named = [token for token in TOKENS if hasattr(default, token)]
    last = SIZES["vocab_size"] - 1
    ids = {token: last - i for i, token in enumerate(named)}
    text_config = config_of(text).to_dict()
    return config_class(text_config=text_config, vision_config=vision, **ids, **own)
