"""Names of a step's launches in Python and in C: `header` writes them into contract.h.

Their order is part of the records of `launch.h`: a new order needs a new `KVG_KERNELS_VERSION`.
"""

ROLES = ("store", "prefill", "decode", "decode_split", "merge")
"""Roles of the kernels of an attention."""

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
"""Kernel parameters: integers that a launch passes by value."""

SCRATCH = ("partial_out", "partial_state")
"""Kernel parameters: float32 memory that the launches of a step share."""
