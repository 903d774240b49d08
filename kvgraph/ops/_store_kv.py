"""store_kv: write the new tokens' K and V of one layer into their pages."""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops import spec


def token_slots(
    input_row_offsets: Array, cache_lengths: Array, lookup_table: Array, page_size: int
) -> tuple[Array, Array]:
    """Page id and offset in the page of every new token: two `[total_seq_len]` arrays.

    New token t of row b is at position `cache_lengths[b] + t`.
    """
    counts = np.diff(input_row_offsets)
    rows = np.repeat(np.arange(len(counts)), counts)
    new = np.arange(len(rows)) - input_row_offsets[rows]
    positions = cache_lengths[rows] + new
    return lookup_table[rows, positions // page_size], positions % page_size


def quantize(x: Array, dtype: str, groups: int) -> tuple[Array, Array]:
    """Symmetric quantisation of the last axis in `groups` equal groups: (stored, scales).

    `scale = max|x| / largest storable`; a group of zeros has scale 0 and stores zeros. A quotient
    above the largest storable, which a denormal scale may give, is clamped. int8 rounds half to
    even, float8_e4m3fn rounds as its cast does.
    """
    largest = np.float32(DTYPES[dtype].largest)
    x_g = x.astype(np.float32).reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    scales = np.abs(x_g).max(-1) / largest
    divisor = np.where(scales == 0, np.float32(1), scales)[..., None]
    stored = np.clip(x_g / divisor, -largest, largest)
    if dtype == "int8":
        stored = np.rint(stored)
    return stored.reshape(x.shape), scales


def store_kv(
    kv_blocks: Array,
    k_TKD: Array,
    v_TKD: Array,
    input_row_offsets: Array,
    cache_lengths: Array,
    lookup_table: Array,
    kv_scales: Array | None = None,
    *,
    layer: int,
) -> tuple[()]:
    """Reference; only the slots of new tokens are written."""
    pages, offsets = token_slots(
        input_row_offsets, cache_lengths, lookup_table, page_size=kv_blocks.shape[3]
    )
    for kind, x in enumerate((k_TKD, v_TKD)):
        width = x.shape[-1]
        stored: Array = x
        if kv_scales is not None:
            groups = kv_scales.shape[-1] * width // kv_blocks.shape[-1]
            stored, scales = quantize(x, str(kv_blocks.dtype), groups)
            kv_scales[pages, kind, layer, offsets, :, :groups] = scales
        kv_blocks[pages, kind, layer, offsets, :, :width] = stored.astype(kv_blocks.dtype)
    return ()


STORE_KV = spec.OpSpec(
    name="store_kv",
    doc="Write K and V of the new tokens of one layer into the pages that the lookup table names.",
    inputs=(
        spec.KV_BLOCKS,
        spec.K,
        spec.V,
        spec.ROW_OFFSETS,
        spec.CACHE_LENGTHS,
        spec.LOOKUP_TABLE,
        spec.KV_SCALES,
    ),
    outputs=(spec.KV_BLOCKS_OUT, spec.KV_SCALES_OUT),
    attributes=(spec.LAYER,),
    reference=store_kv,
    rules=spec.POOL_RULES,
)
