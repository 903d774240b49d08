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
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraph.errors import RequestError
from kvgraph.ops import native
from kvgraph.runtime.arguments import flag, integer, integers, number, optional_integer

Logits = npt.NDArray[np.float32]

FinishReason = Literal["stop", "length", "error"]
"""Why a request ended: at a stop or end token, at its longest, or by a failure that was its own."""

NO_TOKEN = -1
"""Stands for a token where a request failed before it had one."""


class Token(NamedTuple):
    """One generated token, and with the last one why its request ended.

    A request that fails on its own ends with finish_reason "error": then `error` is a sentence that
    says why, `token_id` is NO_TOKEN and `text` is empty.
    """

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    `temperature` 0 is greedy (`top_k`, `top_p`, `seed` then have no effect). `top_k` 0 keeps all
    tokens; `top_p` keeps the smallest set of likeliest tokens whose probabilities reach it.
    Generation stops after `max_new_tokens`, at a token of `stop_token_ids`, or at the model's own
    end tokens unless `ignore_eos`. With a `seed` a request's tokens do not depend on its batch.
    RequestError names a field of another type, or out of its range.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        temperature, top_p = number("temperature", self.temperature), number("top_p", self.top_p)
        for name, value, fits, expected in (
            ("temperature", temperature, 0 <= temperature < math.inf, ">= 0 and finite"),
            ("top_p", top_p, 0 < top_p <= 1, "in (0, 1]"),
        ):
            if not fits:
                raise RequestError(f"{name}: expected {expected}, got {value}")
        for name, own in {
            "max_new_tokens": integer("max_new_tokens", self.max_new_tokens, 1),
            "temperature": temperature,
            "top_k": integer("top_k", self.top_k, 0),
            "top_p": top_p,
            "seed": optional_integer("seed", self.seed, 0),
            "stop_token_ids": integers("stop_token_ids", self.stop_token_ids, 0),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
        }.items():
            object.__setattr__(self, name, own)


class TokenSource:
    """One request's random numbers: one uniform per generated token, a function of its seed."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
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
    top-k and top-p keep, likeliest first, of equal ones the lowest id first. A NaN counts as -Inf.
    None for a row whose logits are all -Inf.
    """
    if len(sources) == 1 and sources[0].params.temperature == 0:
        token = int(logits_RV[0].argmax())
        if logits_RV[0, token] > -math.inf:  # else the first NaN of them, or of nothing but -Inf
            return [token]
    vocab = logits_RV.shape[1]
    draws = []
    for source in sources:
        p = source.params
        draws.append((p.temperature, p.top_p, source.uniform(), min(p.top_k, vocab)))
    dense_RV = np.ascontiguousarray(logits_RV, np.float32)
    logit, tokens = dense_RV.item, native.sample(dense_RV, draws)[0]
    # A row of nothing but NaN and -Inf gives token 0: the lowest id of equal ones.
    pairs = enumerate(tokens)
    return [token if token or logit(row, 0) > -math.inf else None for row, token in pairs]
