"""The sampler by itself: `python -m benchmarks.sampling [--rows 64] [--vocab 32000] [--json]`.

Method: rows of logits like a trained model's (normal, and a hundred likely tokens), each of a
request with a prompt of 512 and an output of 4,096 tokens. Each setting is run on all rows, with
Python's part of it; settings take turns, and figures are the median and the 90th percentile of the
rounds. NumPy's time is that of the tests' definition, on one row, times the rows; its token of that
row has to be the kernel's. Shares are of a step of 40 ms. The goal: all penalties add at most
5 % of it to what temperature takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np

from kvgraph.kv.requests import TextContext
from kvgraph.runtime.edits import LogitEdits, edits_of
from kvgraph.runtime.logprobs import score
from kvgraph.runtime.outcome import sample
from kvgraph.runtime.sampling import SamplingParams, TokenSource
from tests.support.sampling import chosen, edited, words

PROMPT, OUTPUT, ROUNDS, LIKELY = 512, 4096, 25, 100
STEP, GOAL = 0.040, 0.05
WARM: dict[str, Any] = {"temperature": 0.8, "seed": 1}
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.2,
}
BIAS: dict[str, Any] = {"logit_bias": {31 * i: 1.0 for i in range(1024)}}
LEAST: dict[str, Any] = {"min_new_tokens": 8192, "max_new_tokens": 8192}
TOP: dict[str, Any] = {"top_k": 50, "top_p": 0.95, "min_p": 0.02}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy, all penalties": PENALTIES,
    "temperature": WARM,
    "min_p": WARM | {"min_p": 0.02},
    "top_k, top_p, min_p": WARM | TOP,
    "repetition": WARM | {"repetition_penalty": 1.1},
    "presence": WARM | {"presence_penalty": 0.5},
    "frequency": WARM | {"frequency_penalty": 0.2},
    "all penalties": WARM | PENALTIES,
    "1,024 biases": WARM | BIAS,
    "min_new_tokens": WARM | LEAST,
    "mask, 1 % allowed": WARM,
    "mask, 99 % allowed": WARM,
    "all of these": WARM | TOP | PENALTIES | BIAS | LEAST,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    figures = measure(args.rows, args.vocab)
    print(json.dumps(figures, indent=2) if args.json else f"{__doc__.strip()}\n\n{table(figures)}")


def measure(rows: int, vocab: int) -> dict[str, dict[str, float]]:
    """Setting -> milliseconds of all rows."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, (rows, vocab)).astype(np.float32)
    for row in logits:
        row[rng.integers(0, vocab, LIKELY)] += rng.exponential(4, LIKELY).astype(np.float32) + 6
    texts = [np.minimum(rng.zipf(1.3, PROMPT + OUTPUT), vocab) - 1 for _ in range(rows)]
    calls: dict[str, Callable[[], Any]] = {}
    numpy_ms: dict[str, float] = {}
    for name, fields in SETTINGS.items():
        sources = [source_of(name, fields, text, vocab, rng) for text in texts]
        numpy_ms[name] = 1e3 * rows * checked(logits[0], sources[0], texts[0])
        calls[name] = lambda sources=sources: sample(logits, sources)
    for most in (0, 20):
        asked = [(row, int(logits[row].argmax()), most) for row in range(rows)]
        calls[f"logprobs={most}, in addition"] = lambda asked=asked: score(logits, asked)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            start = perf_counter()
            call()
            seconds[name].append(perf_counter() - start)
    return {
        name: {
            "median_ms": 1e3 * statistics.median(times),
            "p90_ms": 1e3 * statistics.quantiles(times, n=10)[-1],
            "share_of_step": statistics.median(times) / STEP,
            **({"numpy_ms": numpy_ms[name]} if name in numpy_ms else {}),
        }
        for name, times in seconds.items()
    }


def source_of(name: str, fields: dict[str, Any], text: Any, vocab: int, rng: Any) -> TokenSource:
    params = SamplingParams(**fields)
    context = TextContext(name, text[:PROMPT])
    source = TokenSource(params, edits_of(params, context, [1, 2]))
    allowed = {"mask, 1 % allowed": 0.01, "mask, 99 % allowed": 0.99, "all of these": 0.99}
    if name in allowed:
        source.edits = source.edits or LogitEdits(params, context)
        source.edits.mask = words(rng.random(vocab) < allowed[name])
    context.update(*text[PROMPT:].tolist())
    return source


def checked(row: Any, source: TokenSource, text: Any) -> float:
    """Seconds of the definition on a row, whose token has to be the kernel's."""
    mask = source.edits.mask if source.edits else None
    allowed = None
    if mask is not None:
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(row)].astype(bool)
    number = TokenSource(source.params).uniform()
    start = perf_counter()
    prompt, output = text[:PROMPT].tolist(), text[PROMPT:].tolist()
    changed = edited(row, source.params, prompt, output, [1, 2], allowed)
    wanted = chosen(changed, source.params, number)
    seconds = perf_counter() - start
    source.rewind(0)
    assert sample(row[None], [source]) == [wanted]
    source.rewind(0)
    return seconds


def table(figures: dict[str, dict[str, float]]) -> str:
    lines = [f"{'setting':24}{'ms':>8}{'p90':>8}{'of 40 ms':>10}{'NumPy, ms':>11}"]
    for name, row in figures.items():
        plain = f"{row['numpy_ms']:11.0f}" if "numpy_ms" in row else ""
        lines.append(
            f"{name:24}{row['median_ms']:8.2f}{row['p90_ms']:8.2f}"
            f"{100 * row['share_of_step']:9.1f}%{plain}"
        )
    added = figures["all penalties"]["median_ms"] - figures["temperature"]["median_ms"]
    share = added / 1e3 / STEP
    verdict = "reached" if share <= GOAL else "missed"
    lines.append(f"all penalties add {added:.2f} ms, {100 * share:.1f} %: goal {verdict}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
