"""The definition of sampling, in NumPy: edits of a row of logits, and the token drawn from it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from kvgraph import SamplingParams


def sorted_whole(logits_RV: Any, draws: list[tuple[SamplingParams, float]]) -> list[int]:
    """The definition: every row sorted, weighed and summed whole, in float64."""
    chosen = []
    for row, (params, uniform) in zip(logits_RV, draws, strict=True):
        order = np.argsort(-row, kind="stable")
        scaled = row[order].astype(np.float64) / max(params.temperature, 1e-30)
        weights = np.exp(scaled - scaled[0])
        weights[params.top_k or len(row) :] = 0
        weights[weights < params.min_p] = 0
        reached = np.cumsum(weights)
        before = np.concatenate([[0], reached[:-1]])
        weights[(before >= params.top_p * reached[-1]) & (np.arange(len(row)) > 0)] = 0
        total = np.cumsum(weights)
        rank = int((total <= uniform * total[-1]).sum())
        chosen.append(int(order[min(rank, int((weights > 0).sum()) - 1)]))
    return chosen


def edited(
    row: Any, params: SamplingParams, prompt: list[int], output: list[int], ends: Any, allowed: Any
) -> Any:
    """The definition, on a copy of one row of logits; `allowed`: by token, or None."""
    row = row.astype(np.float64)
    if allowed is not None:
        row[~allowed] = -np.inf
    if len(output) < params.min_new_tokens:
        row[list(ends)] = -np.inf
    for token, bias in (params.logit_bias or {}).items():
        row[token] = np.float32(row[token] + bias)
    seen = set(output) | (set(prompt) if params.repetition_penalty != 1 else set())
    counts = Counter(output)
    for token in seen:
        factor = params.repetition_penalty
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if token in counts:
            row[token] -= params.frequency_penalty * counts[token] + params.presence_penalty
    return row.astype(np.float32)


def words(allowed: Any) -> Any:
    """A mask as the kernel takes it; bits behind the vocabulary are set."""
    bits = np.concatenate([allowed, np.ones(-len(allowed) % 32, bool)])
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def chosen(row: Any, params: SamplingParams, number: float) -> int | None:
    if row.max() == -np.inf:
        return None
    greedy = params.temperature == 0
    return int(row.argmax()) if greedy else sorted_whole([row], [(params, number)])[0]
