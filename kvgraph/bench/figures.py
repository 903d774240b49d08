"""Figures from seconds: tokens/s, share of the machine's limit, ratio to the best peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvgraph.bench.counts import GEMM_DTYPES, Counts
from kvgraph.bench.engines import CaseResult, EngineResult
from kvgraph.bench.limits import Limits
from kvgraph.bench.protocol import Case


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of one engine. `what`: "prefill", "decode" or "ragged".

    Tokens/s are None if t(N) was not above t(L) in some repeat: then noise is larger than the
    measured time. `share`: of the limit named by `limit`; None for peers, and if that limit was not
    read. `ratio`: to the best peer of the same class of precision. `ratio_any`: to the best of all
    peers. Both are None for peers.
    """

    engine: str
    ours: bool
    precision: str
    pool_dtype: str
    case: str
    what: str
    tokens_per_s: float | None
    best_tokens_per_s: float | None
    repeats_tokens_per_s: list[float | None]
    limit: str | None = None
    share: float | None = None
    ratio: float | None = None
    ratio_any: float | None = None


def make_figures(
    cases: Sequence[Case],
    results: Sequence[EngineResult],
    counts: Mapping[str, Counts],
    readings: Sequence[Limits],
) -> list[Figure]:
    """Figures in the order of cases, then kinds of figures, then engines.

    `readings`: one more than engines; an engine's limit is the better of the readings before and
    after it.
    """
    figures = []
    for case in cases:
        for what in ["ragged"] if case.kind == "ragged" else ["prefill", "decode"]:
            if what == "prefill" and not case.prefills:
                continue
            same = [
                _figure(case, what, result, counts.get(result.name), readings[i : i + 2])
                for i, result in enumerate(results)
                if case.name in result.cases and not result.cases[case.name].error
            ]
            figures += [_compared(figure, same) for figure in same]
    return figures


def _figure(
    case: Case, what: str, result: EngineResult, counts: Counts | None, around: Sequence[Limits]
) -> Figure:
    seconds, tokens = _seconds(case, what, result.cases[case.name])
    rates = [tokens / each if each > 0 else None for each in seconds]
    middle = statistics.median(seconds) if min(seconds) > 0 else 0.0
    limit, share = _share(case, what, middle, counts, around)
    return Figure(
        engine=result.name,
        ours=result.ours,
        precision=result.precision,
        pool_dtype=result.pool_dtype,
        case=case.name,
        what=what,
        tokens_per_s=tokens / middle if middle > 0 else None,
        best_tokens_per_s=max((rate for rate in rates if rate), default=None),
        repeats_tokens_per_s=rates,
        limit=limit,
        share=share,
    )


def _seconds(case: Case, what: str, found: CaseResult) -> tuple[list[float], int]:
    """Seconds of each repeat, and the number of tokens in them (see protocol.py)."""
    if what == "prefill":
        return found.t1_s, sum(case.lengths)
    if what == "ragged":
        return found.tn_s, case.batch * case.new_tokens
    seconds = [tn - tl for tl, tn in zip(found.tl_s, found.tn_s, strict=True)]
    return seconds, case.batch * (case.new_tokens - case.lead)


def _share(
    case: Case, what: str, seconds: float, counts: Counts | None, around: Sequence[Limits]
) -> tuple[str | None, float | None]:
    """Name of the limit, and the share of it (see counts.py); (None, None) for ragged requests."""
    if counts is None or what == "ragged" or seconds <= 0:
        return None, None
    prompt = case.lengths[0]
    if what == "decode":
        steps = case.new_tokens - case.lead
        context = prompt + (case.lead - 1 + case.new_tokens) / 2
        nbytes = counts.decode_bytes(case.batch, context) * steps
        return "read", nbytes / seconds / (max(each.read_gbs for each in around) * 1e9)
    dtype = GEMM_DTYPES.get(counts.precision)
    rates = [rate for each in around if dtype and (rate := each.gflops(dtype))]
    if not rates:
        return None, None
    flops = counts.prefill_flops(case.batch, prompt)
    return f"{dtype} GEMM", flops / seconds / (max(rates) * 1e9)


def _compared(figure: Figure, same: Sequence[Figure]) -> Figure:
    """The figure with its ratios to the best peers; `same`: figures of the same kind."""
    if not figure.ours or not figure.tokens_per_s:
        return figure
    every = {f.precision: 0.0 for f in same if not f.ours and f.tokens_per_s}
    for f in same:
        if f.precision in every and not f.ours and f.tokens_per_s:
            every[f.precision] = max(every[f.precision], f.tokens_per_s)
    mine, best = every.get(figure.precision), max(every.values(), default=None)
    return replace(
        figure,
        ratio=figure.tokens_per_s / mine if mine else None,
        ratio_any=figure.tokens_per_s / best if best else None,
    )
