"""GGUF: the configuration of a model, from the fields of its file.

Constants that llama.cpp keeps in its code, such as the scale of Gemma's queries, are here. Fields
that change results but fit no configuration are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.frontends.gguf_file import Metadata, converting, entries, field
from kvgraph.compiler.frontends.gguf_rope import rope
from kvgraph.compiler.frontends.gguf_tokenizer import ends
from kvgraph.contract.plain import JsonObject

if TYPE_CHECKING:
    from gguf import GGUFReader

FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
"""Fields that every file has -> their names in a configuration."""

EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}

LARGEST_LAYERS = {"gemma2": 46, "gemma3": 62}
"""Layers of Gemma's models of 27B parameters, by which llama.cpp knows them."""


def configuration(path: Path, reader: GGUFReader, kind: str) -> JsonObject:
    """The configuration of a file of architecture `kind`, which is one of ARCHITECTURES.

    UnsupportedError for fields that are missing, or that no configuration can hold. ModelError if
    transformers does not accept the configuration.
    """
    import transformers

    given = Metadata(path, reader, kind)
    model_type, more = ARCHITECTURES[kind]
    tokens = entries(reader, "tokenizer.ggml.tokens")
    said: JsonObject = {
        **{name: given.required(own) for own, name in FIELDS.items()},
        "intermediate_size": given.get("feed_forward_length"),
        "vocab_size": given.get("vocab_size") or len(tokens) or None,
        "tie_word_embeddings": all(each.name != "output.weight" for each in reader.tensors),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends(reader) or None,
        "pad_token_id": None,
    }
    heads = said["num_attention_heads"]
    said["num_key_value_heads"] = given.get("attention.head_count_kv") or heads
    width = int(given.get("attention.key_length") or said["hidden_size"] // heads)
    said["rope_parameters"] = rope(given, width)
    said |= more(given, said, width)
    scale = said.get("query_pre_attn_scalar", width) ** -0.5
    _require_plain(given, width, scale)
    optional = ("intermediate_size", "vocab_size")
    known = {name: each for name, each in said.items() if each is not None or name not in optional}
    with converting(path, "configuration"):
        read = transformers.AutoConfig.for_model(model_type, **known)
    config: JsonObject = read.to_dict() | {"dtype": "bfloat16"}
    return config | ({"head_dim": width} if "head_dim" in config else {})


def _require_plain(given: Metadata, width: int, scale: float) -> None:
    """Raise UnsupportedError for metadata that changes results but fits no configuration.

    `scale`: of a layer's attention.
    """
    for name in (
        "attention.value_length",
        "attention.key_length_swa",
        "attention.value_length_swa",
    ):
        given.require(name, width)
    given.require("rope.dimension_count_swa", given.number("rope.dimension_count", width))
    given.require("attention.causal", 1)
    for name, plain in (
        ("attention.scale", scale),
        ("embedding_scale", 1),
        ("residual_scale", 1),
        ("logit_scale", 1),
    ):
        if given.get(name) != 0:  # llama.cpp's "none"
            given.require(name, plain)


def _dense(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """A model whose layers are all equal."""
    given.require("rope.dimension_count", width)
    window = given.number("attention.sliding_window", 0)
    if 0 < window < said["max_position_embeddings"]:
        raise given.refuse("attention.sliding_window", "none")
    return {}


def _llama(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    if given.get("expert_count"):
        raise given.refuse("expert_count", "none")
    return _dense(given, said, width)


def _qwen3_moe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    experts = {name: given.required(own) for own, name in EXPERTS.items()}
    experts["moe_intermediate_size"] = given.required("expert_feed_forward_length")
    return _dense(given, said, width) | experts | {"norm_topk_prob": True}


def _qwen2_moe(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    shared = given.required("expert_shared_feed_forward_length")
    return _qwen3_moe(given, said, width) | {
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": shared,
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
        "sliding_window": _window(given, 0),
        "layer_types": _layer_types(given, said["num_hidden_layers"], 2),
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


def _gemma(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """The scale of queries of both Gemma 2 and Gemma 3."""
    if said["rope_parameters"]["rope_type"] not in ("default", "linear"):
        raise given.refuse("rope.scaling.type", "none or 'linear'")
    given.require("rope.dimension_count", width)
    largest = said["num_hidden_layers"] == LARGEST_LAYERS[given.kind]
    scalar = said["hidden_size"] // said["num_attention_heads"] if largest else width
    return {"query_pre_attn_scalar": scalar}


def _gemma3(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    local = {"rope_type": "default", "rope_theta": given.number("rope.freq_base_swa", 10000)}
    window = int(given.number("attention.sliding_window", 0))
    layers = said["num_hidden_layers"]
    return _gemma(given, said, width) | {
        "sliding_window": window or None,
        "layer_types": _layer_types(given, layers, 6) if window else ["full_attention"] * layers,
        "rope_parameters": {"full_attention": said["rope_parameters"], "sliding_attention": local},
        "final_logit_softcapping": given.number("final_logit_softcapping", 0) or None,
        "attn_logit_softcapping": None,
    }


def _gemma2(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    given.require("rope.freq_base_swa", said["rope_parameters"]["rope_theta"])
    return _gemma(given, said, width) | {
        "sliding_window": _window(given, 4096),
        "layer_types": _layer_types(given, said["num_hidden_layers"], 2),
        "final_logit_softcapping": given.number("final_logit_softcapping", 30) or None,
        "attn_logit_softcapping": given.number("attn_logit_softcapping", 50),
    }


def _window(given: Metadata, default: int) -> int:
    window = int(given.number("attention.sliding_window", default))
    if window < 1:
        raise given.refuse("attention.sliding_window", "a number above 0")
    return window


def _layer_types(given: Metadata, layers: int, every: int) -> list[str]:
    """Which layers have a window. `every`: the period, whose last layer has none, if the file
    names none."""
    name = "attention.sliding_window_pattern"
    each = entries(given.reader, f"{given.kind}.{name}")
    period = every if given.get(name) is None else given.get(name)
    if isinstance(period, int):
        each = [not period or layer % period < period - 1 for layer in range(layers)]
    if len(each) != layers:
        raise given.refuse(name, f"a number, or one for each of {layers} layers")
    return ["sliding_attention" if has_window else "full_attention" for has_window in each]


Own = Callable[[Metadata, JsonObject, int], JsonObject]
"""Makes fields of an architecture's own, from a file, the other fields and the width of heads."""

ARCHITECTURES: dict[str, tuple[str, Own]] = {
    "llama": ("llama", _llama),
    "qwen2": ("qwen2", _dense),
    "qwen3": ("qwen3", _dense),
    "qwen2moe": ("qwen2_moe", _qwen2_moe),
    "qwen3moe": ("qwen3_moe", _qwen3_moe),
    "phi3": ("phi3", _phi3),
    "gpt-oss": ("gpt_oss", _gpt_oss),
    "gemma2": ("gemma2", _gemma2),
    "gemma3": ("gemma3_text", _gemma3),
}
"""Architecture of a file -> transformers' model type, and its own fields."""
