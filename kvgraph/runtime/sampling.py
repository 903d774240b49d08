"""Logits -> tokens: greedy, temperature, top-k and top-p, vectorised over the rows of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvgraph.errors import RequestError

Logits = npt.NDArray[np.float32]

COLDEST = 1e-30
"""Lower temperatures count as this one, so that no float32 logit divided by one overflows."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen, and when it ends.

    `temperature` 0 is greedy (`top_k`, `top_p`, `seed` then have no effect). `top_k` 0 keeps all
    tokens; `top_p` keeps the smallest set of likeliest tokens whose probabilities reach it.
    Generation stops after `max_new_tokens`, at a token of `stop_token_ids`, or at the model's own
    end tokens unless `ignore_eos`. With a `seed` a request's tokens do not depend on its batch.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        limits: dict[str, tuple[bool, str]] = {
            "max_new_tokens": (self.max_new_tokens >= 1, ">= 1"),
            "temperature": (0 <= self.temperature < math.inf, ">= 0 and finite"),
            "top_k": (self.top_k >= 0, ">= 0"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1]"),
            "seed": (self.seed is None or self.seed >= 0, ">= 0 or None"),
        }
        for name, (fits, expected) in limits.items():
            if not fits:
                raise RequestError(f"{name}: expected {expected}, got {getattr(self, name)}")


class TokenSource:
    """One request's random numbers: one uniform per generated token."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self._random = np.random.default_rng(params.seed) if params.temperature > 0 else None

    def uniform(self) -> float:
        return self._random.random() if self._random else 0.0


def sample(logits_RV: Logits, sources: Sequence[TokenSource]) -> list[int]:
    """One token for each row of `logits [rows, vocab]`; the logits are not changed."""
    tokens: list[int] = logits_RV.argmax(-1).tolist()
    rows = [i for i, source in enumerate(sources) if source.params.temperature > 0]
    if rows:
        chosen = _sample_rows(logits_RV[rows], [sources[i] for i in rows])
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
    return tokens


def _sample_rows(logits_RV: Logits, sources: Sequence[TokenSource]) -> list[int]:
    """Inverse transform sampling over the tokens that top-k and top-p keep, likeliest first."""
    params = [source.params for source in sources]
    vocab = logits_RV.shape[-1]
    order_RV = np.argsort(-logits_RV, axis=-1, kind="stable")
    temperature_R1 = np.array([max(p.temperature, COLDEST) for p in params])[:, None]
    scaled_RV = np.take_along_axis(logits_RV, order_RV, -1).astype(np.float64) / temperature_R1
    weights_RV = np.exp(scaled_RV - scaled_RV[:, :1])
    top_k_R1 = np.array([p.top_k or vocab for p in params])[:, None]
    weights_RV[np.arange(vocab) >= top_k_R1] = 0
    weights_RV /= weights_RV.sum(-1, keepdims=True)
    before_RV = np.cumsum(weights_RV, -1) - weights_RV
    top_p_R1 = np.array([p.top_p for p in params])[:, None]
    weights_RV[(before_RV >= top_p_R1) & (np.arange(vocab) > 0)] = 0
    total_RV = np.cumsum(weights_RV, -1)
    uniform_R1 = np.array([source.uniform() for source in sources])[:, None]
    ranks_R = (total_RV <= uniform_R1 * total_RV[:, -1:]).sum(-1)
    kept_R = (weights_RV > 0).sum(-1)
    ranks_R = np.minimum(ranks_R, kept_R - 1)
    chosen: list[int] = np.take_along_axis(order_RV, ranks_R[:, None], -1)[:, 0].tolist()
    return chosen
