"""Sampling: exact support, frequencies against a plain implementation, seeds, extremes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraph.errors import KernelError, RequestError
from kvgraph.ops import native
from kvgraph.runtime.sampling import SamplingParams, TokenSource, sample
from tests.support.isa import forced_isa

PROBABILITIES = (0.05, 0.4, 0.15, 0.25, 0.1, 0.05)
ISAS = ["avx2", "avx512", "avx512_bf16"]
LOGITS = np.log(np.array(PROBABILITIES, np.float32)) + 3


def draw(logits: Any, count: int, **fields: Any) -> Counter[int]:
    """Tokens of `count` draws of one source, over `logits [vocab]`."""
    source = TokenSource(SamplingParams(**({"temperature": 1.0, "seed": 1} | fields)))
    rows = np.tile(np.asarray(logits, np.float32), (count, 1))
    return Counter(sample(rows, [source] * count))


def plain_probabilities(temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token -> probability, one token at a time: temperature, then top-k, then top-p."""
    weights = [math.exp(math.log(p) / temperature) for p in PROBABILITIES]
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    order = order[: top_k or None]
    total = sum(weights[token] for token in order)
    kept: dict[int, float] = {}
    mass = 0.0
    for token in order:
        if mass >= top_p * total:
            break
        kept[token] = weights[token]
        mass += weights[token]
    return {token: weight / mass for token, weight in kept.items()}


# -- greedy


def test_greedy_is_argmax_and_ties_go_to_the_lowest_id() -> None:
    logits = np.random.default_rng(0).normal(size=(50, 300)).astype(np.float32)
    logits[7] = 0
    logits[8, [20, 30]] = 9
    before = logits.copy()
    tokens = sample(logits, [TokenSource(SamplingParams()) for _ in logits])
    assert tokens == logits.argmax(-1).tolist()
    assert tokens[7:9] == [0, 20]
    assert all(type(token) is int for token in tokens)
    np.testing.assert_array_equal(logits, before)


def test_greedy_ignores_the_other_parameters() -> None:
    params = SamplingParams(temperature=0, top_k=3, top_p=0.2, seed=4)
    assert sample(LOGITS[None], [TokenSource(params)]) == [1]


def test_no_rows() -> None:
    assert sample(np.empty((0, 5), np.float32), []) == []


# -- what is kept, and how often


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-9, {1}),
        (0.39, {1}),
        (0.41, {1, 3}),
        (0.64, {1, 3}),
        (0.66, {1, 2, 3}),
        (0.89, {1, 2, 3, 4}),
        (0.91, {0, 1, 2, 3, 4}),
        (0.96, {0, 1, 2, 3, 4, 5}),
        (1.0, {0, 1, 2, 3, 4, 5}),
    ],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p: float, kept: set[int]) -> None:
    assert set(draw(LOGITS, 2000, top_p=top_p)) == kept


def test_top_p_reached_exactly_keeps_no_more() -> None:
    """Powers of two have no rounding: a half and a quarter reach 0.75."""
    logits = np.log(np.array([0.25, 0.5, 0.125, 0.125]))
    assert set(draw(logits, 500, top_p=0.5)) == {1}
    assert set(draw(logits, 500, top_p=0.75)) == {0, 1}


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, {1}), (2, {1, 3}), (5, {0, 1, 2, 3, 4}), (6, set(range(6)))]
)
def test_top_k_keeps_k_and_ties_go_to_the_lowest_id(top_k: int, kept: set[int]) -> None:
    assert set(draw(LOGITS, 2000, top_k=top_k)) == kept


@pytest.mark.parametrize("top_k", [0, 6, 7, 10**9])
def test_top_k_zero_or_beyond_the_vocabulary_keeps_all(top_k: int) -> None:
    assert draw(LOGITS, 3000, top_k=top_k) == draw(LOGITS, 3000)


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, {1}), (0.61, {1}), (0.62, {1, 3})])
def test_top_p_is_a_share_of_what_top_k_kept(top_p: float, kept: set[int]) -> None:
    """Of the best two, the first has 0.4 / 0.65 = 0.615."""
    assert set(draw(LOGITS, 1000, top_k=2, top_p=top_p)) == kept


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (3.0, 0, 1.0), (1.0, 3, 1.0), (1.0, 0, 0.7), (2.0, 4, 0.8)],
)
def test_frequencies_follow_the_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    """Pearson's chi-square with at most 5 degrees of freedom: 25 is exceeded once in 7000 seeds."""
    count = 20000
    expected = plain_probabilities(temperature, top_k, top_p)
    found = draw(LOGITS, count, temperature=temperature, top_k=top_k, top_p=top_p)
    assert set(found) == set(expected)
    chi_square = sum((found[token] - count * p) ** 2 / (count * p) for token, p in expected.items())
    assert chi_square < 25


