"""The artifact's scores of a text, through session and cache."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvgraph.kv.forward import forward
from kvgraph.progress import Advance, task
from kvgraph.quality.scores import Scores, joined, score
from kvgraph.quality.text import Windows
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.engine import Engine

CHUNK_TOKENS = 128
"""Tokens of a step: fewer than a window's, so that most of the context is read from the pool."""


def score_artifact(
    artifact: Artifact,
    windows: Windows,
    *,
    session: str | None = None,
    num_threads: int | None = None,
) -> Scores:
    """How likely the artifact finds each token of each window, one request each, after the first.

    The session is the backend's default one; the pool is allocated here and gone with the return.
    """
    total = sum(map(len, windows)) - len(windows)
    with (
        Engine(
            artifact,
            session=session,
            num_threads=num_threads,
            max_batch_size=1,
            max_batch_tokens=CHUNK_TOKENS,
            enable_prefix_caching=False,  # a hit would have no logits
        ) as engine,
        task("scoring", total, "tokens") as advance,
    ):
        return joined([_score_window(engine, window, advance) for window in windows])


def _score_window(engine: Engine, window: npt.NDArray[np.int32], advance: Advance) -> Scores:
    chunk = engine.scheduler.max_batch_tokens
    parts = []
    for _, first, logits_NV in forward(engine.kv, [window[:-1]], engine.session.run, chunk=chunk):
        parts.append(score(logits_NV, window[first + 1 : first + 1 + len(logits_NV)]))
        advance(len(logits_NV))
    return joined(parts)
