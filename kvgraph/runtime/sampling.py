"""Generated tokens, and the random numbers and logit edits that decide them."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraph.runtime.edits import LogitEdits
from kvgraph.runtime.logprobs import TokenLogprobs
from kvgraph.runtime.sampling_params import SamplingParams as SamplingParams

Logits = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "error"]
"""Why a request ended. "stop": a stop string, a stop or end token, or the end of its grammar;
"length": its maximum length; "error": a failure of this request alone."""

NO_TOKEN = -1
"""Token id of a request that failed before it drew a token."""


class Token(NamedTuple):
    """One generated token. The last one says why its request ended (see `Completion`).

    A request that fails on its own ends with finish_reason "error": then `error` is a sentence with
    the reason, `token_id` is NO_TOKEN, and `text` is the text that its stop strings held back. The
    first token of a request that asks for `prompt_logprobs` carries them (see `Completion`).
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
    """Characters that the token completes, if stop strings may hold them; None: those of `text`."""

    @property
    def width(self) -> int:
        """Number of characters that the token completes, even if they are held back."""
        return len(self.text) if self.characters is None else self.characters


class TokenSource:
    """One request's random numbers, and its sampling parameters and logit edits.

    There is one uniform number per generated token, a function of the seed and its position."""

    def __init__(self, params: SamplingParams, edits: LogitEdits | None = None) -> None:
        self.params = params
        self.edits = edits
        self.asks = params.logprobs is not None or params.prompt_logprobs is not None
        seed = params.seed
        if seed is not None and seed < 0:
            seed += 1 << 64  # NumPy rejects negative seeds
        self._seed = np.random.SeedSequence(seed) if params.temperature > 0 else None
        self._random: np.random.Generator | None = None
        self.rewind(0)

    def uniform(self) -> float:
        return self._random.random() if self._random else 0.0

    def rewind(self, count: int) -> None:
        """Continue after the first `count` random numbers, at any current position."""
        if self._seed is not None:
            numbers = np.random.PCG64(self._seed)
            numbers.advance(count)
            self._random = np.random.Generator(numbers)
