"""Fields of GGUF files, from the configuration of a tiny checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np

COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
USED = {"gemma4": "top_k_experts", "ernie4_5-moe": "moe_k", "hunyuan-moe": "moe_topk"}

GPT2 = {
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
"""Names in a configuration -> those of other models."""

EPSILONS = ("norm_epsilon", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
"""Names of the epsilon of layer norms."""

WITHOUT_WIDTH = ("mixtral", "granitemoe", "granitemoeshared", "olmoe")
"""Types of models whose files do not say how wide experts are."""

MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "routed_scaling_factor": "expert_weights_scale",
}


def add_epsilon(writer: Any, config: dict[str, Any]) -> None:
    for name in EPSILONS:
        if name in config:
            writer.add_layer_norm_eps(config[name])
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def add_latent(writer: Any, config: dict[str, Any], *, is_old: bool) -> None:
    """Widths of queries, keys and values, which older files have in other fields."""
    key, value = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    rank = config["kv_lora_rank"]
    if is_old:
        writer.add_key_length(key)
        writer.add_value_length(value)
    else:
        writer.add_key_length(rank + config["qk_rope_head_dim"])
        writer.add_value_length(rank)
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])


def add_gemma4(writer: Any, config: dict[str, Any]) -> None:
    """Fields of layers that differ."""
    local = [kind == "sliding_attention" for kind in config["layer_types"]]
    own = len(local) - config["num_kv_shared_layers"]
    widths = [1 + (config["use_double_wide_mlp"] and layer >= own) for layer in range(len(local))]
    writer.add_feed_forward_length([config["intermediate_size"] * width for width in widths])
    (full,) = {tuple(each.items()) for each in config["per_layer_config"].values()}
    whole, heads = dict(full), config["num_key_value_heads"]
    other = whole.get("num_key_value_heads", heads)
    writer.add_head_count_kv([heads if is_local else other for is_local in local])
    writer.add_key_length(whole["head_dim"])
    writer.add_value_length(whole["head_dim"])
    writer.add_rope_dimension_count(whole["head_dim"])
    for add in (writer.add_key_length_swa, writer.add_value_length_swa):
        add(config["head_dim"])
    writer.add_rope_dimension_count_swa(config["head_dim"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])


def add_own(writer: Any, name: str, config: dict[str, Any]) -> None:
    """Fields of rotary parameters, of windows, of caps and of experts."""
    import gguf

    if name == "gpt2":
        return
    rope = config["rope_parameters"]
    other = rope.get("sliding_attention")
    rope = rope.get("full_attention", rope)
    if name != "stablelm":
        writer.add_rope_freq_base(rope["rope_theta"])
    if other is not None and other["rope_theta"] != 10000:
        writer.add_rope_freq_base_swa(other["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        for part in ("long", "short"):
            numbers = np.array(rope[f"{part}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{part}.weight", numbers)
    if rope["rope_type"] in ("yarn", "longrope"):
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("mscale_all_dim"):
        unit = 0.1 if name == "deepseek2" else 1
        writer.add_rope_scaling_yarn_log_mul(unit * rope["mscale_all_dim"])
    if "llama_4_scaling_beta" in rope:
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if "partial_rotary_factor" in rope and name != "gemma4":
        width = config.get("head_dim", config["hidden_size"] // config["num_attention_heads"])
        writer.add_rope_dimension_count(int(width * rope["partial_rotary_factor"]))
    if name in ("gemma2", "gemma3", "gemma4", "gpt-oss", "olmo2", "exaone4", "phi3", "cohere2"):
        writer.add_sliding_window(config.get("sliding_window") or 0)
    if config["model_type"] in ("gemma4_text", "olmo3", "exaone4"):
        local = [kind == "sliding_attention" for kind in config["layer_types"]]
        writer.add_sliding_window_pattern(local)
    if name == "llama4":
        writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])
    if name == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
        writer.add_leading_dense_block_count(config["moe_layer_start_index"])
        writer.add_expert_shared_count(config["moe_num_shared_experts"])
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    for field, own in MULTIPLIERS.items():
        if field in config:
            writer.add_float32(f"{name}.{own}", config[field])
    is_dense = config["model_type"] in ("llama", "qwen3")  # tests may give them counts too
    count = None if is_dense else next((config[x] for x in COUNTS if x in config), None)
    if count is not None:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config[USED.get(name, "num_experts_per_tok")])
    if count is not None and config["model_type"] not in WITHOUT_WIDTH:
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        writer.add_expert_feed_forward_length(width)
    if name == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if name == "hunyuan-moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(1)
    if "shared_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])
    if name == "minimax-m2":
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name in ("glm4moe", "deepseek2", "dots1"):
        is_v2 = config["model_type"] == "deepseek_v2"
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_leading_dense_block_count(config.get("first_k_dense_replace", 1))
        kinds = gguf.ExpertGatingFuncType
        writer.add_expert_gating_func(kinds.SOFTMAX if is_v2 else kinds.SIGMOID)
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
