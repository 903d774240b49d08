"""Device functions that several kernels share: the rows and pages of a program."""

import triton
import triton.language as tl


@triton.jit
def row_of_tile(
    input_row_offsets, batch_size, tile, tiles_per_row, rows_below, BLOCK_T: tl.constexpr
):
    """Row of a tile of BLOCK_T new tokens, and the tile's first token in it: (row, first).

    `tiles_per_row`: number of tiles of every row. With 0, row b has the tiles from
    `input_row_offsets[b] // BLOCK_T + b` on: never fewer than it needs, `T // BLOCK_T + B` in all.
    `rows_below`: a power of two of at least batch_size. `first` may be beyond the row's end.
    """
    row = tile
    first = tile * 0
    if tiles_per_row > 0:
        row = tile // tiles_per_row
        first = (tile - row * tiles_per_row) * BLOCK_T
    else:
        row = tile * 0
        step = rows_below
        while step > 0:  # the last row whose first tile is at most `tile`
            row_next = row + step
            inside = row_next < batch_size
            begin = tl.load(input_row_offsets + row_next, mask=inside, other=0)
            row = tl.where(inside & (begin // BLOCK_T + row_next <= tile), row_next, row)
            step = step // 2
        first = (tile - tl.load(input_row_offsets + row) // BLOCK_T - row) * BLOCK_T
    return row, first


@triton.jit
def slot_of(
    page,
    offset,
    head,
    layer,
    kind: tl.constexpr,
    LAYERS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
):
    """Index of a head's vector in the pool `[P+1, 2, L, S, K, D]`, in units of D; 64-bit."""
    in_page = (kind * LAYERS + layer) * (PAGE_SIZE * KV_HEADS) + offset * KV_HEADS + head
    return page.to(tl.int64) * (2 * LAYERS * PAGE_SIZE * KV_HEADS) + in_page
