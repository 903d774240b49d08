"""update_and_attend: norms of heads, rope, store_kv and paged_attention of one layer as one op.

Decision: compiled graphs carry only this op, one per layer, so that the pool has a single consumer
at any point and a host runtime has no reason to copy it.
"""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.ops import spec
from kvgraph.ops._paged_attention import paged_attention
from kvgraph.ops._rms_norm import rms_norm
from kvgraph.ops._store_kv import store_kv

ROPE_HALVES, ROPE_INTERLEAVED = 0, 1


def rotate(x_THD: Array, cos_sin: Array, positions_T: Array, rope_style: int) -> Array:
    """Rotary embedding of the first `rotary_dim` elements of every head (RoFormer, section 3.4.2),
    in float32.

    `cos_sin [max_positions, rotary_dim]` holds the cosines of the rotary_dim/2 angles, then their
    sines. Style 0 pairs element i with i + rotary_dim/2 (GPT-NeoX), style 1 pairs 2i with 2i+1.
    """
    rotary = cos_sin.shape[1]
    cos_T1H, sin_T1H = np.split(cos_sin[positions_T][:, None, :], 2, axis=-1)
    x = x_THD.astype(np.float32)
    part, rest = x[..., :rotary], x[..., rotary:]
    if rope_style == ROPE_INTERLEAVED:
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part[..., : rotary // 2], part[..., rotary // 2 :]
    pair = (a * cos_T1H - b * sin_T1H, b * cos_T1H + a * sin_T1H)
    if rope_style == ROPE_INTERLEAVED:
        rotated = np.stack(pair, -1).reshape(part.shape)
    else:
        rotated = np.concatenate(pair, -1)
    return np.concatenate([rotated, rest], -1)


def update_and_attend(
    q_TND: Array,
    kv_blocks: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    lookup_table: Array,
    max_lengths: Array,
    k_TKD: Array | None = None,
    v_TKD: Array | None = None,
    cos_sin: Array | None = None,
    kv_scales: Array | None = None,
    sinks_N: Array | None = None,
    q_norm_D: Array | None = None,
    k_norm_D: Array | None = None,
    *,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    causal: int = 1,
    v_head_dim: int = 0,
    chunked: int = 0,
    rope_style: int = ROPE_HALVES,
    norm_epsilon: float = 0.0,
    norm_offset: float = 0.0,
) -> Array:
    """Reference. Without k and v nothing is stored: the layer reads another layer's cache.

    Norm and rotation of a head are in float32, and are rounded once.
    """
    counts = np.diff(input_row_offsets)
    rows = np.repeat(np.arange(len(counts)), counts)
    positions = cache_lengths[rows] + np.arange(len(rows)) - input_row_offsets[rows]

    def prepared(x_THD: Array, norm_D: Array | None) -> Array:
        wide = x_THD.astype(np.float32)
        if norm_D is not None:
            wide = rms_norm(wide, norm_D, epsilon=norm_epsilon, weight_offset=norm_offset)
        if cos_sin is not None:
            wide = rotate(wide, cos_sin, positions, rope_style)
        return wide.astype(x_THD.dtype)

    q_TND = prepared(q_TND, q_norm_D)
    if k_TKD is not None:
        k_TKD = prepared(k_TKD, k_norm_D)
    index = (input_row_offsets, cache_lengths, lookup_table)
    if k_TKD is not None and v_TKD is not None:
        store_kv(kv_blocks, k_TKD, v_TKD, *index, kv_scales, layer=layer)
    return paged_attention(
        q_TND,
        kv_blocks,
        *index,
        max_lengths,
        kv_scales,
        sinks_N,
        layer=layer,
        scale=scale,
        window=window,
        softcap=softcap,
        causal=causal,
        v_head_dim=v_head_dim,
        chunked=chunked,
    )


def _rotary_fault(rotary_dim: int, head_dim: int) -> bool | str:
    fits = rotary_dim % 2 == 0 and rotary_dim <= head_dim
    return not fits and f"an even number of at most head_dim {head_dim}"


def _norm_fault(of: str | None, other: str | None, k: str | None) -> bool | str:
    """Whether only `other` is normalised, though both are given."""
    return of is None and other is not None and k is not None and NORMS


PAIR = "both k and v or neither"
NORMS = "both q_norm and k_norm or neither"
STYLES = (ROPE_HALVES, ROPE_INTERLEAVED)

UPDATE_AND_ATTEND = spec.OpSpec(
    name="update_and_attend",
    doc="One layer's cache work: RMSNorm of each head of q and k (if q_norm is given), rotate them "
    "(if cos_sin is given), store k and v, attend.",
    inputs=(
        spec.Q,
        spec.KV_BLOCKS,
        spec.ROW_OFFSETS,
        spec.CACHE_LENGTHS,
        spec.LOOKUP_TABLE,
        spec.MAX_LENGTHS,
        spec.Operand("k", spec.K.dims, spec.ACTIVATION, optional=True),
        spec.Operand("v", spec.V.dims, spec.ACTIVATION, optional=True),
        spec.COS_SIN,
        spec.KV_SCALES,
        spec.SINKS,
        spec.Operand("q_norm", ("head_dim",), spec.ACTIVATION, optional=True),
        spec.Operand("k_norm", ("head_dim",), spec.ACTIVATION, optional=True),
    ),
    outputs=(spec.OUT, spec.KV_BLOCKS_OUT, spec.KV_SCALES_OUT),
    attributes=(
        *spec.ATTENTION_ATTRIBUTES,
        spec.Attribute("rope_style", "int", ROPE_HALVES),
        spec.Attribute("norm_epsilon", "float", 0.0),
        spec.Attribute("norm_offset", "float", 0.0),
    ),
    reference=update_and_attend,
    rules=(
        spec.Rule("v", lambda k, v: k is not None and v is None and PAIR, got="only k"),
        spec.Rule("k", lambda k, v: k is None and v is not None and PAIR, got="only v"),
        *spec.ATTENTION_RULES,
        spec.Rule(
            "rope_style",
            lambda rope_style: rope_style not in STYLES and "0 (halves) or 1 (interleaved)",
        ),
        spec.Rule("cos_sin: dim rotary_dim", _rotary_fault),
        spec.Rule(
            "k_norm", lambda k, k_norm: k is None and k_norm is not None and "none without k", "one"
        ),
        spec.Rule("k_norm", _norm_fault, "only q_norm", ("k_norm", "q_norm", "k")),
        spec.Rule("q_norm", _norm_fault, "only k_norm", ("q_norm", "k_norm", "k")),
        spec.at_least_0("norm_epsilon"),
        spec.finite("norm_offset"),
    ),
)
