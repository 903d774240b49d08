"""Kernels of paged_attention: decode, prefill and mixed rows, and the merge of a split context.

Legend: M rows of a query tile (BLOCK_T new tokens x the GROUP query heads of one kv head,
token-major), N keys of a block, D head_dim, E v_head_dim, both padded to powers of two.
Scores are in units of log2(e): weights are powers of 2.
"""

import triton
import triton.language as tl

from kvgraph.kernels.elements import decode, prepare
from kvgraph.kernels.keys import keys_of, part_of_keys
from kvgraph.kernels.rows import row_of_tile, slot_of

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _load_heads(
    kv_blocks,
    kv_scales,
    slot_N,
    live_N,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    GRANULARITY: tl.constexpr,
    SCALED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load `[N, BLOCK]`: WIDTH elements of the heads `slot_N` as `dtype`, zeros if not live.

    SCALED: multiply by the groups' scales; otherwise the caller applies the head's one scale.
    """
    d = tl.arange(0, BLOCK)
    pointers = kv_blocks + slot_N[:, None] * HEAD_DIM + d[None, :]
    if MASKED:
        if WIDTH == BLOCK:
            x_ND = tl.load(pointers, mask=live_N[:, None], other=0)
        else:
            x_ND = tl.load(pointers, mask=live_N[:, None] & (d < WIDTH)[None, :], other=0)
    elif WIDTH == BLOCK:
        x_ND = tl.load(pointers)
    else:
        x_ND = tl.load(pointers, mask=(d < WIDTH)[None, :], other=0)
    if SCALED:
        keys: tl.constexpr = x_ND.shape[0]
        block: tl.constexpr = BLOCK if GRANULARITY >= WIDTH else GRANULARITY
        groups: tl.constexpr = BLOCK // block
        g = tl.arange(0, groups)
        scale_NG = tl.load(
            kv_scales + slot_N[:, None] * (HEAD_DIM // GRANULARITY) + g[None, :],
            mask=live_N[:, None] & (g < WIDTH // GRANULARITY)[None, :],
            other=0.0,
        )
        scale_NGE = tl.broadcast_to(scale_NG[:, :, None], (keys, groups, block))
        scale_ND = tl.reshape(scale_NGE, (keys, BLOCK))
        x_ND = (decode(x_ND, QUANTIZED, FP8_NATIVE, tl.float32) * scale_ND).to(dtype)
    else:
        x_ND = decode(x_ND, QUANTIZED, FP8_NATIVE, dtype)
    return x_ND


@triton.jit
def _pages(table, start, low, high, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Page ids of the keys [start, start + BLOCK_N) in [low, high): one id if the keys share a
    page, since blocks start at multiples of BLOCK_N."""
    if PAGE_SIZE % BLOCK_N == 0:
        page = tl.load(table + start // PAGE_SIZE, mask=start < high, other=0)
    else:
        key_N = start + tl.arange(0, BLOCK_N)
        seen_N = (key_N >= low) & (key_N < high)
        page = tl.load(table + key_N // PAGE_SIZE, mask=seen_N, other=0)
    return page


@triton.jit
def _attend(
    acc_ME,
    top_M,
    sum_M,
    q_MD,
    start,
    page,
    low,
    high,
    position_M,
    head,
    layer,
    kv_blocks,
    kv_scales,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYERS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    GRANULARITY: tl.constexpr,
    SCALE_V_TILE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Update the softmax state with the keys [start, start + BLOCK_N) of [low, high), on `page`.

    Without MASKED every query sees all these keys.
    """
    n = tl.arange(0, BLOCK_N)
    key_N = start + n
    live_N = (key_N >= low) & (key_N < high)
    offset_N = start % PAGE_SIZE + n if PAGE_SIZE % BLOCK_N == 0 else key_N % PAGE_SIZE
    k_slot_N = slot_of(page, offset_N, head, layer, 0, LAYERS, PAGE_SIZE, KV_HEADS)
    v_slot_N = slot_of(page, offset_N, head, layer, 1, LAYERS, PAGE_SIZE, KV_HEADS)
    one_scale: tl.constexpr = QUANTIZED is not None and GRANULARITY >= HEAD_DIM
    grouped: tl.constexpr = QUANTIZED is not None and not one_scale

    k_ND = _load_heads(
        kv_blocks, kv_scales, k_slot_N, live_N, q_MD.dtype, HEAD_DIM, HEAD_DIM, BLOCK_D,
        QUANTIZED, FP8_NATIVE, GRANULARITY, grouped, MASKED,
    )  # fmt: skip
    scores_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    if one_scale:
        if MASKED:
            k_scale_N = tl.load(kv_scales + k_slot_N, mask=live_N, other=0.0)
        else:
            k_scale_N = tl.load(kv_scales + k_slot_N)
        scores_MN *= k_scale_N[None, :]
    if SOFTCAP > 0:
        power_MN = tl.exp2(scores_MN * (2 * SCALE / SOFTCAP * LOG2E))
        scores_MN = (SOFTCAP * LOG2E) * (1.0 - 2.0 / (power_MN + 1.0))
    else:
        scores_MN *= SCALE * LOG2E
    if MASKED:
        seen_MN = live_N[None, :]
        if CAUSAL:
            seen_MN = seen_MN & (key_N[None, :] <= position_M[:, None])
        if CHUNKED:
            seen_MN = seen_MN & (key_N[None, :] >= (position_M // WINDOW * WINDOW)[:, None])
        elif WINDOW:
            seen_MN = seen_MN & (key_N[None, :] > position_M[:, None] - WINDOW)
        scores_MN = tl.where(seen_MN, scores_MN, float("-inf"))

    top_new_M = tl.maximum(top_M, tl.max(scores_MN, 1))
    shift_M = top_new_M
    if MASKED:  # a query that has seen no key yet
        shift_M = tl.where(top_new_M == float("-inf"), 0.0, top_new_M)
    weights_MN = tl.exp2(scores_MN - shift_M[:, None])
    fade_M = tl.exp2(top_M - shift_M)
    sum_M = sum_M * fade_M + tl.sum(weights_MN, 1)
    acc_ME *= fade_M[:, None]
    v_NE = _load_heads(
        kv_blocks, kv_scales, v_slot_N, live_N, q_MD.dtype, HEAD_DIM, V_HEAD_DIM, BLOCK_E,
        QUANTIZED, FP8_NATIVE, GRANULARITY, grouped or (one_scale and SCALE_V_TILE), MASKED,
    )  # fmt: skip
    if one_scale and not SCALE_V_TILE:
        if MASKED:
            v_scale_N = tl.load(kv_scales + v_slot_N, mask=live_N, other=0.0)
        else:
            v_scale_N = tl.load(kv_scales + v_slot_N)
        weights_MN *= v_scale_N[None, :]
    acc_ME = tl.dot(weights_MN.to(q_MD.dtype), v_NE, acc_ME, input_precision=PRECISION)
    return acc_ME, top_new_M, sum_M


@triton.jit(
    do_not_specialize=[
        "batch_size",
        "layer",
        "table_width",
        "tiles_per_row",
        "rows_below",
        "new_above",
        "new_upto",
        "num_parts",
    ]
)
def paged_attention(
    q,
    kv_blocks,
    input_row_offsets,
    cache_lengths,
    lookup_table,
    cos_sin,
    kv_scales,
    sinks,
    q_norm,
    out,
    partial_out,
    partial_state,
    batch_size,
    layer,
    table_width,
    tiles_per_row,
    rows_below,
    new_above,
    new_upto,
    num_parts,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    LAYERS: tl.constexpr,
    SCALE: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    CAUSAL: tl.constexpr,
    SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    GRANULARITY: tl.constexpr,
    SCALE_V_TILE: tl.constexpr,
    NORM: tl.constexpr,
    EPSILON: tl.constexpr,
    OFFSET: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PRECISION: tl.constexpr,
    SPLIT: tl.constexpr,
    MIN_PART: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Attention of one query tile of one row and one kv head, over the keys that it sees or a part.

    Rows with a number of new tokens outside (new_above, new_upto] belong to another launch. With
    SPLIT a row is one tile, and `merge_parts` joins the sums of the parts.
    Grid: (tiles * KV_HEADS, num_parts). The last tiles of a prompt, which see the most keys, start
    first, so that short tiles fill the gaps at the end.
    """
    GROUP: tl.constexpr = HEADS // KV_HEADS
    BLOCK_T: tl.constexpr = BLOCK_M // GROUP
    head = tl.program_id(0) % KV_HEADS
    tile = tl.program_id(0) // KV_HEADS
    if not SPLIT:
        tile = tl.num_programs(0) // KV_HEADS - 1 - tile
    row, first = row_of_tile(
        input_row_offsets, batch_size, tile, tiles_per_row, rows_below, BLOCK_T
    )
    begin = tl.load(input_row_offsets + row)
    new = tl.load(input_row_offsets + row + 1) - begin
    if (first >= new) | (new <= new_above) | (new > new_upto):
        return
    cached = tl.load(cache_lengths + row)
    last = tl.minimum(first + BLOCK_T, new) - 1
    low, high = keys_of(cached, new, first, last, WINDOW, CHUNKED, CAUSAL)
    if SPLIT:
        key_begin, key_end = part_of_keys(low, high, num_parts, tl.program_id(1), BLOCK_N, MIN_PART)
        if key_begin >= key_end:
            return
    else:
        key_begin = low // BLOCK_N * BLOCK_N
        key_end = high

    m = tl.arange(0, BLOCK_M)
    token_M = first + m // GROUP
    valid_M = (m < BLOCK_T * GROUP) & (token_M < new)
    query_head_M = head * GROUP + m % GROUP
    position_M = cached + token_M
    d = tl.arange(0, BLOCK_D)
    row_M = (begin + token_M).to(tl.int64) * HEADS + query_head_M
    q_mask = valid_M[:, None] & (d < HEAD_DIM)[None, :]
    q_pointers = q + row_M[:, None] * HEAD_DIM + d[None, :]
    q_MD = tl.load(q_pointers, mask=q_mask, other=0.0)
    if NORM or ROTARY:
        q_MD = prepare(
            q_MD, q_pointers, q_mask, d, q_norm, cos_sin, position_M,
            HEAD_DIM, NORM, EPSILON, OFFSET, ROTARY, INTERLEAVED,
        )  # fmt: skip

    acc_ME = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    if SINKS and not SPLIT:
        top_M = tl.load(sinks + query_head_M, mask=valid_M, other=0.0) * LOG2E
        sum_M = tl.full((BLOCK_M,), 1.0, tl.float32)
    else:
        top_M = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sum_M = tl.zeros((BLOCK_M,), tl.float32)
    table = lookup_table + row.to(tl.int64) * table_width
    # Pages are looked up one block ahead, so that the addresses of the next keys are ready in time.
    page = _pages(table, key_begin, low, key_end, PAGE_SIZE, BLOCK_N)
    # Keys [key_begin, plain_end) are whole blocks that every query of the tile sees.
    plain_end = key_begin
    if not WINDOW:
        sees_all = cached + first + 1 if CAUSAL else high
        plain_end = tl.maximum(tl.minimum(key_end, sees_all) // BLOCK_N * BLOCK_N, key_begin)
        for start in range(key_begin, plain_end, BLOCK_N):
            acc_ME, top_M, sum_M = _attend(
                acc_ME, top_M, sum_M, q_MD, start, page, low, key_end, position_M, head, layer,
                kv_blocks, kv_scales, KV_HEADS, HEAD_DIM, V_HEAD_DIM, PAGE_SIZE, LAYERS, SCALE,
                WINDOW, CHUNKED, SOFTCAP, CAUSAL, QUANTIZED, FP8_NATIVE, GRANULARITY, SCALE_V_TILE,
                PRECISION, BLOCK_N, BLOCK_D, BLOCK_E, False,
            )  # fmt: skip
            page = _pages(table, start + BLOCK_N, low, key_end, PAGE_SIZE, BLOCK_N)
    for start in range(plain_end, key_end, BLOCK_N):
        acc_ME, top_M, sum_M = _attend(
            acc_ME, top_M, sum_M, q_MD, start, page, low, key_end, position_M, head, layer,
            kv_blocks, kv_scales, KV_HEADS, HEAD_DIM, V_HEAD_DIM, PAGE_SIZE, LAYERS, SCALE,
            WINDOW, CHUNKED, SOFTCAP, CAUSAL, QUANTIZED, FP8_NATIVE, GRANULARITY, SCALE_V_TILE,
            PRECISION, BLOCK_N, BLOCK_D, BLOCK_E, True,
        )  # fmt: skip
        page = _pages(table, start + BLOCK_N, low, key_end, PAGE_SIZE, BLOCK_N)

    e = tl.arange(0, BLOCK_E)
    mask_ME = valid_M[:, None] & (e < V_HEAD_DIM)[None, :]
    if SPLIT:
        slot_M = (row * BLOCK_T + token_M).to(tl.int64) * HEADS + query_head_M
        slot_M = slot_M * num_parts + tl.program_id(1)
        tl.store(partial_out + slot_M[:, None] * V_HEAD_DIM + e[None, :], acc_ME, mask=mask_ME)
        tl.store(partial_state + slot_M * 2, top_M, mask=valid_M)
        tl.store(partial_state + slot_M * 2 + 1, sum_M, mask=valid_M)
    else:
        sum_M = tl.where(valid_M, sum_M, 1.0)
        out_ME = (acc_ME / sum_M[:, None]).to(out.dtype.element_ty)
        tl.store(out + row_M[:, None] * V_HEAD_DIM + e[None, :], out_ME, mask=mask_ME)


@triton.jit(do_not_specialize=["tokens_per_row", "num_parts"])
def merge_parts(
    input_row_offsets,
    cache_lengths,
    sinks,
    out,
    partial_out,
    partial_state,
    tokens_per_row,
    num_parts,
    HEADS: tl.constexpr,
    V_HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    SINKS: tl.constexpr,
    MIN_PART: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Join the parts of a split `paged_attention`, for one new token and query head.

    Grid: (batch_size * tokens_per_row * HEADS,); BLOCK_P is at least num_parts.
    """
    query_head = tl.program_id(0) % HEADS
    token = tl.program_id(0) // HEADS % tokens_per_row
    row = tl.program_id(0) // HEADS // tokens_per_row
    begin = tl.load(input_row_offsets + row)
    new = tl.load(input_row_offsets + row + 1) - begin
    if (token >= new) | (new > BLOCK_T):
        return
    cached = tl.load(cache_lengths + row)
    low, high = keys_of(cached, new, token * 0, new - 1, WINDOW, CHUNKED, CAUSAL)
    p = tl.arange(0, BLOCK_P)
    begin_P, end_P = part_of_keys(low, high, num_parts, p, BLOCK_N, MIN_PART)
    live_P = (p < num_parts) & (begin_P < end_P)
    slot_P = ((row * BLOCK_T + token).to(tl.int64) * HEADS + query_head) * num_parts + p
    top_P = tl.load(partial_state + slot_P * 2, mask=live_P, other=float("-inf"))
    sum_P = tl.load(partial_state + slot_P * 2 + 1, mask=live_P, other=0.0)
    e = tl.arange(0, BLOCK_E)
    acc_PE = tl.load(
        partial_out + slot_P[:, None] * V_HEAD_DIM + e[None, :],
        mask=live_P[:, None] & (e < V_HEAD_DIM)[None, :],
        other=0.0,
    )
    top = tl.max(top_P, 0)
    if SINKS:
        sink = tl.load(sinks + query_head) * LOG2E
        top = tl.maximum(top, sink)
    weight_P = tl.exp2(top_P - top)
    total = tl.sum(sum_P * weight_P, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    out_E = tl.sum(acc_PE * weight_P[:, None], 0) / total
    to = out + ((begin + token).to(tl.int64) * HEADS + query_head) * V_HEAD_DIM + e
    tl.store(to, out_E.to(out.dtype.element_ty), mask=e < V_HEAD_DIM)
