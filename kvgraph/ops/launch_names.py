"""Names that a step's launches have in Python and in C: `header` writes them into contract.h.

Their order is part of the records of `launch.h`: a change of it is a new `KVG_KERNELS_VERSION`.
"""

ROLES = ("store", "prefill", "decode", "decode_split", "merge")
"""What the kernels of an attention are launched for."""

VALUES = (
    "batch_size",
    "layer",
    "table_width",
    "tiles_per_row",
    "rows_below",
    "new_above",
    "new_upto",
    "num_parts",
    "tokens_per_row",
)
"""Integers that a launch passes by value: parameters of kernels."""

SCRATCH = ("partial_out", "partial_state")
"""float32 memory that the launches of a step share: parameters of kernels."""
