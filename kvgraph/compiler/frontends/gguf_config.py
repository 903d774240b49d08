"""GGUF: the configuration of a model, from the fields of its file.

Fields that change results but fit no configuration are refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.frontends.gguf_architectures import ARCHITECTURES
from kvgraph.compiler.frontends.gguf_fields import entries, field
from kvgraph.compiler.frontends.gguf_file import Metadata, converting
from kvgraph.compiler.frontends.gguf_norms import EPSILONS
from kvgraph.compiler.frontends.gguf_rope import rope
from kvgraph.compiler.frontends.gguf_routers import require_router
from kvgraph.compiler.frontends.gguf_tokenizer import ends
from kvgraph.contract.plain import JsonObject

if TYPE_CHECKING:
    from kvgraph.compiler.frontends.gguf_reader import Reader

FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
"""Fields that every file has -> their names in a configuration."""

LACKED = (
    "activation_sparsity_scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.output_scale",
    "attention.value_scale",
    "attention.indexer.top_k",
    "expert_group_scale",
    "experts_per_group",
    "full_attention_interval",
    "moe_latent_size",
    "rope.scaling.alpha",
    "router_logit_softcapping",
    "swiglu_clamp_exp",
    "swiglu_clamp_shexp",
)
"""Fields that change results of architectures that are not read; 0 means "none"."""

OPTIONAL = ("intermediate_size", "vocab_size", "num_key_value_heads", "rope_parameters")
"""Names in a configuration that are left out if they are none."""


def configuration(path: Path, reader: Reader, kind: str) -> JsonObject:
    """The configuration of a file of architecture `kind`, which is one of ARCHITECTURES.

    UnsupportedError for fields that are missing, or that no configuration can hold. ModelError if
    transformers does not accept the configuration.
    """
    import transformers

    given = Metadata(path, reader, kind)
    model_type, more = ARCHITECTURES[kind]
    tokens = entries(reader, "tokenizer.ggml.tokens")
    epsilon = "layer_norm" if kind in EPSILONS else "layer_norm_rms"
    said: JsonObject = {
        **{name: given.required(own) for own, name in FIELDS.items()},
        EPSILONS.get(kind, "rms_norm_eps"): given.required(f"attention.{epsilon}_epsilon"),
        "intermediate_size": given.get("feed_forward_length"),
        "vocab_size": given.get("vocab_size") or len(tokens) or None,
        "tie_word_embeddings": not given.has("output.weight"),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends(reader) or None,
        "pad_token_id": None,
    }
    heads = said["num_attention_heads"]
    said["num_key_value_heads"] = given.get("attention.head_count_kv") or heads
    width = int(given.get("attention.key_length") or said["hidden_size"] // heads)
    said["rope_parameters"] = rope(given, width)
    said |= more(given, said, width)
    require_router(given)
    _require_plain(given, width, said)
    _require_no_window(given, said)
    model_type = said.pop("model_type", model_type)
    known = {name: each for name, each in said.items() if each is not None or name not in OPTIONAL}
    with converting(path, "configuration"):
        read = transformers.AutoConfig.for_model(model_type, **known)
    config: JsonObject = read.to_dict() | {"dtype": "bfloat16"}
    is_own = "head_dim" in config or width != said["hidden_size"] // heads
    return config | ({"head_dim": said.get("head_dim", width)} if is_own else {})


def _require_plain(given: Metadata, width: int, said: JsonObject) -> None:
    """Raise UnsupportedError for metadata that changes results but fits no configuration.

    `said`: the configuration.
    """
    if "kv_lora_rank" not in said:
        given.require("attention.value_length", width)
    has_two = "global_head_dim" in said  # widths of heads
    local = said["head_dim"] if has_two else width
    given.require("attention.key_length_swa", local)
    given.require("attention.value_length_swa", local)
    part = local if has_two else given.number("rope.dimension_count", width)
    given.require("rope.dimension_count_swa", part)
    given.require("attention.causal", 1)
    rotary: JsonObject = said["rope_parameters"] or {}
    beta = rotary.get("llama_4_scaling_beta", 0)
    grown_from = rotary["original_max_position_embeddings"] if beta else 0
    scale = said.get("query_pre_attn_scalar", 1 if has_two else width) ** -0.5
    for name, plain in (
        ("attention.scale", said.get("attention_multiplier", scale)),
        ("attention.shared_kv_layers", said.get("num_kv_shared_layers", 0)),
        ("attention.temperature_length", grown_from),
        ("attention.temperature_scale", beta),
        ("attn_logit_softcapping", said.get("attn_logit_softcapping") or 0),
        ("final_logit_softcapping", said.get("final_logit_softcapping") or 0),
        *((name, 0) for name in LACKED),
        ("embedding_scale", said.get("embedding_multiplier", 1)),
        ("expert_weights_scale", said.get("routed_scaling_factor", 1)),
        ("residual_scale", said.get("residual_multiplier", 1)),
        ("logit_scale", said.get("logit_scale" if "logit_scale" in said else "logits_scaling", 1)),
    ):
        if given.get(name) != 0:  # llama.cpp's "none"
            given.require(name, plain)


def _require_no_window(given: Metadata, said: JsonObject) -> None:
    """Raise UnsupportedError if a file names a window that no layer of `said` has."""
    local = given.number("attention.sliding_window", 0)
    has_windows = said.get("sliding_window") or "attention_chunk_size" in said
    if not has_windows and 0 < local < said["max_position_embeddings"]:
        raise given.refuse("attention.sliding_window", "none")
