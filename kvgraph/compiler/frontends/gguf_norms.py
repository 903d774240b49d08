"""GGUF: fields of configurations of models with layer norms, from the fields of their files."""

from __future__ import annotations

from kvgraph.compiler.frontends.gguf_file import Metadata
from kvgraph.compiler.frontends.gguf_layers import (
    has_biases,
    layer_types,
    partial,
    uniform,
    window,
)
from kvgraph.contract.plain import JsonObject

EPSILONS = {
    "starcoder2": "norm_epsilon",
    "command-r": "layer_norm_eps",
    "cohere2": "layer_norm_eps",
    "stablelm": "layer_norm_eps",
    "nemotron": "norm_eps",
    "gpt2": "layer_norm_epsilon",
}
"""Architectures with layer norms -> the name of their epsilon in a configuration."""

STARCODER2_WINDOW = 4096
"""The window of every StarCoder2. llama.cpp's converter leaves it out."""

STABLELM_CONTEXT = 4096
"""The longest context of StableLMs whose rotary base is llama.cpp's default. Its converter leaves
the base out."""


def starcoder2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """llama.cpp has no window, transformers has one."""
    given.require("rope.dimension_count", width)
    length = int(given.number("attention.sliding_window", STARCODER2_WINDOW))
    return {"use_bias": has_biases(given, "attn_q"), "sliding_window": length or None}


def command_r(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    return uniform(given, said, width) | {
        "attention_bias": has_biases(given, "attn_q"),
        "logit_scale": given.number("logit_scale", 0) or 1.0,
        "use_qk_norm": given.has("blk.0.attn_q_norm.weight"),
    }


def cohere2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Layers without a window have no rotary embeddings."""
    given.require("rope.dimension_count", width)
    given.require("rope.freq_base_swa", said["rope_parameters"]["rope_theta"])
    return {
        "attention_bias": has_biases(given, "attn_q"),
        "logit_scale": given.required("logit_scale") or 1.0,
        "sliding_window": window(given, 0),
        "layer_types": layer_types(given, said["num_hidden_layers"], 4),
    }


def stablelm(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """A layer without a second norm computes attention and its network side by side."""
    if given.get("rope.freq_base") is None and said["max_position_embeddings"] > STABLELM_CONTEXT:
        raise given.refuse("rope.freq_base", f"a number with a context above {STABLELM_CONTEXT}")
    return partial(given, said, width) | {
        "use_qkv_bias": has_biases(given, "attn_q"),
        "use_parallel_residual": not given.has("blk.0.ffn_norm.weight"),
    }


def nemotron(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    return partial(given, said, width) | {
        "attention_bias": has_biases(given, "attn_q"),
        "mlp_bias": has_biases(given, "ffn_up"),
    }


def gpt2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Positions have embeddings, and no rotary ones."""
    given.require("attention.head_count_kv", said["num_attention_heads"])
    return {
        "n_inner": given.required("feed_forward_length"),
        "intermediate_size": None,
        "num_key_value_heads": None,
        "rope_parameters": None,
    }
