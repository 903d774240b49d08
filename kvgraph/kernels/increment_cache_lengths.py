"""Kernel of increment_cache_lengths: rows grow by the tokens of the step that ran."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["batch_size"])
def increment_cache_lengths(cache_lengths, input_row_offsets, batch_size, BLOCK_B: tl.constexpr):
    """`cache_lengths += input_row_offsets[1:] - input_row_offsets[:-1]`, in place.

    Grid: (ceil(batch_size / BLOCK_B),).
    """
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    mask = b < batch_size
    begin = tl.load(input_row_offsets + b, mask=mask, other=0)
    end = tl.load(input_row_offsets + b + 1, mask=mask, other=0)
    lengths = tl.load(cache_lengths + b, mask=mask, other=0)
    tl.store(cache_lengths + b, lengths + end - begin, mask=mask)
