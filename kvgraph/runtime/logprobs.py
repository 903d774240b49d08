"""Log-probabilities of the model's own distribution: before bias, penalties and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraph.kv.requests import TextContext
from kvgraph.ops import native


class Logprob(NamedTuple):
    """A token, the natural logarithm of its probability (to 1e-5), and its rank.

    Rank 1 is the likeliest token; equal ones rank by lowest id."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: of the token there, and of the top tokens in order."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a request's prompt, as far as they are known.

    `found`: one entry per position; None for the first token. `most`: top tokens per position.

    They depend on the prompt alone, so the results of an abandoned step stay valid.
    """

    most: int
    found: list[TokenLogprobs | None]
    known: int = 0
    """Number of positions with logits that were scored."""

    def is_due(self, context: TextContext) -> bool:
        """Whether the next chunk starts in the prompt, before its last token."""
        return context.processed_length < len(self.found) - 1

    def span(self, context: TextContext) -> range:
        """Positions of active tokens that need logits: those at i score the token at i + 1."""
        processed = context.processed_length
        start = max(processed, self.known)
        end = min(processed + context.active_length, len(self.found) - 1)
        return range(start, max(start, end))


def score(
    logits_RV: npt.NDArray[np.float32], asked: Sequence[tuple[int, int, int]]
) -> list[TokenLogprobs]:
    """Log-probabilities for each `(row of logits, token id, number of top tokens)` in `asked`."""
    dense_RV = np.ascontiguousarray(logits_RV, np.float32)
    results = []
    for (_, _, most), entries in zip(asked, native.logprobs(dense_RV, asked), strict=True):
        chosen, *top = [Logprob(token, p, rank) for token, rank, p in entries[: most + 1]]
        results.append(TokenLogprobs(chosen, tuple([each for each in top if each.token_id >= 0])))
    return results
