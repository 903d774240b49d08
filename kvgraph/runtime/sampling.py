"""Logits -> tokens: greedy, temperature, top-k and top-p, vectorised over the rows of a step.

Decision: NumPy, and no kernel of ours. 64 rows of 32,000 logits, processor time on AVX-512: argmax
0.11 ms, top-k 2.1 ms, top-p or temperature alone 4.9 ms, of which 1.6 are the sum of all weights
(sorting every row took 205 ms). A kernel could at best save the latter two.

R: rows; V: vocabulary; G: groups of tokens; W: tokens of a head, or of the widest of them.
"""

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

HEADS = (128, 1024)
"""The likeliest tokens that are looked at first, and next; a wider top-k has its row sorted."""

SHORT_VOCAB = 2048
"""A row of fewer tokens is sorted whole, with the others."""

TOTAL_ERROR = 1e-5
"""Share by which a row's sum in float32 may be wrong (its bound is a fifth of that)."""

LAST_KEY = (0x7F800000 << 32) | 0xFFFFFFFF
"""Sorts behind every token: a logit of -Inf, and an id that no token has."""


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
    """One token for each row of `logits [rows, vocab]`; the logits are neither changed nor copied.

    A sampled row's token is the inverse transform of its one random number over the tokens that
    top-k and top-p keep, likeliest first, of equal ones the lowest id first.
    """
    rows = [i for i, source in enumerate(sources) if source.params.temperature > 0]
    is_greedy = len(rows) < len(sources)
    tokens: list[int] = logits_RV.argmax(-1).tolist() if is_greedy else [-1] * len(rows)
    if rows:
        chosen = _sample_rows([logits_RV[i] for i in rows], [Draw.of(sources[i]) for i in rows])
        for row, token in zip(rows, chosen, strict=True):
            tokens[row] = token
    return tokens


@dataclass(frozen=True, slots=True)
class Draw:
    """How one row is sampled at this step, and its random number in [0, 1)."""

    temperature: float
    top_k: float
    """Infinity keeps all."""
    top_p: float
    uniform: float

    @classmethod
    def of(cls, source: TokenSource) -> Draw:
        p = source.params
        warmth = max(p.temperature, COLDEST)
        return cls(warmth, p.top_k or math.inf, p.top_p, source.uniform())


@dataclass(frozen=True, slots=True)
class Head:
    """A row's likeliest tokens, and the weight of the whole row.

    `total` is the sum of exp((logit - greatest) / temperature) over the vocabulary, within a share
    of TOTAL_ERROR; None where the head holds every token that may be chosen.
    """

    ids: npt.NDArray[np.int64]
    logits: Logits
    total: float | None


def _sample_rows(rows_V: Sequence[Logits], draws: Sequence[Draw]) -> list[int]:
    """Decide each row by a short head, else by a longer one, else by all of it."""
    chosen = [-1] * len(rows_V)
    for likeliest in HEADS:
        open_rows = [i for i, token in enumerate(chosen) if token < 0]
        heads = {i: head for i in open_rows if (head := _head(rows_V[i], draws[i], likeliest))}
        if heads:
            tokens = _choose(list(heads.values()), [draws[i] for i in heads])
            for i, token in zip(heads, tokens, strict=True):
                chosen[i] = token
    return [
        token if token >= 0 else _choose([_whole(row_V)], [draw])[0]
        for token, row_V, draw in zip(chosen, rows_V, draws, strict=True)
    ]


def _whole(row_V: Logits) -> Head:
    return Head(np.arange(len(row_V)), row_V, None)


