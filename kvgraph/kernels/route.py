"""Kernel of route: one program finds a row's best experts and their weights.

Legend: G groups of experts, S experts of a group, A experts that are chosen.
"""

import triton
import triton.language as tl

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
SOFTMAX_OF_CHOSEN = tl.constexpr(2)
LOWEST = tl.constexpr(-(2**63))
"""Place of an expert that cannot be chosen, or was chosen already: below every other place."""


@triton.jit
def route(
    logits,
    bias,
    indices,
    weights,
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    SCORES: tl.constexpr,
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
    LEAST_TOTAL: tl.constexpr,
    SCALE: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    ACTIVE_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    """Write `indices [M, NUM_ACTIVE]` and `weights` of one of M rows, the best first. Grid: (M, 1).

    The constants have the meaning and order of the op's reference. In float32.
    """
    SIZE: tl.constexpr = NUM_EXPERTS // NUM_GROUPS
    row = tl.program_id(0).to(tl.int64)
    g = tl.arange(0, BLOCK_G)
    s = tl.arange(0, BLOCK_S)
    e_GS = g[:, None] * SIZE + s[None, :]
    live_GS = (g < NUM_GROUPS)[:, None] & (s < SIZE)[None, :]
    from_GS = logits + row * NUM_EXPERTS + e_GS
    score_GS = tl.load(from_GS, mask=live_GS, other=float("-inf")).to(tl.float32)
    if SCORES == SOFTMAX:
        score_GS = tl.exp(score_GS - tl.max(score_GS))
        score_GS = score_GS / tl.sum(score_GS)
    if SCORES == SIGMOID:
        smaller_GS = tl.exp(-tl.abs(score_GS))
        score_GS = tl.where(score_GS < 0, smaller_GS, 1.0) / (1.0 + smaller_GS)
    key_GS = score_GS
    if bias is not None:
        key_GS += tl.load(bias + e_GS, mask=live_GS, other=0.0)
    key_GS = _number(key_GS)
    if NUM_GROUPS > 1:
        place_GS = tl.where(live_GS, _place(key_GS, s[None, :], SIZE), LOWEST)
        sum_G = tl.zeros((BLOCK_G,), tl.float32)
        for _ in range(GROUP_BEST):
            is_best_GS = place_GS == tl.max(place_GS, 1)[:, None]
            sum_G += tl.sum(tl.where(is_best_GS & live_GS, key_GS, 0.0), 1)
            place_GS = tl.where(is_best_GS, LOWEST, place_GS)
        place_G = tl.where(g < NUM_GROUPS, _place(_number(sum_G), g, NUM_GROUPS), LOWEST)
        for _ in range(ACTIVE_GROUPS):
            place_G = tl.where(place_G == tl.max(place_G), LOWEST, place_G)
        key_GS = tl.where((place_G == LOWEST)[:, None], key_GS, float("-inf"))
    a = tl.arange(0, BLOCK_A)
    index_A = tl.zeros((BLOCK_A,), tl.int32)
    weight_A = tl.full((BLOCK_A,), float("-inf"), tl.float32)
    place_GS = tl.where(live_GS, _place(key_GS, e_GS, NUM_EXPERTS), LOWEST)
    for chosen in range(NUM_ACTIVE):
        is_best_GS = place_GS == tl.max(place_GS)
        index_A = tl.where(a == chosen, tl.sum(tl.where(is_best_GS, e_GS, 0)), index_A)
        weight_A = tl.where(a == chosen, tl.sum(tl.where(is_best_GS, score_GS, 0.0)), weight_A)
        place_GS = tl.where(is_best_GS, LOWEST, place_GS)
    if SCORES == SOFTMAX_OF_CHOSEN:
        weight_A = tl.exp(weight_A - tl.max(weight_A))
        weight_A = weight_A / tl.sum(weight_A)
    if NORMALIZE:
        total = tl.sum(tl.where(a < NUM_ACTIVE, weight_A, 0.0)) + EPSILON
        weight_A = weight_A / tl.where(total < LEAST_TOTAL, LEAST_TOTAL, total)
    to_A = row * NUM_ACTIVE + a
    tl.store(indices + to_A, index_A, mask=a < NUM_ACTIVE)
    tl.store(weights + to_A, weight_A * SCALE, mask=a < NUM_ACTIVE)


@triton.jit
def _number(x):
    """Replace NaN by -infinity, so that it counts as the least."""
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _place(x, i, COUNT: tl.constexpr):
    """Distinct 64-bit integers in the order of `x`; of equal numbers the one with the lower `i`
    (below COUNT) is greater."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)  # -0 is 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.to(tl.int64) << 32) | (COUNT - 1 - i)