# -- seeds


def test_a_seed_repeats_and_another_does_not() -> None:
    def tokens(seed: int | None) -> list[int]:
        source = TokenSource(SamplingParams(temperature=1, seed=seed))
        return [sample(LOGITS[None], [source])[0] for _ in range(40)]

    assert tokens(3) == tokens(3)
    assert tokens(3) != tokens(4)
    assert tokens(0) != tokens(None) != tokens(None)


@pytest.mark.parametrize("seed", [0, 7, 2**70, None])
def test_a_source_rewinds_to_any_of_its_numbers(seed: int | None) -> None:
    source = TokenSource(SamplingParams(temperature=1, seed=seed))
    numbers = [source.uniform() for _ in range(20)]
    for count in (3, 3, 19, 0, 7):
        source.rewind(count)
        assert source.uniform() == numbers[count]
    if seed is not None:
        plain = np.random.default_rng(seed)
        assert numbers == [plain.random() for _ in range(20)]


def test_tokens_of_a_seed_do_not_depend_on_the_batch() -> None:
    """Alone, and between rows of other parameters that come and go."""
    logits = np.random.default_rng(5).normal(size=(30, 40)).astype(np.float32)
    params = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, seed=11)
    others = [
        SamplingParams(temperature=2, seed=1),
        SamplingParams(),
        SamplingParams(temperature=0.1, top_k=1, seed=2),
    ]
    source = TokenSource(params)
    alone = [sample(row[None], [source])[0] for row in logits]
    source = TokenSource(params)
    together = []
    for i, row in enumerate(logits):
        position = i % 4
        sources = [TokenSource(other) for other in others[: max(position, i % 3)]]
        sources.insert(position, source)
        at = sources.index(source)
        batch = np.random.default_rng(i).normal(size=(len(sources), 40)).astype(np.float32)
        batch[at] = row
        together.append(sample(batch, sources)[at])
    assert together == alone
    assert len(set(alone)) > 5


def test_each_row_has_its_own_parameters() -> None:
    cold = SamplingParams(temperature=1e-3, seed=0)
    narrow = SamplingParams(temperature=9, top_k=2, seed=0)
    greedy = SamplingParams()
    rows = 60
    for i, token in enumerate(
        sample(
            np.tile(LOGITS, (3 * rows, 1)),
            [TokenSource(params) for _ in range(rows) for params in (cold, narrow, greedy)],
        )
    ):
        assert token in ({1}, {1, 3}, {1})[i % 3]


# -- extremes: no NaN, no warning (warnings are errors here)

BIG = 1e30


@pytest.mark.parametrize("temperature", [1e-300, 1e-3, 1.0, 1e30])
@pytest.mark.parametrize(
    ("logits", "possible"),
    [
        ([BIG, -BIG, 0], {0}),
        ([-BIG, -BIG, -BIG], {0, 1, 2}),
        ([BIG, BIG, -np.inf], {0, 1}),
        ([-np.inf, 0, -np.inf], {1}),
        ([-np.inf, -BIG, -BIG], {1, 2}),
        ([3.4e38, -3.4e38, -np.inf], {0}),
    ],
)
@pytest.mark.parametrize("limits", [{}, {"top_k": 2}, {"top_p": 0.9}, {"top_k": 2, "top_p": 0.01}])
def test_extreme_logits(
    temperature: float, logits: list[float], possible: set[int], limits: dict[str, Any]
) -> None:
    found = set(draw(logits, 50, temperature=temperature, **limits))
    if temperature == BIG and logits[0] in (BIG, 3.4e38):
        possible = {i for i, logit in enumerate(logits) if logit > -np.inf}  # a ratio of e or so
    assert found <= possible


