"""Kernel of store_kv, and of the first half of update_and_attend (with norm and rope of heads).

Legend: R new tokens of a tile (all of one row), D head_dim, G groups with a scale each.
"""

import triton
import triton.language as tl

from kvgraph.kernels.elements import encode, prepare
from kvgraph.kernels.rows import row_of_tile, slot_of


@triton.jit
def _store(
    x_RD,
    live_R,
    kv_blocks,
    kv_scales,
    slot_R,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr,
    GRANULARITY: tl.constexpr,
):
    """Store rows of WIDTH elements (of BLOCK_D) to the heads `slot_R` of the pool, with scales."""
    d = tl.arange(0, BLOCK_D)
    mask_RD = live_R[:, None] & (d < WIDTH)[None, :]
    value_RD = x_RD
    if QUANTIZED is not None:
        rows: tl.constexpr = x_RD.shape[0]
        # One group is the whole padded head, or its elements divided by a power of two.
        block: tl.constexpr = BLOCK_D if GRANULARITY >= WIDTH else GRANULARITY
        groups: tl.constexpr = BLOCK_D // block
        x_RGE = tl.reshape(tl.where(mask_RD, x_RD.to(tl.float32), 0.0), (rows, groups, block))
        largest_RG = tl.max(tl.abs(x_RGE), 2)
        # The maximum ignores NaN, so a group with a NaN gets a scale of NaN.
        has_nan_RG = tl.max((x_RGE != x_RGE).to(tl.int32), 2) > 0
        largest_RG = tl.where(has_nan_RG, float("nan"), largest_RG)
        scale_RG = tl.div_rn(largest_RG, tl.full((rows, groups), LARGEST, tl.float32))
        divisor_RG = tl.where(scale_RG == 0, 1.0, scale_RG)
        divisor_RGE = tl.broadcast_to(divisor_RG[:, :, None], (rows, groups, block))
        value_RD = tl.reshape(tl.div_rn(x_RGE, divisor_RGE), (rows, BLOCK_D))
        g = tl.arange(0, groups)
        to = kv_scales + slot_R[:, None] * (HEAD_DIM // GRANULARITY) + g[None, :]
        tl.store(to, scale_RG, mask=live_R[:, None] & (g < WIDTH // GRANULARITY)[None, :])
    to = kv_blocks + slot_R[:, None] * HEAD_DIM + d[None, :]
    tl.store(to, encode(value_RD, QUANTIZED, kv_blocks.dtype.element_ty), mask=mask_RD)


@triton.jit(do_not_specialize=["batch_size", "layer", "table_width", "tiles_per_row", "rows_below"])
def store_kv(
    kv_blocks,
    k,
    v,
    input_row_offsets,
    cache_lengths,
    lookup_table,
    cos_sin,
    kv_scales,
    k_norm,
    batch_size,
    layer,
    table_width,
    tiles_per_row,
    rows_below,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYERS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    LARGEST: tl.constexpr,
    GRANULARITY: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Store K and V of up to BLOCK_R new tokens of one row and one kv head in the row's pages.

    Grid: (tiles * KV_HEADS,).
    """
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    row, first = row_of_tile(
        input_row_offsets, batch_size, tile, tiles_per_row, rows_below, BLOCK_R
    )
    begin = tl.load(input_row_offsets + row)
    new = tl.load(input_row_offsets + row + 1) - begin
    if first >= new:
        return
    token_R = first + tl.arange(0, BLOCK_R)
    position_R = tl.load(cache_lengths + row) + token_R
    page_at_R = position_R // PAGE_SIZE
    live_R = (token_R < new) & (page_at_R < table_width)
    table = lookup_table + row.to(tl.int64) * table_width
    page_R = tl.load(table + page_at_R, mask=live_R, other=0)
    offset_R = position_R % PAGE_SIZE
    source_R = (begin + token_R).to(tl.int64) * KV_HEADS + head

    d = tl.arange(0, BLOCK_D)
    mask_RD = live_R[:, None] & (d < HEAD_DIM)[None, :]
    k_pointers = k + source_R[:, None] * HEAD_DIM + d[None, :]
    k_RD = tl.load(k_pointers, mask=mask_RD, other=0.0)
    if NORM or ROTARY:
        k_RD = prepare(
            k_RD, k_pointers, mask_RD, d, k_norm, cos_sin, position_R,
            HEAD_DIM, NORM, EPSILON, OFFSET, ROTARY, INTERLEAVED,
        )  # fmt: skip
    slot_R = slot_of(page_R, offset_R, head, layer, 0, LAYERS, PAGE_SIZE, KV_HEADS)
    _store(
        k_RD, live_R, kv_blocks, kv_scales, slot_R,
        HEAD_DIM, HEAD_DIM, BLOCK_D, QUANTIZED, LARGEST, GRANULARITY,
    )  # fmt: skip

    e = tl.arange(0, BLOCK_E)
    mask_RE = live_R[:, None] & (e < V_HEAD_DIM)[None, :]
    v_RE = tl.load(v + source_R[:, None] * V_HEAD_DIM + e[None, :], mask=mask_RE, other=0.0)
    slot_R = slot_of(page_R, offset_R, head, layer, 1, LAYERS, PAGE_SIZE, KV_HEADS)
    _store(
        v_RE, live_R, kv_blocks, kv_scales, slot_R,
        HEAD_DIM, V_HEAD_DIM, BLOCK_E, QUANTIZED, LARGEST, GRANULARITY,
    )  # fmt: skip
