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
    """One token, the natural logarithm of its probability (to 1e-5), and its rank: 1 the likeliest,
    of equal ones the lowest id first."""

    token_id: int
    logprob: float
    rank: int


class TokenLogprobs(NamedTuple):
    """Of one position: the token that is there, and the likeliest ones, likeliest first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(slots=True)
class PromptScores:
    """The log-probabilities of a request's prompt, as far as they are known.

    `found`: by position, None of the first token; `most`: likeliest tokens of each.

    A function of the prompt alone: what a step that did not happen has found stays.
    """

    most: int
    found: list[TokenLogprobs | None]
    known: int = 0
    """Positions whose logits were seen."""

    def is_due(self, context: TextContext) -> bool:
        """Whether the next chunk begins in the prompt."""
        return context.processed_length < len(self.found) - 1

    def span(self, context: TextContext) -> range:
        """Positions of the active tokens that get logits: each is about the token behind it."""
        processed = context.processed_length
        start = max(processed, self.known)
        end = min(processed + context.active_length, len(self.found) - 1)
        return range(start, max(start, end))


def score(
    logits_RV: npt.NDArray[np.float32], asked: Sequence[tuple[int, int, int]]
) -> list[TokenLogprobs]:
    """Of each (row of `logits [rows, vocab]`, token, how many of the likeliest tokens)."""
    dense_RV = np.ascontiguousarray(logits_RV, np.float32)
    results = []
    for (_, _, most), entries in zip(asked, native.logprobs(dense_RV, asked), strict=True):
        chosen, *top = [Logprob(token, p, rank) for token, rank, p in entries[: most + 1]]
        results.append(TokenLogprobs(chosen, tuple([each for each in top if each.token_id >= 0])))
    return results
