"""Score a text with an artifact, through its session and cache."""

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
"""Tokens of a step. They are fewer than a window's, so most of the context comes from the pool."""


def score_artifact(
    artifact: Artifact,
    windows: Windows,
    *,
    session: str | None = None,
    num_threads: int | None = None,
) -> Scores:
    """Scores of each token after the first of each window; a window is one request.

    `session`: name of the session; default: the backend's default one. The pool is allocated here,
    and freed before the return.
    """
    total = sum(map(len, windows)) - len(windows)
    with (
        Engine(
            artifact,
            session=session,
            num_threads=num_threads,
            max_batch_size=1,
            max_batch_tokens=CHUNK_TOKENS,
            enable_prefix_caching=False,  # tokens of a prefix hit would get no logits
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
