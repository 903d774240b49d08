"""An engine over a session whose tokens are a script."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgraph import Engine, SamplingParams
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sessions.base import Session


def greedy(max_new_tokens: int = 24, **fields: Any) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True, **fields)


def assert_empty(engine: Engine) -> None:
    """Nothing is queued, every page is back, and the engine still works."""
    assert not engine.scheduler.running
    assert not engine.scheduler.waiting
    assert engine.kv.num_free_blocks() == engine.kv.total_num_blocks()
    assert engine.step() == []
    assert len(engine.generate([[5, 6]], greedy(2))[0].token_ids) == 2


class Scripted(Session):
    """The token at position p of every request is `script[p]`, whatever came before.

    `steps`: new tokens of each step.
    """

    def __init__(self, artifact: Artifact, script: Sequence[int]) -> None:
        super().__init__(artifact)
        self.script = list(script)
        self.steps: list[int] = []
        self.vocab_size = artifact.manifest.model.vocab_size

    def _run(self, arrays: list[Any]) -> Any:
        tokens, offsets, indices, _, cached, *_ = arrays
        self.steps.append(len(tokens))
        rows = np.searchsorted(offsets, indices, side="right") - 1
        positions = indices - offsets[rows] + cached[rows]
        logits = np.zeros((len(indices), self.vocab_size), np.float32)
        for logits_V, position in zip(logits, positions, strict=True):
            if position + 1 < len(self.script):
                logits_V[self.script[position + 1]] = 1
        return logits


def scripted(artifact: Artifact, script: Sequence[int], **options: Any) -> Engine:
    return Engine(artifact, session=Scripted(artifact, script), **({"num_pages": 200} | options))
