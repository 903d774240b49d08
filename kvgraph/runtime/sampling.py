"""Logits -> tokens: greedy, temperature, top-k and top-p, vectorised over the rows of a step.

Decision: NumPy, except for the passes over whole rows that find the likeliest tokens and sum all
weights (`kvgraph.ops.native.likeliest`). In NumPy those were most of 64 rows of 32,000 logits:
top-k 2.1 ms of processor time on AVX-512, top-p or temperature alone 4.9 (sorting every row took
205 ms). Now 1.1 to 1.6 ms, a third of it in the kernel. Greedy is NumPy's argmax.

R: rows; V: vocabulary; W: tokens of a head, or of the widest of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvgraph.errors import RequestError
from kvgraph.ops import native

Logits = npt.NDArray[np.float32]

COLDEST = 1e-30
"""Lower temperatures count as this one, so that no float32 logit divided by one overflows."""

WARMEST = float(np.finfo(np.float32).max)
"""Higher ones count as this one where a row's weights are summed: its tokens are equally likely."""

HEADS = (128, 1024)
"""The likeliest tokens that are looked at first, and next; a wider top-k has its row sorted."""

SHORT_VOCAB = 2048
"""A row of fewer tokens is sorted whole, with the others."""

TOTAL_ERROR = 1e-5
"""Share by which a row's sum of weights may be wrong (its bound is about half of that)."""

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

    ids: npt.NDArray[np.int32] | npt.NDArray[np.int64]
    logits: Logits
    total: float | None


def _sample_rows(rows_V: Sequence[Logits], draws: Sequence[Draw]) -> list[int]:
    """Decide each row by a short head, else by a longer one, else by all of it."""
    chosen = [-1] * len(rows_V)
    for likeliest in HEADS:
        open_rows = [i for i, token in enumerate(chosen) if token < 0]
        found = _heads([rows_V[i] for i in open_rows], [draws[i] for i in open_rows], likeliest)
        heads = {i: head for i, head in zip(open_rows, found, strict=True) if head}
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


def _heads(rows_V: Sequence[Logits], draws: Sequence[Draw], likeliest: int) -> list[Head | None]:
    """Heads of the `top_k` likeliest tokens or, without a top-k so small, of `likeliest` or more.

    None where one would not be much shorter than its row. The m-th greatest of the maxima of groups
    is at most the m-th greatest of all, since every maximum is a token of its own: what reaches it
    holds the m likeliest, and some more.
    """
    if not rows_V or len(rows_V[0]) < SHORT_VOCAB:
        return [_whole(row_V) for row_V in rows_V]
    vocab = len(rows_V[0])
    asked = {}
    for i, (row_V, draw) in enumerate(zip(rows_V, draws, strict=True)):
        limited = draw.top_k <= likeliest
        most = int(draw.top_k) if limited else likeliest
        groups = max(4 * most, SHORT_VOCAB // 2)
        if vocab >= 2 * groups and (limited or draw.top_k == math.inf):
            temperature = 0.0 if limited else min(draw.temperature, WARMEST)
            asked[i] = native.LogitsRow(row_V, groups, most, temperature)
    heads: list[Head | None] = [None] * len(rows_V)
    if not asked:
        return heads
    room = 4 * max(row.groups for row in asked.values())
    for i, found in zip(asked, native.likeliest([*asked.values()], vocab, room), strict=True):
        if found.ids is not None and len(found.ids) <= 4 * asked[i].groups:  # else many are equal
            total = found.total if asked[i].temperature else None
            heads[i] = Head(found.ids, rows_V[i][found.ids], total)
    return heads


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
