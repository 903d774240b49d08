"""GGUF: fields of a configuration that are an architecture's own, from the fields of its files.

Constants that llama.cpp keeps in its code, such as the scale of Gemma's queries, are here.
"""

from __future__ import annotations

from collections.abc import Callable

from kvgraph.compiler.frontends.folder import FULL, SLIDING
from kvgraph.compiler.frontends.gguf_fields import entries
from kvgraph.compiler.frontends.gguf_file import Metadata
from kvgraph.compiler.frontends.gguf_gemma import gemma2, gemma3, gemma4
from kvgraph.compiler.frontends.gguf_layers import (
    MIXTRAL,
    experts,
    has_biases,
    layer_types,
    partial,
    uniform,
    window,
)
from kvgraph.compiler.frontends.gguf_llama import llama, llama4
from kvgraph.compiler.frontends.gguf_norms import (
    cohere2,
    command_r,
    gpt2,
    nemotron,
    stablelm,
    starcoder2,
)
from kvgraph.compiler.frontends.gguf_routers import GATE, SAID, SIGMOID, SOFTMAX, require_gate
from kvgraph.contract.plain import JsonObject

EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}

ERNIE = {
    "expert_count": "moe_num_experts",
    "expert_used_count": "moe_k",
    "expert_feed_forward_length": "moe_intermediate_size",
    "interleave_moe_layer_step": "moe_layer_interval",
}

HUNYUAN = {"expert_count": "num_experts", "expert_used_count": "moe_topk"}

ROUTED = EXPERTS | {"expert_count": "n_routed_experts"}


