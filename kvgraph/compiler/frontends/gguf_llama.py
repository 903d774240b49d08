"""GGUF: fields of a configuration that Llama's models have, from the fields of their files."""

from __future__ import annotations

from kvgraph.compiler.frontends.gguf_file import Metadata
from kvgraph.compiler.frontends.gguf_layers import MIXTRAL, experts, has_biases, uniform
from kvgraph.contract.plain import JsonObject

NO_ROPE = 4
"""Llama 4: each layer at a multiple of it has no rotary embedding and no chunks."""

MAVERICK = 128
"""Experts of the Llama 4 that has no norms of queries and keys, by which llama.cpp knows it."""


def llama(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Mixtral too."""
    same = uniform(given, said, width)
    if not given.get("expert_count"):
        return same | {
            "attention_bias": has_biases(given, "attn_q"),
            "mlp_bias": has_biases(given, "ffn_up"),
        }
    return same | {"model_type": "mixtral"} | experts(given, MIXTRAL)


def llama4(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Chunks of attention and the temperature of queries are constants of llama.cpp."""
    given.require("rope.dimension_count", width)
    given.require("rope.freq_base_swa", said["rope_parameters"]["rope_theta"])
    given.require("attention.sliding_window_pattern", NO_ROPE)
    if given.get("attention.sliding_window") == 0:
        raise given.refuse("attention.sliding_window", "none, or a number above 0")
    step = int(given.required("interleave_moe_layer_step"))
    routed = experts(given, MIXTRAL)
    if not routed["num_local_experts"]:
        raise given.refuse("expert_count", "a number above 0")
    return routed | {
        "head_dim": width,
        "intermediate_size": given.required("expert_feed_forward_length"),
        "intermediate_size_mlp": given.required("feed_forward_length"),
        "interleave_moe_layer_step": step,
        "no_rope_layer_interval": NO_ROPE,
        "attention_chunk_size": 8192,
        "use_qk_norm": routed["num_local_experts"] != MAVERICK,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    }
