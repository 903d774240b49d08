"""The sampler's kernel: long rows are decided as if sorted whole, on every instruction set."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraph.errors import KernelError
from kvgraph.ops import native
from kvgraph.runtime.outcome import sample
from kvgraph.runtime.sampling import SamplingParams, TokenSource
from tests.support.isa import forced_isa
from tests.support.sampling import sorted_whole

ISAS = ["avx2", "avx512", "avx512_bf16"]


class Given(TokenSource):
    """A source whose number is given."""

    def __init__(self, params: SamplingParams, number: float) -> None:
        super().__init__(params)
        self.number = number

    def uniform(self) -> float:
        return self.number


def long_rows(kind: str, vocab: int, count: int, seed: int) -> Any:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (count, vocab)).astype(np.float32)
    if kind == "trained":
        for row in logits:
            row[rng.integers(0, vocab, 60)] += rng.exponential(4, 60).astype(np.float32) + 6
    if kind == "ties":
        logits = np.round(logits)
    if kind == "equal":
        logits[:] = logits[0, 0]
    if kind == "zeros":
        logits *= np.where(rng.random(logits.shape) < 0.5, np.float32(0), np.float32(-0.0))
    if kind == "steep":
        logits *= 1e4
    if kind == "masked":
        logits[:, rng.random(vocab) < 0.9] = -np.inf
    if kind == "late":
        logits[:, : vocab // 2] = -np.inf
        logits[:, vocab // 2 :] += np.linspace(-300, 0, vocab - vocab // 2, dtype=np.float32)
    return logits


@given(
    kind=st.sampled_from(["trained", "flat", "ties", "equal", "zeros", "masked", "late"]),
    vocab=st.sampled_from([2047, 3072, 3073, 5000, 9001, 20003]),
    fields=st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.sampled_from([1e-300, 0.01, 0.7, 1.0, 2.0, 60.0, 1e30, 1e300]),
                "top_k": st.sampled_from([0, 1, 5, 127, 128, 129, 1000, 1024, 1025, 10**6]),
                "top_p": st.sampled_from([1.0, 0.999, 0.95, 0.5, 1e-3]),
                "min_p": st.sampled_from([0.0, 0.0, 1e-30, 1e-4, 0.1, 1.0]),
            }
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_long_rows_are_sampled_as_if_sorted_whole(
    kind: str, vocab: int, fields: list[dict[str, Any]], seed: int
) -> None:
    logits = long_rows(kind, vocab, len(fields), seed)
    before = logits.copy()
    numbers = np.random.default_rng(seed).random(len(fields)).tolist()
    draws = [(SamplingParams(**each), u) for each, u in zip(fields, numbers, strict=True)]
    assert sample(logits, [Given(*draw) for draw in draws]) == sorted_whole(logits, draws)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["trained", "ties", "equal", "masked", "late", "steep"])
@pytest.mark.parametrize("vocab", [33, 512, 2051, 20003])
def test_every_instruction_set_draws_the_same(isa: str, kind: str, vocab: int) -> None:
    logits = long_rows(kind, vocab, 24, vocab)
    settings = [{"top_k": 40}, {"top_p": 0.9}, {}, {"temperature": 0.0}]
    params = [SamplingParams(**({"temperature": 0.8} | fields)) for fields in settings] * 4
    params += [replace(p, min_p=0.05) for p in params[:8]]
    numbers = np.random.default_rng(0).random(len(params)).tolist()
    with forced_isa(isa):
        tokens = sample(logits, [Given(*draw) for draw in zip(params, numbers, strict=True)])
    assert tokens[3::4] == logits[3::4].argmax(-1).tolist()
    draws = [(params[i], numbers[i]) for i in range(24) if i % 4 < 3]
    kept = [row for i, row in enumerate(logits) if i % 4 < 3]
    assert [token for i, token in enumerate(tokens) if i % 4 < 3] == sorted_whole(kept, draws)


@pytest.mark.parametrize(
    ("fields", "most"),
    [({"top_k": 50, "top_p": 0.95}, 0), ({"top_p": 0.95}, 8), ({}, 8), ({"top_k": 5000}, 64)],
)
@pytest.mark.parametrize("kind", ["trained", "late"])
def test_rows_with_likely_tokens_are_seldom_ranked_whole(
    kind: str, fields: dict[str, Any], most: int
) -> None:
    logits = long_rows(kind, 32000, 64, 3)
    numbers = np.random.default_rng(3).random(64).tolist()
    draws = [(0.7, fields.get("top_p", 1.0), u, fields.get("top_k", 0), 0.0, 0) for u in numbers]
    _, ranked = native.sample(logits, draws)
    whole = ranked.count(32000)
    assert whole <= most
    assert (fields.get("top_k", 0) > 1024) == (whole == 64)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["trained", "late"])
def test_a_choice_that_rounding_may_decide_is_made_of_the_whole_row(isa: str, kind: str) -> None:
    """Numbers on the very edge between two tokens, where a sum in float32 would be off; and as far
    from it as that sum says it may be."""
    logits = long_rows(kind, 9000, 1, 5)
    order = np.argsort(-logits[0], kind="stable")
    weights = np.exp(logits[0][order].astype(np.float64))
    edges = np.cumsum(weights) / weights.sum()
    params = SamplingParams(temperature=1.0)
    for edge in edges[:20]:
        for number in (edge - 1e-9, edge + 1e-9, edge * (1 - 3e-5), edge * (1 + 3e-5)):
            expected = sorted_whole(logits, [(params, number)])
            with forced_isa(isa):
                assert sample(logits, [Given(params, number)]) == expected


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.9}])
def test_a_nan_is_no_token(isa: str, fields: dict[str, Any]) -> None:
    """Wherever it is: the tokens are those of a row with -Inf there."""
    logits = np.tile(long_rows("trained", 4099, 1, 1), (8, 1))
    logits[range(8), [0, 5, 1023, 1024, 2050, 4096, 4098, logits[0].argmax()]] = np.nan
    params = SamplingParams(**({"temperature": 1.0} | fields))
    sources = [Given(params, number) for number in np.linspace(0, 0.999, 8)]
    with forced_isa(isa):
        tokens = sample(logits, sources)
        assert tokens == [sample(logits[i : i + 1], sources[i : i + 1])[0] for i in range(8)]
        assert tokens == sample(np.where(np.isnan(logits), -np.inf, logits), sources)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1.0, r"row 1: temperature: expected >= 0 and finite, got -1"),
        ("temperature", math.nan, r"row 1: temperature: expected >= 0 and finite, got nan"),
        ("top_p", 0.0, r"row 1: top_p: expected in \(0, 1\], got 0"),
        ("uniform", 1.0, r"row 1: uniform: expected in \[0, 1\), got 1"),
        ("top_k", -2, r"row 1: top_k: expected >= 0, got -2"),
        ("min_p", -0.1, r"row 1: min_p: expected in \[0, 1\], got -0.1"),
        ("min_p", math.nan, r"row 1: min_p: expected in \[0, 1\], got nan"),
    ],
)
def test_bad_draws(field: str, value: float, message: str) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "uniform": 0.5, "top_k": 7}
    fields |= {"min_p": 0.0, "edits": 0}
    draws: Any = [tuple(fields.values()), tuple((fields | {field: value}).values())]
    with pytest.raises(KernelError, match=f"^sample: {message}$"):
        native.sample(np.zeros((2, 9), np.float32), draws)


def test_bad_memory() -> None:
    logits, draws = np.zeros((2, 9), np.float32), [(1.0, 1.0, 0.0, 0, 0.0, 0)] * 2
    with pytest.raises(KernelError, match=r"dense float32 logits \[rows, vocab\], got float64"):
        native.sample(logits.astype(np.float64), draws)
    with pytest.raises(KernelError, match=r"got float32 \(2, 5\) with strides \(36, 8\)"):
        native.sample(logits[:, ::2], draws)
    with pytest.raises(KernelError, match=r"expected draws of 2 rows, got 1"):
        native.sample(logits, draws[:1])
    with pytest.raises(KernelError, match=r"expected a vocabulary of 1 to 2\^31 - 1 .*, got 0"):
        native.sample(logits[:, :0].copy(), draws)
