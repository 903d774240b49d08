"""Score how well logits predict a text, to compare an artifact with its checkpoint.

N: positions that have a next token; V: vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvgraph.contract.manifest import QualityInfo
from kvgraph.errors import ArtifactError

WORST_NATS = 700.0
"""Largest mean loss, in nats. A larger one is cut to it, as float64 cannot hold its perplexity."""

BLOCK_ROWS = 64
"""Rows of logits that are scored together, so that temporary copies stay small."""


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores by position: -ln of the true next token's probability, and the most likely token."""

    nats: npt.NDArray[np.float64]
    best: npt.NDArray[np.int64]

    @property
    def perplexity(self) -> float:
        return math.exp(min(float(self.nats.mean()), WORST_NATS))


def score(logits_NV: npt.NDArray[np.float32], next_N: npt.NDArray[np.integer]) -> Scores:
    """Scores of logits against the true next tokens. ArtifactError for a NaN or Inf."""
    nats_N = np.empty(len(next_N))
    for start in range(0, len(next_N), BLOCK_ROWS):
        block_NV = logits_NV[start : start + BLOCK_ROWS]
        top_N1 = block_NV.max(-1, keepdims=True)
        if not (np.isfinite(top_N1).all() and np.isfinite(block_NV.min())):
            raise ArtifactError("logits: expected finite numbers from the model, got NaN or Inf")
        total_N = np.exp(block_NV - top_N1).sum(-1, dtype=np.float64)
        true_N = np.take_along_axis(block_NV, next_N[start : start + BLOCK_ROWS, None], -1)[:, 0]
        nats_N[start : start + BLOCK_ROWS] = np.log(total_N) + top_N1[:, 0] - true_N
    return Scores(nats_N, logits_NV.argmax(-1))


def joined(parts: Sequence[Scores]) -> Scores:
    """Join the scores of several parts, in order."""
    return Scores(
        np.concatenate([part.nats for part in parts]),
        np.concatenate([part.best for part in parts]),
    )


def compare(scores: Scores, reference: Scores, *, text: str, sha256: str) -> QualityInfo:
    """The manifest's quality figures, rounded to six digits, from two scores of the same text."""
    return QualityInfo(
        text=text,
        sha256=sha256,
        tokens=len(scores.nats),
        perplexity=float(f"{scores.perplexity:.6g}"),
        reference_perplexity=float(f"{reference.perplexity:.6g}"),
        agreement=round(float((scores.best == reference.best).mean()), 6),
    )
