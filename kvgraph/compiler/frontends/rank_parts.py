"""Decide how attention and feed-forward layers are cut, by the names of all their weights.

transformers' plan of a model leaves some attention whole, or cuts it and not its norms; some models
have no plan. Attention with an unknown part is left out: from outside it cannot be seen whether the
part uses all heads together.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

from torch import nn

ALL_HEADS = "norm_of_all_heads"
"""Style of a norm over all heads of a token. Its input is gathered from all ranks, and each rank
keeps its own part of the result."""

EACH_HEAD = "norm_of_each_head"
"""Style of a module whose weight has a row for each head."""

PACKED_HEADS = "packed_heads"
"""Style of one projection that makes queries, keys and values in this order. The attention code
splits them by the numbers of heads in its config (Phi-3)."""

_LATENT = {
    "kv_a_proj_with_mqa": "replicate",
    "kv_a_layernorm": "replicate",
    "kv_b_proj": "colwise",
    "o_proj": "rowwise",
}
KINDS = (
    {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"},
    {"q_proj": "colwise"} | _LATENT,
    {"q_a_proj": "replicate", "q_a_layernorm": "replicate", "q_b_proj": "colwise"} | _LATENT,
)
"""Known kinds of attention, as part -> style: four projections, or DeepSeek's latent attention with
one projection for queries or two. Parts that make a latent are whole on each rank."""

NORMS = {
    "q_norm": "q_proj",
    "k_norm": "k_proj",
    "query_layernorm": "q_proj",
    "key_layernorm": "k_proj",
}
"""Known norms of attention, and the projection whose heads each takes."""

GATE = "gate_proj"
"""Name of a projection that gates attention's result before `o_proj`."""

SINKS = "sinks"
"""Name of a parameter of the attention itself with a value for each head."""

FEED_FORWARD = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}
"""Parts of a gated feed-forward layer, and their styles."""

PACKED_FEED_FORWARD = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
"""Parts of a feed-forward layer with gate and up in one projection, and their styles."""

_PACKED_ATTENTION = {"qkv_proj": PACKED_HEADS, "o_proj": "rowwise"}


def feed_forward_rows(module: nn.Module, ranks: int) -> Mapping[str, str] | None:
    """Style of each part of a gated feed-forward layer. None: `module` is none.

    Empty: `ranks` do not divide its inner width.
    """
    parts = _parts(module)
    for rows in (FEED_FORWARD, PACKED_FEED_FORWARD):
        if parts.keys() == rows.keys() and not module._parameters:
            down = parts["down_proj"]
            is_even = isinstance(down, nn.Linear) and down.in_features % ranks == 0
            return rows if is_even else {}
    return None


def whole_rows(module: nn.Module) -> Mapping[str, str] | None:
    """Style of each part of a layer that no rank can compute a part of. None: any other layer.

    It is a feed-forward layer that keeps the largest of all its gates (Gemma 3n).
    """
    share = getattr(module, "activation_sparsity", 0.0)
    return dict.fromkeys(_parts(module), "replicate") if share else None


def attention_rows(module: nn.Module) -> Mapping[str, str] | None:
    """Style of each part or parameter of an attention. None: `module` is no attention.

    Empty: it is of no known kind.
    """
    parts = _parts(module)
    if not (hasattr(module, "layer_idx") and parts.keys() & {"q_proj", "q_b_proj", "qkv_proj"}):
        return None
    if parts.keys() == _PACKED_ATTENTION.keys() and not module._parameters:
        return _PACKED_ATTENTION if any(packed_heads(module)) else {}
    kind = next((kind for kind in KINDS if kind.keys() <= parts.keys()), {})
    if not all("weight" in _shapes(parts[name]) for name in kind):  # weights in another layout
        return {}
    rows = dict(kind)
    for name in parts.keys() - kind.keys():
        rows |= _other_part(name, parts, getattr(module, "head_dim", 0))
    own = {name for name, weight in module._parameters.items() if weight is not None}
    rows |= dict.fromkeys(own & {SINKS}, "colwise")
    return rows if rows.keys() == parts.keys() | own else {}


def packed_heads(attention: nn.Module) -> tuple[int, int]:
    """Numbers of query heads and kv heads that `qkv_proj` makes; (0, 0) if its rows do not fit."""
    kv_heads, head_dim = (getattr(attention, n, 0) for n in ("num_key_value_heads", "head_dim"))
    heads = getattr(getattr(attention, "config", None), "num_attention_heads", 0)
    rows = _shapes(attention.get_submodule("qkv_proj"))["weight"][0]
    return (heads, kv_heads) if rows == (heads + 2 * kv_heads) * head_dim else (0, 0)


def keep_heads(attention: nn.Module, heads: int, kv_heads: int) -> None:
    """Set the numbers of heads by which the attention splits the result of `qkv_proj`."""
    attention.num_key_value_heads = kv_heads  # type: ignore[assignment]
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads = heads  # type: ignore[union-attr]
    attention.config.num_key_value_heads = kv_heads  # type: ignore[union-attr]


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    return {name: part for name, part in module.named_children() if [*part.parameters()]}


def _other_part(
    name: str, parts: Mapping[str, nn.Module], head_dim: int
) -> Iterator[tuple[str, str]]:
    """The `(name, style)` of a further part of attention; nothing if the part is not known."""
    shapes, queries = _shapes(parts[name]), _shapes(parts.get("q_proj"))
    if name == GATE and "weight" in shapes and shapes["weight"] == queries.get("weight"):
        yield name, "colwise"
    elif name in NORMS and NORMS[name] in parts:
        width = _shapes(parts[NORMS[name]])["weight"][0]
        if set(shapes.values()) == {(head_dim,)}:
            yield name, "replicate"
        elif shapes == {"weight": (width,)}:
            yield name, ALL_HEADS
        elif shapes == {"weight": (width // max(head_dim, 1), head_dim)}:
            yield name, EACH_HEAD


def _shapes(module: nn.Module | None) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in module.named_parameters()} if module else {}
