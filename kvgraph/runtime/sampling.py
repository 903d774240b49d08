"""Logits -> tokens: greedy, temperature, top-k, top-p; by the kernel `kvgraph.ops.native.sample`.

Decision: a kernel, not NumPy. 64 rows of 32,000 logits like a trained model's, of a step of 40 ms
and less: 205 ms with every row sorted; 2 to 5 by the likeliest tokens of each alone, 1.1 to 1.6
with a kernel to find these; all of it in the kernel, 0.22 (top-k) to 0.39 (top-p, temperature), and
0.15 greedy. One greedy row is NumPy's: a call of the kernel is 50 us more there, for a step sweeps
the caches of what it needs, and 1 % of a step of 5 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraph.ops import native
from kvgraph.runtime.edits import LogitEdits
from kvgraph.runtime.logprobs import TokenLogprobs
from kvgraph.runtime.sampling_params import SamplingParams as SamplingParams

Logits = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "error"]
"""Why a request ended: at a stop string, a stop or end token, at its longest, or by a failure that
was its own."""

NO_TOKEN = -1
"""Stands for a token where a request failed before it had one."""


class Token(NamedTuple):
    """One generated token, and with the last one why its request ended (as `Completion` says it).

    A request that fails on its own ends with finish_reason "error": then `error` is a sentence that
    says why, `token_id` is NO_TOKEN and `text` is empty. The first token of a request that asks for
    them carries its `prompt_logprobs` (of `Completion`).
    """

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None
    error: str | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: str | int | None = None


class TokenSource:
    """One request's random numbers: one uniform per generated token, a function of its seed; and
    what else decides its tokens."""

    def __init__(self, params: SamplingParams, edits: LogitEdits | None = None) -> None:
        self.params = params
        self.edits = edits
        self.asks = params.logprobs is not None or params.prompt_logprobs is not None
        self._seed = np.random.SeedSequence(params.seed) if params.temperature > 0 else None
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


def sample(logits_RV: Logits, sources: Sequence[TokenSource]) -> list[int | None]:
    """One token for each row of `logits [rows, vocab]`; the logits are not changed, and not copied
    where they are dense float32.

    A sampled row's token is the inverse transform of its one random number over the tokens that
    min-p, top-k and top-p keep, likeliest first, of equal ones the lowest id first. A NaN counts as
    -Inf. None for a row whose logits, as edited, are all -Inf.
    """
    if len(sources) == 1 and sources[0].params.temperature == 0 and not sources[0].edits:
        token = int(logits_RV[0].argmax())
        if logits_RV[0, token] > -math.inf:  # else the first NaN of them, or of nothing but -Inf
            return [token]
    vocab = logits_RV.shape[1]
    draws = []
    for source in sources:
        p, edits = source.params, source.edits
        address = edits.address() if edits else 0
        draws.append(
            (p.temperature, p.top_p, source.uniform(), min(p.top_k, vocab), p.min_p, address)
        )
    tokens = native.sample(np.ascontiguousarray(logits_RV, np.float32), draws)[0]
    return [token if token >= 0 else None for token in tokens]
