"""paged_attention: attention of ragged rows over the pages that their lookup rows name.

Decision: the pool's dtype decides the precision of the products. Over float32 and float16 pools
they are in float32. Over a pool of fewer bits a backend may round queries and softmax weights to
bfloat16: the cache has lost that precision already. CPU kernels do so if the processor multiplies
bfloat16, with one exception: few query rows over an int8 pool are rounded to 16-bit integers with
one scale per row, since bfloat16 would need a conversion of every key. Sums are in float32; sums of
integers are exact.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.ops import spec


def gather_row(
    kv_blocks: Array,
    kv_scales: Array | None,
    kind: int,
    layer: int,
    page_ids: Array,
    length: int,
    width: int,
) -> Array:
    """K (`kind` 0) or V (1) of a row's first `length` tokens, float32 `[length, K, width]`."""
    pages_PSKD = kv_blocks[page_ids, kind, layer].astype(np.float32)
    if kv_scales is not None:
        group = kv_blocks.shape[-1] // kv_scales.shape[-1]
        pages_PSKD = pages_PSKD * np.repeat(kv_scales[page_ids, kind, layer], group, axis=-1)
    row_SKD: Array = pages_PSKD.reshape(-1, *pages_PSKD.shape[2:])[:length, :, :width]
    return row_SKD


def visible(
    queries: int, keys: int, *, causal: bool, window: int, chunked: bool = False
) -> npt.NDArray[np.bool_]:
    """Mask `[queries, keys]`. Query t is at position `keys - queries + t`; key j is visible to
    position i iff `j <= i` (causal) and `i - window < j` (window > 0). A chunked window begins at a
    multiple of its length: `i - i % window <= j`."""
    i = np.arange(keys - queries, keys)[:, None]
    j = np.arange(keys)[None, :]
    mask = (j <= i) if causal else np.ones((queries, keys), bool)
    if not window:
        return mask
    return mask & (j >= i - i % window if chunked else j > i - window)


def paged_attention(
    q_TND: Array,
    kv_blocks: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    lookup_table: Array,
    max_lengths: Array,
    kv_scales: Array | None = None,
    sinks_N: Array | None = None,
    *,
    layer: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    causal: int = 1,
    v_head_dim: int = 0,
    chunked: int = 0,
) -> Array:
    """Reference, in float32; masked K and V are replaced by zeros before any arithmetic."""
    page_size, kv_heads, head_dim = kv_blocks.shape[3:]
    v_dim = v_head_dim or head_dim
    out_TNE = np.zeros((*q_TND.shape[:2], v_dim), np.float32)
    for row, (begin, end) in enumerate(pairwise(input_row_offsets)):
        new = int(end - begin)
        if new == 0:
            continue
        length = int(cache_lengths[row]) + new
        ids = lookup_table[row, : -(-length // page_size)]
        mask_TS = visible(new, length, causal=bool(causal), window=window, chunked=bool(chunked))
        seen = np.any(mask_TS, axis=0).reshape(-1, 1, 1)
        k_SKD = gather_row(kv_blocks, kv_scales, 0, layer, ids, length, head_dim)
        v_SKE = gather_row(kv_blocks, kv_scales, 1, layer, ids, length, v_dim)
        k_SKD, v_SKE = np.where(seen, k_SKD, 0), np.where(seen, v_SKE, 0)
        q_TKGD = q_TND[begin:end].astype(np.float32).reshape(new, kv_heads, -1, head_dim)
        scores_KGTS = np.einsum("tkgd,skd->kgts", q_TKGD, k_SKD) * np.float32(scale)
        if softcap:
            scores_KGTS = np.float32(softcap) * np.tanh(scores_KGTS / np.float32(softcap))
        scores_KGTS = np.where(mask_TS, scores_KGTS, -np.inf)
        weights_KGTS = _softmax(scores_KGTS, sinks_N)
        out_TKGE = np.einsum("kgts,ske->tkge", weights_KGTS, v_SKE)
        out_TNE[begin:end] = out_TKGE.reshape(new, -1, v_dim)
    return out_TNE.astype(q_TND.dtype)


def _softmax(scores_KGTS: Array, sinks_N: Array | None) -> Array:
    """Softmax over the last axis; a sink is one more logit per query head, without a value."""
    top = scores_KGTS.max(-1, keepdims=True)
    if sinks_N is None:
        weights = np.exp(scores_KGTS - top)
        return np.asarray(weights / weights.sum(-1, keepdims=True))
    sink_KG11 = sinks_N.astype(np.float32).reshape(*scores_KGTS.shape[:2], 1, 1)
    top = np.maximum(top, sink_KG11)
    weights = np.exp(scores_KGTS - top)
    return np.asarray(weights / (weights.sum(-1, keepdims=True) + np.exp(sink_KG11 - top)))


PAGED_ATTENTION = spec.OpSpec(
    name="paged_attention",
    doc="Attention of every new token over the cached and new tokens of its row.",
    inputs=(
        spec.Q,
        spec.KV_BLOCKS,
        spec.ROW_OFFSETS,
        spec.CACHE_LENGTHS,
        spec.LOOKUP_TABLE,
        spec.MAX_LENGTHS,
        spec.KV_SCALES,
        spec.SINKS,
    ),
    outputs=(spec.OUT,),
    attributes=spec.ATTENTION_ATTRIBUTES,
    reference=paged_attention,
    rules=spec.ATTENTION_RULES,
)