def test_a_token_of_no_probability_is_never_drawn() -> None:
    """Even by the largest number below 1."""

    class Last(TokenSource):
        def uniform(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    logits = np.array([[0, -np.inf, 0.1, -np.inf], [0, -BIG, 0.1, -np.inf]], np.float32)
    sources = [Last(SamplingParams(temperature=1)) for _ in logits]
    assert sample(logits, sources) == [0, 0]


# -- long rows: a head decides as the whole row does


def sorted_whole(logits_RV: Any, draws: list[tuple[SamplingParams, float]]) -> list[int]:
    """The definition: every row sorted, weighed and summed whole, in float64."""
    chosen = []
    for row, (params, uniform) in zip(logits_RV, draws, strict=True):
        order = np.argsort(-row, kind="stable")
        scaled = row[order].astype(np.float64) / max(params.temperature, 1e-30)
        weights = np.exp(scaled - scaled[0])
        weights[params.top_k or len(row) :] = 0
        reached = np.cumsum(weights)
        before = np.concatenate([[0], reached[:-1]])
        weights[(before >= params.top_p * reached[-1]) & (np.arange(len(row)) > 0)] = 0
        total = np.cumsum(weights)
        rank = int((total <= uniform * total[-1]).sum())
        chosen.append(int(order[min(rank, int((weights > 0).sum()) - 1)]))
    return chosen


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
            }
        ),
        min_size=1,
        max_size=5,
    ),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
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
    params = [SamplingParams(**({"temperature": 0.8} | fields)) for fields in settings] * 6
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
    draws = [(0.7, fields.get("top_p", 1.0), u, fields.get("top_k", 0)) for u in numbers]
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


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {}, {"top_k": 40}, {"top_p": 0.9}])
@pytest.mark.parametrize(
    ("others", "here", "token"),
    [
        (np.nan, np.nan, None),
        (np.nan, -np.inf, None),
        (-np.inf, -np.inf, None),
        (0, np.inf, 70),
        (np.nan, 1, 70),
    ],
)
def test_a_broken_models_logits_give_a_token_where_any_is_a_number(
    others: float, here: float, token: int | None, fields: dict[str, Any]
) -> None:
    logits = np.full((2, 5000), others, np.float32)
    logits[:, 70] = here
    params = SamplingParams(**({"temperature": 1, "seed": 0} | fields))
    assert sample(logits, [TokenSource(params), TokenSource(params)]) == [token, token]
    assert sample(logits[:1], [TokenSource(params)]) == [token]


def test_no_more_than_a_vocabulary_is_kept() -> None:
    params = SamplingParams(temperature=1, top_k=10**30, seed=0)
    assert 0 <= sample(LOGITS[None], [TokenSource(params)])[0] < len(LOGITS)


# -- bad parameters


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, r"max_new_tokens: expected >= 1, got 0"),
        ({"max_new_tokens": -3}, r"max_new_tokens: expected >= 1, got -3"),
        ({"temperature": -0.5}, r"temperature: expected .*>= 0.*, got -0.5"),
        ({"temperature": math.nan}, r"temperature: expected .*>= 0.*, got nan"),
        ({"temperature": math.inf}, r"temperature: expected .*finite.*, got inf"),
        ({"top_k": -1}, r"top_k: expected >= 0, got -1"),
        ({"top_p": 0.0}, r"top_p: expected in \(0, 1\], got 0.0"),
        ({"top_p": 1.01}, r"top_p: expected in \(0, 1\], got 1.01"),
        ({"top_p": math.nan}, r"top_p: expected in \(0, 1\], got nan"),
        ({"seed": -1}, r"seed: expected >= 0 or None, got -1"),
    ],
)
def test_bad_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", -1.0, r"row 1: temperature: expected >= 0 and finite, got -1"),
        ("temperature", math.nan, r"row 1: temperature: expected >= 0 and finite, got nan"),
        ("top_p", 0.0, r"row 1: top_p: expected in \(0, 1\], got 0"),
        ("uniform", 1.0, r"row 1: uniform: expected in \[0, 1\), got 1"),
        ("top_k", -2, r"row 1: top_k: expected >= 0, got -2"),
    ],
)
def test_bad_draws(field: str, value: float, message: str) -> None:
    fields = {"temperature": 1.0, "top_p": 0.9, "uniform": 0.5, "top_k": 7}
    draws = [tuple(fields.values()), tuple((fields | {field: value}).values())]
    with pytest.raises(KernelError, match=f"^sample: {message}$"):
        native.sample(np.zeros((2, 9), np.float32), draws)


def test_bad_memory() -> None:
    logits, draws = np.zeros((2, 9), np.float32), [(1.0, 1.0, 0.0, 0)] * 2
    with pytest.raises(KernelError, match=r"dense float32 logits \[rows, vocab\], got float64"):
        native.sample(logits.astype(np.float64), draws)
    with pytest.raises(KernelError, match=r"got float32 \(2, 5\) with strides \(36, 8\)"):
        native.sample(logits[:, ::2], draws)
    with pytest.raises(KernelError, match=r"expected draws of 2 rows, got 1"):
        native.sample(logits, draws[:1])
    with pytest.raises(KernelError, match=r"expected a vocabulary of 1 to 2\^31 - 1 .*, got 0"):
        native.sample(logits[:, :0].copy(), draws)


def test_logits_of_other_memory_are_taken_too() -> None:
    logits = np.asfortranarray(np.tile(LOGITS.astype(np.float64), (3, 1)))
    assert sample(logits, [TokenSource(SamplingParams())] * 3) == [1, 1, 1]
