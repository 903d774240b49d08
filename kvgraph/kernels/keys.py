"""Device functions on keys: the keys that a tile's queries see, and the parts of a long context."""

import triton
import triton.language as tl


@triton.jit
def part_of_keys(low, high, num_parts, part, BLOCK_N: tl.constexpr, MIN_PART: tl.constexpr):
    """Keys [begin, end) of one part of the keys [low, high); begin is a multiple of BLOCK_N.

    Parts have equally many keys, at least MIN_PART (a multiple of BLOCK_N); the last may be empty.
    """
    base = low // BLOCK_N * BLOCK_N
    blocks = (high - base + BLOCK_N - 1) // BLOCK_N
    size = tl.maximum((blocks + num_parts - 1) // num_parts * BLOCK_N, MIN_PART)
    return base + part * size, tl.minimum(base + part * size + size, high)


@triton.jit
def keys_of(
    cached,
    new,
    first,
    last,
    WINDOW: tl.constexpr,
    CHUNKED: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Positions [low, high) that any of the new tokens first..last of a row sees."""
    if CHUNKED:
        low = (cached + first) // WINDOW * WINDOW
    else:
        low = tl.maximum(cached + first - WINDOW + 1, 0) if WINDOW else first * 0
    high = cached + last + 1 if CAUSAL else cached + new
    return low, high
