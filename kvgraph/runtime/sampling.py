"""Tokens, and what decides those of a request."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraph.runtime.edits import LogitEdits
from kvgraph.runtime.logprobs import TokenLogprobs
from kvgraph.runtime.sampling_params import SamplingParams as SamplingParams

Logits = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "error"]
"""Why a request ended: at a stop string, a stop or end token or the end of its grammar, at its
longest, or by a failure that was its own."""

NO_TOKEN = -1
"""Stands for a token where a request failed before it had one."""


class Token(NamedTuple):
    """One generated token, and with the last one why its request ended (as `Completion` says it).

    A request that fails on its own ends with finish_reason "error": then `error` is a sentence that
    says why, `token_id` is NO_TOKEN, and `text` what its stop strings held back. The first token of
    a request that asks for them carries its `prompt_logprobs` (of `Completion`).
    """

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: str | int | None = None
    characters: int | None = None
    """That it completes, where they wait for stop strings; None: those of `text`."""

    @property
    def width(self) -> int:
        """Characters that it completes, whether they wait or not."""
        return len(self.text) if self.characters is None else self.characters


class TokenSource:
    """One request's random numbers: one uniform per generated token, a function of its seed; and
    what else decides its tokens."""

    def __init__(self, params: SamplingParams, edits: LogitEdits | None = None) -> None:
        self.params = params
        self.edits = edits
        self.asks = params.logprobs is not None or params.prompt_logprobs is not None
        seed = params.seed
        if seed is not None and seed < 0:
            seed += 1 << 64  # NumPy takes no sign
        self._seed = np.random.SeedSequence(seed) if params.temperature > 0 else None
        self._random: np.random.Generator | None = None
        self.rewind(0)

    def uniform(self) -> float:
        return self._random.random() if self._random else 0.0

    def rewind(self, count: int) -> None:
        """Go on behind the first `count` numbers, wherever it stood."""
        if self._seed is not None:
            numbers = np.random.PCG64(self._seed)
            numbers.advance(count)
            self._random = np.random.Generator(numbers)
