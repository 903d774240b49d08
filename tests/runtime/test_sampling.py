"""Sampling: exact support, frequencies against a plain implementation, seeds, extremes."""

from __future__ import annotations

import copy
import math
import pickle
import re
from collections import Counter
from dataclasses import asdict, dataclass, fields, replace
from inspect import signature
from typing import Any

import numpy as np
import pytest

from kvgraph.errors import RequestError
from kvgraph.runtime.outcome import sample
from kvgraph.runtime.sampling import SamplingParams, TokenSource

PROBABILITIES = (0.05, 0.4, 0.15, 0.25, 0.1, 0.05)
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


@pytest.mark.parametrize("seed", [0, 7, -1, 2**70, None])
def test_a_source_rewinds_to_any_of_its_numbers(seed: int | None) -> None:
    source = TokenSource(SamplingParams(temperature=1, seed=seed))
    numbers = [source.uniform() for _ in range(20)]
    for count in (3, 3, 19, 0, 7):
        source.rewind(count)
        assert source.uniform() == numbers[count]
    if seed is not None:
        plain = np.random.default_rng(seed % (1 << 64) if seed < 0 else seed)
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
        (
            {"seed": -(2**63) - 1},
            r"seed: expected >= -9223372036854775808 or None, got -9223372036854775809",
        ),
        ({"min_p": -0.1}, r"min_p: expected in \[0, 1\], got -0.1"),
        ({"min_p": 1.1}, r"min_p: expected in \[0, 1\], got 1.1"),
        ({"repetition_penalty": 0}, r"repetition_penalty: expected in \[1e-9, 1e9\], got 0.0"),
        (
            {"repetition_penalty": 1e-39},
            r"repetition_penalty: expected in \[1e-9, 1e9\], got 1e-39",
        ),
        ({"presence_penalty": 2.1}, r"presence_penalty: expected in \[-2, 2\], got 2.1"),
        ({"frequency_penalty": math.nan}, r"frequency_penalty: expected in \[-2, 2\], got nan"),
        ({"logit_bias": {3: 101}}, r"logit_bias\[3\]: expected in \[-100, 100\], got 101.0"),
        ({"logit_bias": {3: math.nan}}, r"logit_bias\[3\]: expected in \[-100, 100\], got nan"),
        ({"logit_bias": {-1: 1}}, r"logit_bias: expected >= 0, got -1"),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1)},
            r"logit_bias: expected at most 1024 tokens, got 1025",
        ),
        ({"min_new_tokens": -1}, r"min_new_tokens: expected >= 0, got -1"),
        ({"max_tokens": 0}, r"max_new_tokens: expected >= 1, got 0"),
        (
            {"max_tokens": 3, "min_tokens": 4},
            r"min_new_tokens: expected at most max_new_tokens=3, got 4",
        ),
        (
            {"max_new_tokens": 64, "max_tokens": 64},
            r"max_new_tokens, max_tokens: expected one of the two, got both",
        ),
        (
            {"min_new_tokens": 1, "min_tokens": 1},
            r"min_new_tokens, min_tokens: expected one of the two, got both",
        ),
    ],
)
def test_bad_parameters(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"^{message}$"):
        SamplingParams(**fields)


def test_other_names_of_the_limits() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=2)
    assert params == SamplingParams(max_new_tokens=9, min_new_tokens=2)
    assert replace(params, top_k=3) == SamplingParams(9, top_k=3, min_tokens=2)
    assert pickle.loads(pickle.dumps(params)) == copy.copy(params) == params
    assert hash(params) == hash(SamplingParams(9, min_new_tokens=2, logit_bias={1: 2.0}))
    with pytest.raises(RequestError, match="max_new_tokens, max_tokens: expected one of the two"):
        SamplingParams(9, max_tokens=9)


def test_the_limits_are_read_and_replaced_by_either_name() -> None:
    params = SamplingParams(max_tokens=5, min_new_tokens=1, top_k=3)
    assert (params.max_tokens, params.min_tokens) == (5, 1)
    for changes in ({"max_tokens": 9}, {"max_new_tokens": 9}):
        assert replace(params, **changes) == SamplingParams(9, min_tokens=1, top_k=3)
        assert replace(params, **changes).max_tokens == 9
    both = replace(params, max_tokens=9, min_tokens=2)
    assert (both.max_new_tokens, both.min_new_tokens) == (9, 2)
    assert [each.max_tokens for each in replace(params, n=2, max_tokens=4).each()] == [4, 4]
    assert SamplingParams(**asdict(params)) == params
    with pytest.raises(RequestError, match=r"^max_new_tokens: expected >= 1, got 0$"):
        replace(params, max_tokens=0)


@dataclass(frozen=True, slots=True)
class NamedParams(SamplingParams):
    name: str = ""


def test_a_dataclass_of_a_users_own_has_both_names() -> None:
    params = replace(NamedParams(max_tokens=5, name="a"), max_tokens=9)
    assert (type(params), params.max_tokens, params.name) == (NamedParams, 9, "a")
    with pytest.raises(RequestError, match="min_new_tokens, min_tokens: expected one of the two"):
        NamedParams(min_new_tokens=1, min_tokens=1)


def test_the_signature_has_both_names() -> None:
    names = list(signature(SamplingParams).parameters)
    assert names == [*(each.name for each in fields(SamplingParams)), "max_tokens", "min_tokens"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_token", "; did you mean 'max_tokens'?"),
        ("repetition_penality", "; did you mean 'repetition_penalty'?"),
        ("zzz", ""),
    ],
)
def test_an_unknown_field(name: str, hint: str) -> None:
    message = f"SamplingParams: expected one of its fields, got {name!r}{hint}"
    with pytest.raises(TypeError, match=f"^{re.escape(message)}$"):
        SamplingParams(**{name: 1})


def test_logits_of_other_memory_are_taken_too() -> None:
    logits = np.asfortranarray(np.tile(LOGITS.astype(np.float64), (3, 1)))
    assert sample(logits, [TokenSource(SamplingParams())] * 3) == [1, 1, 1]
