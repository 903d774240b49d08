"""Edits of logits by the kernel: as plain NumPy makes them, in the order of vLLM's sampler."""

from __future__ import annotations

import ctypes
import math
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvgraph
from kvgraph import Engine, SamplingParams, TextContext
from kvgraph.errors import KernelError, RequestError
from kvgraph.ops import native
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.edits import LogitEdits, edits_of
from kvgraph.runtime.outcome import sample
from kvgraph.runtime.sampling import TokenSource
from tests.runtime.scripted import greedy, scripted
from tests.runtime.test_sampling_kernel import Given, long_rows
from tests.support.sampling import chosen, edited, words

VOCAB = 2500


FIELDS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 2.0]),
        "top_k": st.sampled_from([0, 5, 200]),
        "top_p": st.sampled_from([1.0, 0.9]),
        "min_p": st.sampled_from([0.0, 0.05]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 0.5, 1.3, 50.0]),
        "presence_penalty": st.sampled_from([0.0, 0.0, 1.5, -2.0]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.3, -2.0]),
        "min_new_tokens": st.sampled_from([0, 0, 5, 40]),
        "logit_bias": st.one_of(
            st.none(),
            st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32)),
        ),
    }
)


@given(
    kind=st.sampled_from(["trained", "flat", "ties", "masked"]),
    fields=st.lists(FIELDS, min_size=1, max_size=4),
    lengths=st.tuples(st.integers(1, 60), st.integers(0, 60)),
    density=st.sampled_from([None, 0.01, 0.5, 0.99]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150)
def test_rows_are_edited_as_by_definition(
    kind: str,
    fields: list[dict[str, Any]],
    lengths: tuple[int, int],
    density: float | None,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    logits = long_rows(kind, VOCAB, len(fields), seed)
    before = logits.copy()
    sources, draws, rows = [], [], []
    for each, row in zip(fields, logits, strict=True):
        params, number = SamplingParams(**each), float(rng.random())
        likely = rng.choice(np.argsort(-row)[:50], sum(lengths)).tolist()
        prompt, output = likely[: lengths[0]], likely[lengths[0] :]
        ends = rng.choice(VOCAB, 3, replace=False).tolist()
        allowed = None if density is None else rng.random(VOCAB) < density
        source = context_source(params, number, prompt, output, ends)
        assert source.edits is not None
        if allowed is not None:
            source.edits.mask = words(allowed)
        sources.append(source)
        draws.append((params, number))
        rows.append(edited(row, params, prompt, output, ends, allowed))
    wanted = [chosen(row, *draw) for row, draw in zip(rows, draws, strict=True)]
    assert sample(logits, sources) == wanted
    np.testing.assert_array_equal(logits, before)


def context_source(
    params: SamplingParams, number: float, prompt: list[int], output: list[int], ends: Any
) -> Given:
    context = TextContext("r", prompt)
    source = Given(params, number)
    source.edits = LogitEdits(params, context, ends)
    context.update(*output) if output else None
    return source


def drawn(params: SamplingParams, edits: LogitEdits, logits: Any) -> int | None:
    return sample(np.asarray([logits], np.float32), [TokenSource(params, edits)])[0]


def test_what_is_not_used_makes_no_record() -> None:
    context = TextContext("r", [1, 2])
    assert edits_of(SamplingParams(temperature=1, min_p=0.5, logit_bias={}), context, [7]) is None
    assert edits_of(SamplingParams(min_new_tokens=5), context, []) is None


def test_ends_are_allowed_again_and_then_nothing_is_edited() -> None:
    context, params = TextContext("r", [1, 2]), SamplingParams(min_new_tokens=2)
    edits = edits_of(params, context, [2])
    assert edits is not None
    logits, tokens = [0, 1, 5, 2], []
    for _ in range(3):
        tokens.append(drawn(params, edits, logits))
        context.update(3)
    assert tokens == [3, 3, 2]
    assert edits.address() == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_of_which_nothing_is_allowed_has_no_token(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    edits = LogitEdits(params, TextContext("r", [1]))
    edits.mask = np.zeros(1, np.uint32)
    assert drawn(params, edits, [1, 2, 3]) is None
    edits.mask = np.array([4], np.uint32)
    assert drawn(params, edits, [1, 2, 3]) == 2
    edits.mask = None
    assert drawn(SamplingParams(), edits, [1, 2, 3]) == 2


IDS = "expected token ids in [0, 40), got {}"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("banned", [3, 40], "banned: " + IDS.format(40)),
        ("biased", [-1], "biased: " + IDS.format(-1)),
        ("tokens", [8, 7, 100], "tokens: " + IDS.format(100)),
        ("mask", [0], "num_words: expected at least 2, got 1"),
        ("num_prompt", 1, "num_prompt: expected 0 to 0, got 1"),
        ("num_banned", -1, "num_banned: expected >= 0, got -1"),
        ("repetition", 0.0, "repetition: expected > 0 and finite, got 0"),
        ("presence", math.inf, "presence: expected finite, got inf"),
        ("frequency", math.nan, "frequency: expected finite, got nan"),
    ],
)
def test_bad_edits(field: str, value: Any, message: str) -> None:
    edits = native.Edits(repetition=1)
    if isinstance(value, list):
        ids = np.array(value, np.int32)
        setattr(edits, "num_words" if field == "mask" else f"num_{field}", ids.size)
        value = ids.ctypes.data
    setattr(edits, field, value)
    draws = [(0.0, 1.0, 0.0, 0, 0.0, 0), (0.0, 1.0, 0.0, 0, 0.0, ctypes.addressof(edits))]
    with pytest.raises(KernelError, match=f"^{re.escape(f'sample: row 1: {message}')}$"):
        native.sample(np.zeros((2, 40), np.float32), draws)


# -- in an engine


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


def test_a_repeated_text_is_broken_by_penalties(artifact: Artifact) -> None:
    engine = Engine(artifact, num_pages=100)
    prompt = "The import statement"
    options: dict[str, dict[str, float]] = {
        "plain": {},
        "repetition": {"repetition_penalty": 1e9},
        "presence": {"presence_penalty": 2.0},
        "frequency": {"frequency_penalty": 2.0},
    }
    done = engine.generate([prompt] * 4, [greedy(60, **fields) for fields in options.values()])
    most = {
        name: max(Counter(each.token_ids).values())
        for name, each in zip(options, done, strict=True)
    }
    assert len(set(done[1].token_ids)) == 60
    assert not set(done[1].token_ids) & set(engine.tokenize(prompt))
    assert most["frequency"] < most["plain"]
    assert len({tuple(each.token_ids) for each in done}) == 4


def test_a_bias_decides(artifact: Artifact) -> None:
    engine = Engine(artifact, num_pages=100)
    never, always = greedy(8, logit_bias={5: -100}), greedy(8, logit_bias={5: 100})
    other, same = engine.generate([[7, 8], [7, 8]], [never, always])
    assert same.token_ids == [5] * 8
    assert 5 not in other.token_ids


def test_end_tokens_wait_for_the_least_length(artifact: Artifact) -> None:
    engine = scripted(artifact, [0, 1, 1, 1, 1, 1, 1])
    ends = SamplingParams(max_new_tokens=5, min_new_tokens=3)
    done = engine.generate([[0]], ends)[0]
    assert done.token_ids[3:] == [1]
    assert 1 not in done.token_ids[:3]
    assert done.finish_reason == "stop"
    stops = greedy(5, stop_token_ids=(1, 10**6), min_new_tokens=5)
    done = engine.generate([[0]], stops)[0]
    assert len(done.token_ids) == 5
    assert done.finish_reason == "length"


def test_a_request_that_may_say_nothing_ends_alone(artifact: Artifact) -> None:
    engine = scripted(artifact, [0, 5, 6, 7])
    good = engine.submit([0], greedy(3))
    bad = engine.submit([0], greedy(3, presence_penalty=1.0))
    edits = engine._open[bad].source.edits
    assert edits is not None
    edits.mask = np.zeros(-(-engine.model.vocab_size // 32), np.uint32)
    tokens = engine.step()
    while engine.busy:
        tokens += engine.step()
    assert [token.token_id for token in tokens if token.request_id == good] == [5, 6, 7]
    failed = [token.error for token in tokens if token.request_id == bad]
    assert failed == [
        f"request {bad!r}: expected a logit above -inf of a token that may come, "
        "got NaN or -inf for every one"
    ]


def test_a_bias_beyond_the_vocabulary_is_refused_alone(artifact: Artifact) -> None:
    engine = Engine(artifact, num_pages=100)
    good = engine.submit([5, 6], greedy(3))
    vocab = engine.model.vocab_size
    sentence = rf"logit_bias: expected token ids in \[0, {vocab}\), got {vocab}$"
    with pytest.raises(RequestError, match=sentence):
        engine.submit([5, 6], greedy(3, logit_bias={vocab: 1.0}))
    tokens = []
    while engine.busy:
        tokens += engine.step()
    assert [token.request_id for token in tokens] == [good] * 3
