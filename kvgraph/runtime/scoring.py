"""The deployment side of an artifact's quality: its scores of a text, through session and cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.contract.inputs import ModelInputs
from kvgraph.contract.scores import Scores, joined, score
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.engine import Engine

CHUNK_TOKENS = 128
"""Tokens of a step: fewer than a window's, so that most of the context is read from the pool."""


def score_artifact(
    artifact: Artifact,
    windows: Sequence[npt.NDArray[np.int32]],
    *,
    session: str | None = None,
    num_threads: int | None = None,
) -> Scores:
    """How the artifact foretells each window, one request each, from its second token on.

    The session is the backend's default one; the pool is allocated here and gone with the return.
    """
    with Engine(
        artifact,
        session=session,
        num_threads=num_threads,
        max_batch_size=1,
        max_batch_tokens=CHUNK_TOKENS,
        enable_prefix_caching=False,  # a hit would have no logits
    ) as engine:
        limit = engine.scheduler.max_batch_tokens
        return joined([_score_window(engine, window, limit) for window in windows])


def _score_window(engine: Engine, window: npt.NDArray[np.int32], limit: int) -> Scores:
    context = TextContext("quality", window[:-1])
    engine.kv.claim(context.request_id)
    parts = []
    while context.active_length:
        context.active_length = min(context.active_length, limit)
        engine.kv.alloc(context)
        tokens = context.active_tokens
        first = context.processed_length
        inputs = ModelInputs(
            tokens, np.array([0, len(tokens)], np.int32), np.arange(len(tokens), dtype=np.int32)
        )
        logits_NV = engine.session.run(inputs, engine.kv.runtime_inputs([[context]]))
        parts.append(score(logits_NV, window[first + 1 : first + 1 + len(tokens)]))
        context.update()
        engine.kv.step([[context]])
    engine.kv.release(context.request_id)
    return joined(parts)
