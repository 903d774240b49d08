"""Rows of tokens that a check runs: the same in every compile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.compiler.model import Model

Row = npt.NDArray[np.int32]

LENGTHS = 51, 29
OTHERS = 7
"""Number of rows that join the two in a larger batch, which must not change their logits."""


def rows_of(model: Model) -> list[Row]:
    """Two rows of random tokens, the same in every compile.

    The first has an odd length, and is longer than the second if the model's context allows.
    """
    random = np.random.default_rng(20)
    first = min(LENGTHS[0], model.max_seq_len - 1 + model.max_seq_len % 2)
    lengths = first, max(1, min(LENGTHS[1], first - 1))
    return [random.integers(0, model.vocab_size, length).astype(np.int32) for length in lengths]


def chunk_of(rows: Sequence[Row]) -> int:
    """Tokens of a chunk: two chunks leave exactly one token of the longest row."""
    return max(1, len(rows[0]) // 2)


def crowd_of(rows: Sequence[Row], max_seq_len: int) -> tuple[list[Row], list[int]]:
    """A batch of OTHERS rows and then `rows`, with each row's chunk: the first row is mostly in the
    first step."""
    ahead = np.tile(rows[0], 4)[:max_seq_len]
    others = [ahead, *(np.roll(rows[0], shift) for shift in range(1, OTHERS))]
    chunks = [max(1, 3 * len(ahead) // 4), *[chunk_of(rows)] * (OTHERS - 1 + len(rows))]
    return [*others, *rows], chunks