def _head(row_V: Logits, draw: Draw, likeliest: int) -> Head | None:
    """A head of the `top_k` likeliest tokens or, without a top-k so small, of `likeliest` or more.

    None where it would not be much shorter than the row. The m-th greatest of the maxima of groups
    is at most the m-th greatest of all, since every maximum is a token of its own: what reaches it
    holds the m likeliest, and some more.
    """
    if len(row_V) < SHORT_VOCAB:
        return _whole(row_V)
    limited = draw.top_k <= likeliest
    most = int(draw.top_k) if limited else likeliest
    groups = max(4 * most, SHORT_VOCAB // 2)
    if len(row_V) < 2 * groups or (not limited and draw.top_k < math.inf):
        return None
    even = len(row_V) // groups * groups
    best_G = row_V[:even].reshape(-1, groups).max(0)
    rest = row_V[even:]
    np.maximum(best_G[: len(rest)], rest, out=best_G[: len(rest)])
    best_G.partition(groups - most)
    ids_W = np.flatnonzero(row_V >= best_G[groups - most])
    if not most <= len(ids_W) <= 4 * groups:  # fewer: a NaN; more: many are equal
        return None
    logits_W = row_V[ids_W]
    total = None if limited else _total(row_V, logits_W.max(), draw.temperature)
    return Head(ids_W, logits_W, total)


def _total(row_V: Logits, greatest: np.float32, temperature: float) -> float:
    """The row's weights in float32 (its 12 us for 32,000 tokens are half of float64's)."""
    with np.errstate(over="ignore", invalid="ignore"):
        weights_V = row_V - greatest
        if temperature != 1:
            weights_V /= np.float32(temperature)
        return float(np.exp(weights_V, out=weights_V).sum())


def _choose(heads: Sequence[Head], draws: Sequence[Draw]) -> list[int]:
    """Each row's token; -1 where the head ends before it, or `total`'s error might decide."""
    ids_RW, logits_RW = _ranked(heads)
    columns = np.array([(d.temperature, d.top_k, d.top_p, d.uniform) for d in draws])
    temperature_R1, top_k_R1, top_p_R1, uniform_R1 = columns.T[:, :, None]
    totals = [math.nan if head.total is None else head.total for head in heads]
    closed_R1 = np.array([head.total is None for head in heads])[:, None]
    width_R1 = np.array([len(head.ids) for head in heads])[:, None]
    ranks_W = np.arange(ids_RW.shape[1])

    scaled_RW = logits_RW.astype(np.float64) / temperature_R1
    weights_RW = np.exp(scaled_RW - scaled_RW[:, :1])
    weights_RW[ranks_W >= top_k_R1] = 0
    sums_R1 = weights_RW.sum(-1, keepdims=True)
    weights_RW /= np.where(closed_R1, sums_R1, np.array(totals)[:, None])
    reached_RW = np.cumsum(weights_RW, -1)
    before_RW = reached_RW - weights_RW
    whole_R1 = ~closed_R1 & (top_p_R1 == 1)  # all is kept, beyond the head too

    def at(scale: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Ranks [R, 1], and how many of the head are kept, if true weights are `scale` times."""
        scale_R1 = np.where(closed_R1, 1.0, scale)
        kept_RW = (before_RW * scale_R1 < top_p_R1) | (ranks_W == 0) | whole_R1
        kept_RW &= weights_RW > 0
        kept_R1 = kept_RW.sum(-1, keepdims=True)
        mass_R1 = np.take_along_axis(reached_RW, np.maximum(kept_R1 - 1, 0), -1)
        mass_R1 = np.where(whole_R1, 1 / scale_R1, mass_R1)
        passed_R1 = (kept_RW & (reached_RW <= uniform_R1 * mass_R1)).sum(-1, keepdims=True)
        return np.where(whole_R1, passed_R1, np.minimum(passed_R1, kept_R1 - 1)), kept_R1

    (rank_R1, kept_R1) = at(1 - TOTAL_ERROR)
    (rank_too_R1, kept_too_R1) = (rank_R1, kept_R1) if closed_R1.all() else at(1 + TOTAL_ERROR)
    inside_R1 = np.where(whole_R1, rank_R1, kept_R1) < width_R1
    same_R1 = (rank_R1 == rank_too_R1) & (kept_R1 == kept_too_R1)
    known_R1 = np.isfinite(np.array(totals))[:, None]
    sure_R1 = closed_R1 | (known_R1 & inside_R1 & same_R1)
    last_R1 = np.minimum(np.maximum(rank_R1, 0), width_R1 - 1)
    chosen_R1 = np.where(sure_R1, np.take_along_axis(ids_RW, last_R1, -1), -1)
    tokens: list[int] = chosen_R1[:, 0].tolist()
    return tokens


def _ranked(heads: Sequence[Head]) -> tuple[npt.NDArray[np.int64], Logits]:
    """Ids and logits `[rows, width of the widest]`, likeliest first, of equals the lowest id first.

    Shorter rows end in logits of -Inf. Sorting 64-bit keys of logit and id is 20 times as fast as
    NumPy's stable sort of the logits, and orders as it does.
    """
    widths_R1 = np.array([len(head.ids) for head in heads])[:, None]
    keys_RW = np.full((len(heads), int(widths_R1.max())), LAST_KEY)
    logits = np.concatenate([head.logits for head in heads]) + np.float32(0)  # no -0.0
    keys = ~_ordered(logits.view(np.int32)).astype(np.int64) << 32
    keys |= np.concatenate([head.ids for head in heads])
    keys_RW[np.arange(keys_RW.shape[1]) < widths_R1] = keys
    keys_RW.sort(-1)
    bits_RW = _ordered((~(keys_RW >> 32)).astype(np.int32))
    return keys_RW & 0xFFFFFFFF, bits_RW.view(np.float32)


def _ordered(bits: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """A float's bits as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
