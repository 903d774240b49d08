"""GGUF: fields of a configuration that Gemma's models have, from the fields of their files."""

from __future__ import annotations

from kvgraph.compiler.frontends.folder import FULL, SLIDING
from kvgraph.compiler.frontends.gguf_file import Metadata
from kvgraph.compiler.frontends.gguf_layers import (
    experts,
    layer_types,
    of_layers,
    window,
)
from kvgraph.contract.plain import JsonObject

EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "top_k_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
}

PER_LAYER = "per_layer_token_embd.weight"

LARGEST_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of Gemma's models of 27B parameters, by which llama.cpp knows them."""


def _scale(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """The scale of queries of both Gemma 2 and Gemma 3."""
    if said["rope_parameters"]["rope_type"] not in ("default", "linear"):
        raise given.refuse("rope.scaling.type", "none or 'linear'")
    given.require("rope.dimension_count", width)
    largest = said["num_hidden_layers"] == LARGEST_LAYERS[given.kind]
    scalar = said["hidden_size"] // said["num_attention_heads"] if largest else width
    return {"query_pre_attn_scalar": scalar}


def gemma3(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    local = {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10000)}
    length = int(given.number("attention.sliding_window", 0))
    layers = said["num_hidden_layers"]
    return _scale(given, said, width) | {
        "sliding_window": length or None,
        "layer_types": layer_types(given, layers, 6) if length else [FULL] * layers,
        "rope_parameters": {FULL: said["rope_parameters"], SLIDING: local},
        "final_logit_softcapping": given.number("final_logit_softcapping", 0) or None,
        "attn_logit_softcapping": None,
    }


def gemma2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    given.require("rope.freq_base_swa", said["rope_parameters"]["rope_theta"])
    return _scale(given, said, width) | {
        "sliding_window": window(given, 4096),
        "layer_types": layer_types(given, said["num_hidden_layers"], 2),
        "final_logit_softcapping": given.number("final_logit_softcapping", 30) or None,
        "attn_logit_softcapping": given.number("attn_logit_softcapping", 50),
    }


def gemma4(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Layers without a window have heads of another width. They may lack a projection of values,
    which are then the keys, and have another number of those. The last layers may read keys and
    values of others, with a wider feed-forward network."""
    layers = said["num_hidden_layers"]
    types = layer_types(given, layers, 6)
    own = layers - int(given.number("attention.shared_kv_layers", 0))
    narrow, wide = of_layers(given, "feed_forward_length", [i < own for i in range(layers)])
    if wide not in (narrow, 2 * narrow):
        raise given.refuse("feed_forward_length", "the same or twice as much in the last layers")
    local, whole = of_layers(given, "attention.head_count_kv", [kind == SLIDING for kind in types])
    has_values = all(
        given.has(f"blk.{layer}.attn_v.weight") for layer in range(own) if types[layer] == FULL
    )
    if has_values and local != whole:
        raise given.refuse("attention.head_count_kv", "one number with projections of values")
    inputs = int(given.number("embedding_length_per_layer_input", 0))
    routed = experts(given, EXPERTS) if given.get("expert_count") else {}
    theta = given.number("rope.freq_base_swa", 10000)
    return {
        "head_dim": given.required("attention.key_length_swa"),
        "global_head_dim": width,
        "num_key_value_heads": local,
        "num_global_key_value_heads": None if has_values else whole,
        "attention_k_eq_v": not has_values,
        "num_kv_shared_layers": layers - own,
        "layer_types": types,
        "sliding_window": window(given, 0),
        "rope_parameters": {
            FULL: said["rope_parameters"],
            SLIDING: {"rope_type": "default", "rope_theta": theta},
        },
        "intermediate_size": narrow,
        "use_double_wide_mlp": wide != narrow,
        "hidden_size_per_layer_input": inputs,
        "enable_moe_block": bool(routed),
        "final_logit_softcapping": given.number("final_logit_softcapping", 0) or None,
        **({"vocab_size_per_layer_input": given.rows(PER_LAYER)} if inputs else {}),
        **routed,
    }
