"""Pads decode batches to a few sizes, so that one captured graph serves many batches.

A batch of one new token per row is padded with dummy rows to the next size. Its context lengths
are bounded by the next power of two: `max_lengths` and the width of the lookup tables follow from
these bounds, not from the batch. Dummy rows write to and read from the null page.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from kvgraph.contract.inputs import BatchCharacteristics, ModelInputs
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.scheduler import Batch

LEAST_CONTEXT = 512
"""Smallest bound of a context, in tokens: attention reads one part below it anyway."""


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """A batch as the session runs it: the batch's rows first, then dummy rows."""

    inputs: ModelInputs
    requests: list[list[TextContext]]
    bounds: BatchCharacteristics


def batch_sizes(most: int) -> list[int]:
    """Batch sizes 1, 2, 4, 8, 16, then two for each doubling, up to and including `most`."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < most:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, most]


def dummy_rows(most: int) -> int:
    """Most dummy rows that padding adds; a manager needs them in addition to request rows."""
    sizes = batch_sizes(most)
    return max((b - a - 1 for a, b in itertools.pairwise(sizes)), default=0)


class DecodeBuckets:
    """Pads decode batches of up to `max_batch_size` rows. Claims its dummy rows in `kv`.

    No bound exceeds the model's `max_seq_len`, since its tables by position end there.
    """

    def __init__(
        self, kv: PagedKVCacheManager, max_batch_size: int, max_seq_len: int | None = None
    ) -> None:
        self._kv = kv
        self._sizes = batch_sizes(max_batch_size)
        self._longest = min(kv.max_context_length, max_seq_len or kv.max_context_length)
        self._dummies = [
            TextContext((type(self).__name__, i), [0]) for i in range(dummy_rows(max_batch_size))
        ]
        self.claim()

    def claim(self) -> None:
        """Claim the dummy rows: once, and after each `rebuild` of the manager."""
        for dummy in self._dummies:
            self._kv.alloc_dummy(dummy.request_id)

    def pad(self, batch: Batch) -> PaddedBatch | None:
        """The batch padded to the next size; None unless each row has one token and is sampled."""
        rows = len(batch.rows)
        if not len(batch.sampled) == rows == len(batch.inputs.tokens):
            return None
        size = next(size for size in self._sizes if size >= rows)
        tokens = np.zeros(size, np.int32)
        tokens[:rows] = batch.inputs.tokens
        offsets = np.arange(size + 1, dtype=np.int32)
        contexts = [row.context for row in batch.rows] + self._dummies[: size - rows]
        longest = max(row.context.current_length for row in batch.rows)
        return PaddedBatch(
            ModelInputs(tokens, offsets, offsets[:-1]),
            [contexts],
            BatchCharacteristics(size, 1, self._bound(longest)),
        )

    def _bound(self, longest: int) -> int:
        return min(max(LEAST_CONTEXT, 1 << (longest - 1).bit_length()), self._longest)
