"""GGUF: read the fields of a file, and the kind of value that each must have.

llama.cpp refuses a field of another type too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.compiler.frontends.found_instead import INSTEAD
from kvgraph.errors import ModelError, UnsupportedError

if TYPE_CHECKING:
    from kvgraph.compiler.frontends.gguf_reader import Reader

Scalar = str | int | float | None


@dataclass(frozen=True)
class Kind:
    """What a field may hold: text for errors, and a test of the value."""

    said: str
    fits: Callable[[object], bool]


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: object) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _list_of(said: str, fits: Callable[[object], bool]) -> Kind:
    return Kind(
        f"a list of {said}", lambda value: isinstance(value, list) and all(map(fits, value))
    )


def _or_list(one: Kind, several: Kind) -> Kind:
    return Kind(
        f"{one.said} or {several.said}", lambda value: one.fits(value) or several.fits(value)
    )


WHOLE = Kind("a whole number", _is_whole)
NUMBER = Kind("a finite number", _is_finite)
TEXT = Kind("text", _is_text)
FLAG = Kind("true or false", _is_flag)
TEXTS = _list_of("texts", _is_text)
NUMBERS = _list_of("finite numbers", _is_finite)
WHOLES = _list_of("whole numbers", _is_whole)
FLAGS = _list_of("true or false", lambda value: _is_flag(value) or _is_whole(value))

SPLIT = ("split.no", "split.count", "split.tensors.count")
"""Fields of a file that is a part."""

SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
"""Field of a GGUF file -> field of a generation_config.json."""

ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
"""Roles of tokens that end an answer."""

ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
"""Roles of tokens: name in a tokenizer's settings -> name in the file's fields."""

OF_FILE: Mapping[str, Kind] = {
    **dict.fromkeys(("general.architecture", "general.type", "general.name"), TEXT),
    **dict.fromkeys(SAMPLING, NUMBER),
    "general.sampling.top_k": WHOLE,
    **{f"tokenizer.ggml.{role}_token_id": WHOLE for role in (*ROLES.values(), *ENDS)},
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), TEXT),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), TEXTS),
    "tokenizer.ggml.scores": NUMBERS,
    "tokenizer.ggml.token_type": WHOLES,
    "tokenizer.ggml.add_bos_token": FLAG,
    "tokenizer.ggml.add_space_prefix": FLAG,
}
"""Fields that are the same in all architectures -> kind."""

COUNTS = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.key_length_mla",
    "attention.key_length_swa",
    "attention.kv_lora_rank",
    "attention.q_lora_rank",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "attention.value_length",
    "attention.value_length_mla",
    "attention.value_length_swa",
    "block_count",
    "context_length",
    "embedding_length",
    "embedding_length_per_layer_input",
    "expert_count",
    "expert_feed_forward_length",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "feed_forward_length",
    "interleave_moe_layer_step",
    "leading_dense_block_count",
    "nextn_predict_layers",
    "rope.dimension_count",
    "rope.dimension_count_swa",
    "rope.scaling.original_context_length",
    "vocab_size",
)
"""Whole numbers of an architecture that make its configuration."""

SCALES = (
    "attention.layer_norm_epsilon",
    "attention.layer_norm_rms_epsilon",
    "attention.scale",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_weights_scale",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_log_multiplier",
)
"""Other numbers of an architecture that make its configuration."""

OF_ARCHITECTURE: Mapping[str, Kind] = {
    **dict.fromkeys(COUNTS, WHOLE),
    **dict.fromkeys(SCALES, NUMBER),
    "attention.causal": FLAG,
    "attention.sliding_window_pattern": _or_list(WHOLE, FLAGS),
    "expert_gating_func": WHOLE,
    "expert_weights_norm": FLAG,
    "rope.dimension_sections": WHOLES,
    "rope.scaling.finetuned": FLAG,
    "rope.scaling.type": TEXT,
}
"""Fields of an architecture, without its name -> kind."""

MAY_BE_0 = (
    "attention.scale",
    "attention.shared_kv_layers",
    "attention.sliding_window",
    "attention.temperature_scale",
    "embedding_length_per_layer_input",
    "embedding_scale",
    "expert_count",
    "expert_group_count",
    "expert_group_used_count",
    "expert_shared_count",
    "expert_shared_feed_forward_length",
    "expert_used_count",
    "expert_weights_scale",
    "final_logit_softcapping",
    "leading_dense_block_count",
    "logit_scale",
    "nextn_predict_layers",
    "residual_scale",
    "rope.dimension_count",
    "rope.scale_linear",
    "rope.scaling.factor",
    "rope.scaling.yarn_log_multiplier",
)
"""Fields of COUNTS and SCALES for which 0 means "none"."""

MAY_BE_LISTS = {"gemma4": ("attention.head_count_kv", "feed_forward_length")}
"""Fields of COUNTS for which a file of an architecture may have a number for each layer."""


SIZES = (
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "embedding_length",
    "expert_count",
    "expert_feed_forward_length",
    "feed_forward_length",
    "vocab_size",
)
"""Fields of COUNTS that are dims of tensors, or divide one."""

DENSE = ".ffn_down.weight"

LAYER = re.compile(r"blk\.(\d+)\.")


def contents(reader: Reader, name: str) -> object:
    """The value of a field; None if it is missing. ModelError if its text is not in UTF-8."""
    found = reader.get_field(name)
    try:
        return None if found is None else found.contents()
    except UnicodeDecodeError as error:
        at = max(0, error.start - 20)
        raise ModelError(
            f"{reader.path}: {name}: expected text in UTF-8, got {error.object[at : at + 40]!r}; "
            f"{INSTEAD}"
        ) from error


def field(reader: Reader, name: str) -> Scalar:
    """The value of a field that is no list, or is one of a kind that was refused."""
    given: Scalar = contents(reader, name)  # type: ignore[assignment]
    return given


def entries(reader: Reader, name: str) -> list[object]:
    """Entries of a field that is a list; empty if it is missing or no list."""
    given = contents(reader, name)
    return given if isinstance(given, list) else []


def refuse(path: Path, what: str, expected: str, got: str) -> UnsupportedError:
    return UnsupportedError(f"{path}: {what}: expected {expected}, got {got}; {INSTEAD}")


def require_kinds(path: Path, reader: Reader, kinds: Mapping[str, Kind]) -> None:
    """Raise UnsupportedError if one of these fields is present and holds another kind of value."""
    for name, kind in kinds.items():
        given = contents(reader, name)
        if given is not None and not kind.fits(given):
            raise refuse(path, name, kind.said, f"{given!r:.100}")


def require_fields(path: Path, reader: Reader, kind: str) -> None:
    """Raise UnsupportedError if a field of architecture `kind` has another kind of value, or is no
    valid size."""
    lists = MAY_BE_LISTS.get(kind, ())
    kinds = {**OF_ARCHITECTURE, **dict.fromkeys(lists, _or_list(WHOLE, WHOLES))}
    require_kinds(path, reader, {f"{kind}.{name}": each for name, each in kinds.items()})
    for name in (*COUNTS, *SCALES):
        given = contents(reader, own := f"{kind}.{name}")
        least = 0 if name in MAY_BE_0 else 1e-30
        if isinstance(given, int | float) and given < least:
            raise refuse(path, own, "a number above 0", str(given))


def require_counts(path: Path, reader: Reader, kind: str) -> None:
    """Raise UnsupportedError for more layers or a larger size than the tensors of a file have.

    Memory, or hours, would go by else: a module is made of each layer. Layers that predict more
    tokens may be missing.
    """
    found = [LAYER.match(tensor.name) for tensor in reader.tensors]
    layers = max((int(each[1]) + 1 for each in found if each), default=0)
    behind = int(field(reader, f"{kind}.nextn_predict_layers") or 0)
    largest = max((int(size) for tensor in reader.tensors for size in tensor.shape), default=0)
    most = {"nextn_predict_layers": layers, "block_count": layers + behind}
    most |= dict.fromkeys(SIZES, largest)
    if not any(tensor.name.endswith(DENSE) for tensor in reader.tensors):
        del most["feed_forward_length"]  # layers are mixtures, and no tensor has this width
    for name, limit in most.items():
        what = "the largest dim of its tensors" if name in SIZES else "the layers of its tensors"
        given = contents(reader, own := f"{kind}.{name}")
        for each in given if isinstance(given, list) else [given]:
            if isinstance(each, int) and each > limit:
                raise refuse(path, own, f"at most {limit}, {what}", str(each))