def _attention(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """A model whose layers are all equal, and whose attention may have biases."""
    return uniform(given, said, width) | {"attention_bias": has_biases(given, "attn_q")}


def _qwen3_moe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    return _attention(given, said, width) | experts(given, EXPERTS) | {"norm_topk_prob": True}


def _qwen2_moe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    shared = given.required("expert_shared_feed_forward_length")
    return (
        uniform(given, said, width)
        | experts(given, EXPERTS)
        | {"norm_topk_prob": False, "shared_expert_intermediate_size": shared}
    )


def _hunyuan_moe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Experts and the shared one are equally wide."""
    size = given.required("feed_forward_length")
    for name in ("expert_feed_forward_length", "expert_shared_feed_forward_length"):
        given.require(name, size)
    given.require("expert_shared_count", 1)
    return _attention(given, said, width) | experts(given, HUNYUAN)


def _olmo2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Olmo 3 too, whose layers with a window have rotary embeddings without scaling."""
    if not given.number("attention.sliding_window", 0):
        return uniform(given, said, width)
    given.require("rope.dimension_count", width)
    rope: JsonObject = said["rope_parameters"]
    theta = given.number("rope.freq_base_swa", rope["rope_theta"])
    return {
        "model_type": "olmo3",
        "sliding_window": window(given, 0),
        "layer_types": layer_types(given, said["num_hidden_layers"], 4),
        "rope_parameters": {FULL: rope, SLIDING: {"rope_type": "default", "rope_theta": theta}},
    }


def _exaone4(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Layers without a window have no rotary embeddings if others have one."""
    given.require("rope.dimension_count", width)
    layers = said["num_hidden_layers"]
    default = 4096 if layers == 64 else 0  # llama.cpp's, for the model of 32B
    if not given.number("attention.sliding_window", default):
        return {"sliding_window": None, "layer_types": [FULL] * layers}
    return {
        "sliding_window": window(given, default),
        "layer_types": layer_types(given, layers, 4),
    }


def _seed_oss(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    return uniform(given, said, width) | {
        "attention_bias": has_biases(given, "attn_q"),
        "attention_out_bias": has_biases(given, "attn_output"),
        "mlp_bias": has_biases(given, "ffn_up"),
    }


def _minimax_m2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    own = experts(given, MIXTRAL) | {
        "intermediate_size": given.required("expert_feed_forward_length")
    }
    return partial(given, said, width) | own


def _dots1(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    if not _has_sigmoid(given, said):
        raise given.refuse(GATE, f"{SIGMOID}, {SAID[SIGMOID]}")
    return uniform(given, said, width) | _routed(given, said)


def _olmoe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    own = {name: given.required(of) for of, name in EXPERTS.items() if "length" not in of}
    return uniform(given, said, width) | own | {"norm_topk_prob": False}


def _ernie_moe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Experts behind dense layers, in each layer or in every second, third..."""
    return (
        uniform(given, said, width)
        | experts(given, ERNIE)
        | {
            "moe_num_shared_experts": int(given.number("expert_shared_count", 0)),
            "moe_layer_start_index": int(given.number("leading_dense_block_count", 0)),
        }
    )


def _glm4(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Files of models that see images have other rotary pairs."""
    if any(entries(given.reader, f"{given.kind}.rope.dimension_sections")):
        raise given.refuse("rope.dimension_sections", "none")
    return partial(given, said, width) | {"attention_bias": has_biases(given, "attn_q")}


def _glm4_moe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    require_gate(given, SIGMOID)
    return (
        partial(given, said, width)
        | _routed(given, said)
        | {
            "attention_bias": has_biases(given, "attn_q"),
            "use_qk_norm": given.has("blk.0.attn_q_norm.weight"),
        }
    )


def _deepseek2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """DeepSeek V2 and V3, GLM-4.7-Flash: attention over a latent of keys and values.

    Older files have the widths of heads as the lengths of keys and values; later ones have there
    those of the latent.
    """
    length = "{}_length_mla" if given.get("attention.key_length_mla") else "{}_length"
    key, value = (given.required(f"attention.{length.format(of)}") for of in ("key", "value"))
    part = given.required("rope.dimension_count")
    scaling: JsonObject = said["rope_parameters"]
    if scaling["rope_type"] == "yarn":
        given.required("rope.scaling.yarn_log_multiplier")
    shared = _routed(given, said) | {
        "num_key_value_heads": said["num_attention_heads"],
        "q_lora_rank": given.get("attention.q_lora_rank"),
        "kv_lora_rank": given.required("attention.kv_lora_rank"),
        "head_dim": part,
        "qk_rope_head_dim": part,
        "qk_nope_head_dim": key - part,
        "v_head_dim": value,
    }
    if _has_sigmoid(given, said):
        return shared | {"model_type": "deepseek_v3"}
    given.require("expert_weights_norm", 0)
    method = "greedy" if shared["n_group"] == 1 else "group_limited_greedy"
    return shared | {"topk_method": method}


def _has_sigmoid(given: Metadata, said: JsonObject) -> bool:
    """Whether sigmoids make weights of experts. A file that does not say so is of GLM-4.7-Flash, by
    llama.cpp's rule, or has a softmax."""
    kind = given.get(GATE)
    if kind not in (None, 0, SOFTMAX, SIGMOID):
        expected = (f"{each}, {SAID[each]}" for each in (SOFTMAX, SIGMOID))
        raise given.refuse(GATE, ", or ".join(expected))
    if kind in (SOFTMAX, SIGMOID):
        return kind == SIGMOID
    return given.required("block_count") in (47, 48) and said["vocab_size"] == 154880


def _routed(given: Metadata, said: JsonObject) -> JsonObject:
    """Experts behind dense layers, as DeepSeek has them. The last layers may predict more tokens:
    they are not used."""
    return experts(given, ROUTED) | {
        "num_hidden_layers": said["num_hidden_layers"]
        - int(given.number("nextn_predict_layers", 0)),
        "n_shared_experts": given.required("expert_shared_count"),
        "first_k_dense_replace": int(given.number("leading_dense_block_count", 0)),
        "routed_scaling_factor": given.number("expert_weights_scale", 0) or 1.0,
        "norm_topk_prob": bool(given.get("expert_weights_norm")),
        "n_group": int(given.number("expert_group_count", 0)) or 1,
        "topk_group": int(given.number("expert_group_used_count", 0)) or 1,
    }


def _granite(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    given.require("rope.scaling.finetuned", 1)  # llama.cpp's name for "has rotary embeddings"
    routed = experts(given, MIXTRAL) if given.kind == "granitemoe" else {}
    shared = int(given.number("expert_shared_feed_forward_length", 0))
    if shared and not routed:
        raise given.refuse("expert_shared_feed_forward_length", "none")
    if shared:
        routed |= {"model_type": "granitemoeshared", "shared_intermediate_size": shared}
    return (
        _attention(given, said, width)
        | routed
        | {
            "attention_multiplier": given.number("attention.scale", 0) or width**-0.5,
            "embedding_multiplier": given.number("embedding_scale", 0) or 1.0,
            "residual_multiplier": given.number("residual_scale", 0) or 1.0,
            "logits_scaling": given.number("logit_scale", 0) or 1.0,
        }
    )


def _mistral3(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """Ministral's queries grow with the position; those of other files do not."""
    dense = uniform(given, said, width) | {"model_type": "mistral", "sliding_window": None}
    beta = given.number("attention.temperature_scale", 0)
    if not beta:
        return dense
    scaling: JsonObject = said["rope_parameters"]
    if scaling["rope_type"] != "yarn":
        raise given.refuse("rope.scaling.type", "'yarn' with attention.temperature_scale")
    return dense | {
        "model_type": "ministral3",
        "rope_parameters": scaling | {"llama_4_scaling_beta": beta},
    }


def _gpt_oss(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    given.require("rope.dimension_count", width)
    scaling: JsonObject = said["rope_parameters"]
    given.require("rope.freq_base_swa", scaling["rope_theta"])
    exact = {"truncate": False} if scaling["rope_type"] == "yarn" else {}
    return {
        "num_local_experts": given.required("expert_count"),
        "num_experts_per_tok": given.required("expert_used_count"),
        "intermediate_size": given.required("expert_feed_forward_length"),
        "sliding_window": window(given, 0),
        "layer_types": layer_types(given, said["num_hidden_layers"], 2),
        "rope_parameters": scaling | exact,
    }


def _phi3(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """llama.cpp ignores the window, transformers does not."""
    scaling: JsonObject = said["rope_parameters"]
    if scaling["rope_type"] not in ("default", "longrope"):
        raise given.refuse("rope.scaling.type", "none or 'longrope'")
    part = given.number("rope.dimension_count", width) / width
    original = "original_max_position_embeddings"
    return {
        **({original: scaling[original]} if original in scaling else {}),
        "rope_parameters": scaling | {"partial_rotary_factor": part},
        "sliding_window": int(given.number("attention.sliding_window", 0)) or None,
    }


Own = Callable[[Metadata, JsonObject, int], JsonObject]
"""Makes fields of an architecture's own, from a file, the other fields and the width of heads."""

ARCHITECTURES: dict[str, tuple[str, Own]] = {
    "llama": ("llama", llama),
    "llama4": ("llama4_text", llama4),
    "mistral3": ("mistral", _mistral3),
    "smollm3": ("smollm3", uniform),
    "granite": ("granite", _granite),
    "granitemoe": ("granitemoe", _granite),
    "qwen2": ("qwen2", uniform),
    "qwen2vl": ("qwen2", uniform),
    "qwen3": ("qwen3", _attention),
    "qwen3vl": ("qwen3", _attention),
    "qwen2moe": ("qwen2_moe", _qwen2_moe),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "qwen3vlmoe": ("qwen3_moe", _qwen3_moe),
    "glm4": ("glm4", _glm4),
    "glm4moe": ("glm4_moe", _glm4_moe),
    "deepseek2": ("deepseek_v2", _deepseek2),
    "ernie4_5": ("ernie4_5", uniform),
    "ernie4_5-moe": ("ernie4_5_moe", _ernie_moe),
    "exaone4": ("exaone4", _exaone4),
    "seed_oss": ("seed_oss", _seed_oss),
    "hunyuan-dense": ("hunyuan_v1_dense", _attention),
    "hunyuan-moe": ("hunyuan_v1_moe", _hunyuan_moe),
    "starcoder2": ("starcoder2", starcoder2),
    "command-r": ("cohere", command_r),
    "cohere2": ("cohere2", cohere2),
    "stablelm": ("stablelm", stablelm),
    "nemotron": ("nemotron", nemotron),
    "gpt2": ("gpt2", gpt2),
    "minimax-m2": ("minimax_m2", _minimax_m2),
    "dots1": ("dots1", _dots1),
    "olmoe": ("olmoe", _olmoe),
    "olmo2": ("olmo2", _olmo2),
    "phi3": ("phi3", _phi3),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    "gemma": ("gemma", uniform),
    "gemma2": ("gemma2", gemma2),
    "gemma3": ("gemma3_text", gemma3),
    "gemma4": ("gemma4_text", gemma4),
}
"""Architecture of a file -> transformers' model type, and its own fields."""
