"""Kernels of fused_experts: slots sorted by expert, two grouped products, a weighted sum.

A slot is one expert of one row: slot s is number `s % ACTIVE` of row `s // ACTIVE`. Slots with
index -1 come before the slots of all experts, and add nothing to their row's sum. No kernel waits
for the host: grids follow from the number of rows, and tables on the device give each program its
work.

Legend: S slots, E experts, P tiles of sorted slots, M slots of a tile, N output columns.
"""

import triton
import triton.language as tl

from kvgraph.kernels.products import gated, product


@triton.jit(do_not_specialize=["num_slots"])
def sort_slots(indices, order, offsets, num_slots, EXPERTS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Sort slots by expert. `order [S]`: the slots of each expert, in ascending order.
    `offsets [E + 1]`: the first place of each expert in `order`.

    Each program counts the slots of lower experts, then places its own: no program waits for
    another, and there are no atomic additions. Grid: (EXPERTS, 1).
    """
    expert = tl.program_id(0)
    s = tl.arange(0, BLOCK_S)
    lower_S = tl.zeros((BLOCK_S,), tl.int32)
    for start in range(0, num_slots, BLOCK_S):
        chosen_S = tl.load(indices + start + s, mask=start + s < num_slots, other=EXPERTS)
        lower_S += (chosen_S < expert).to(tl.int32)
    at = tl.sum(lower_S, 0)
    tl.store(offsets + expert, at)
    for start in range(0, num_slots, BLOCK_S):
        chosen_S = tl.load(indices + start + s, mask=start + s < num_slots, other=EXPERTS)
        own_S = (chosen_S == expert).to(tl.int32)
        place_S = at + tl.cumsum(own_S, 0) - own_S
        tl.store(order + place_S, start + s, mask=own_S > 0)
        at += tl.sum(own_S, 0)
    if expert == EXPERTS - 1:
        tl.store(offsets + EXPERTS, at)


@triton.jit(do_not_specialize=["num_tiles"])
def place_tiles(
    offsets,
    tiles,
    num_tiles,
    EXPERTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write `tiles [P, 3]`: the expert and the half-open range of at most BLOCK_M sorted slots of
    each tile; unused tiles have an empty range. Grid: (ceil(num_tiles / BLOCK_P), 1)."""
    e = tl.arange(0, BLOCK_E)
    is_expert_E = e < EXPERTS
    begin_E = tl.load(offsets + e, mask=is_expert_E, other=0)
    end_E = tl.load(offsets + e + 1, mask=is_expert_E, other=0)
    count_E = (end_E - begin_E + BLOCK_M - 1) // BLOCK_M
    upto_E = tl.cumsum(count_E, 0)
    p = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    is_before_PE = upto_E[None, :] <= p[:, None]
    expert_P = tl.sum(is_before_PE.to(tl.int32), 1)
    tiles_before_P = tl.sum(tl.where(is_before_PE, count_E[None, :], 0), 1)
    live_P = expert_P < EXPERTS
    first_P = tl.load(offsets + expert_P, mask=live_P, other=0)
    last_P = tl.load(offsets + expert_P + 1, mask=live_P, other=0)
    first_P = tl.where(live_P, first_P + (p - tiles_before_P) * BLOCK_M, 0)
    last_P = tl.where(live_P, tl.minimum(first_P + BLOCK_M, last_P), 0)
    to_P = tiles + p * 3
    tl.store(to_P, tl.where(live_P, expert_P, 0), mask=p < num_tiles)
    tl.store(to_P + 1, first_P, mask=p < num_tiles)
    tl.store(to_P + 2, last_P, mask=p < num_tiles)


@triton.jit(do_not_specialize=["in_features"])
def experts_up(
    x,
    up,
    up_scales,
    up_group_bytes,
    up_bias,
    order,
    tiles,
    inner,
    in_features,
    ACTIVE: tl.constexpr,
    IN: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Write `inner [S, INNER]`, in the order of sorted slots: joined gate and up of each expert.

    The rows of `up [E, 2 * INNER, IN]` alternate gate and up. Grid: (tiles, 2 * INNER / BLOCK_N):
    tiles of one expert are neighbours, and find its weights in the L2 cache.
    """
    OUT: tl.constexpr = 2 * INNER
    begin = tl.load(tiles + tl.program_id(0) * 3 + 1)
    end = tl.load(tiles + tl.program_id(0) * 3 + 2)
    if begin >= end:
        return
    expert = tl.load(tiles + tl.program_id(0) * 3).to(tl.int64)
    at_M = begin + tl.arange(0, BLOCK_M)
    live_M = at_M < end
    row_M = tl.load(order + at_M, mask=live_M, other=0) // ACTIVE
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight, scales, group_bytes = _of_expert(
        up, up_scales, up_group_bytes, expert, IN, OUT, BITS, GROUP, BLOCK_K
    )
    both_NM = product(
        x, row_M, live_M, weight, scales, group_bytes, n_N, 0, in_features, IN, OUT, BITS, GROUP,
        CODES, FP8_NATIVE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, SLICES,
    )  # fmt: skip
    if up_bias is not None:
        both_NM += tl.load(up_bias + expert * OUT + n_N, mask=n_N < OUT, other=0.0)[:, None]
    inner_NM = gated(both_NM, BLOCK_M, BLOCK_N, ACTIVATION, ALPHA, LIMIT, UP_OFFSET)
    i = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    to_MN = inner + at_M.to(tl.int64)[:, None] * INNER + i[None, :]
    inner_MN = tl.trans(inner_NM).to(inner.dtype.element_ty)
    tl.store(to_MN, inner_MN, mask=live_M[:, None] & (i < INNER)[None, :])


@triton.jit(do_not_specialize=["inner_features"])
def experts_down(
    inner,
    down,
    down_scales,
    down_group_bytes,
    down_bias,
    order,
    tiles,
    parts,
    inner_features,
    IN: tl.constexpr,
    INNER: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    CODES: tl.constexpr,
    FP8_NATIVE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SLICES: tl.constexpr,
):
    """Write `parts [S, IN]`, in the order of slots: the product of each expert with its rows of
    `inner`.

    `down [E, IN, INNER]`. Grid: (tiles, IN / BLOCK_N).
    """
    begin = tl.load(tiles + tl.program_id(0) * 3 + 1)
    end = tl.load(tiles + tl.program_id(0) * 3 + 2)
    if begin >= end:
        return
    expert = tl.load(tiles + tl.program_id(0) * 3).to(tl.int64)
    at_M = begin + tl.arange(0, BLOCK_M)
    live_M = at_M < end
    n_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight, scales, group_bytes = _of_expert(
        down, down_scales, down_group_bytes, expert, INNER, IN, BITS, GROUP, BLOCK_K
    )
    part_NM = product(
        inner, at_M, live_M, weight, scales, group_bytes, n_N, 0, inner_features, INNER, IN, BITS,
        GROUP, CODES, FP8_NATIVE, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, SLICES,
    )  # fmt: skip
    if down_bias is not None:
        part_NM += tl.load(down_bias + expert * IN + n_N, mask=n_N < IN, other=0.0)[:, None]
    slot_M = tl.load(order + at_M, mask=live_M, other=0)
    to_MN = parts + slot_M.to(tl.int64)[:, None] * IN + n_N[None, :]
    part_MN = tl.trans(part_NM).to(parts.dtype.element_ty)
    tl.store(to_MN, part_MN, mask=live_M[:, None] & (n_N < IN)[None, :])


@triton.jit
def _of_expert(
    weight,
    scales,
    group_bytes,
    expert,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """64-bit addresses of an expert's weight `[OUT, IN]`, scales and bytes `[groups, OUT]`."""
    GROUPS: tl.constexpr = (IN + GROUP - 1) // GROUP if GROUP else 1
    if BITS == 4:
        SPAN: tl.constexpr = 2 * BLOCK_K
        weight += expert * (OUT * ((IN + SPAN - 1) // SPAN) * BLOCK_K)
    else:
        weight += expert * (OUT * IN)
    if scales is not None:
        scales += expert * (GROUPS * OUT)
    if group_bytes is not None:
        group_bytes += expert * (GROUPS * OUT)
    return weight, scales, group_bytes


@triton.jit
def sum_experts(
    parts,
    indices,
    weights,
    out,
    IN: tl.constexpr,
    ACTIVE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write BLOCK_D elements of one row of `out`: the weighted sum of its parts, in the router's
    order. In float32, rounded once. Grid: (rows * ceil(IN / BLOCK_D), 1)."""
    blocks: tl.constexpr = (IN + BLOCK_D - 1) // BLOCK_D
    row = (tl.program_id(0) // blocks).to(tl.int64)
    d = tl.program_id(0) % blocks * BLOCK_D + tl.arange(0, BLOCK_D)
    sum_D = tl.zeros((BLOCK_D,), tl.float32)
    for slot in range(0, ACTIVE):
        at = row * ACTIVE + slot
        is_own = tl.load(indices + at) >= 0  # otherwise its part was not written
        width = tl.where(is_own, IN, 0)
        part_D = tl.load(parts + at * IN + d, mask=d < width, other=0.0).to(tl.float32)
        sum_D += tl.where(is_own, part_D * tl.load(weights + at), 0.0)
    tl.store(out + row * IN + d, sum_D.to(out.dtype.element_ty), mask=d < IN)
