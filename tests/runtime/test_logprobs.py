"""Log-probabilities: those of log_softmax, of tokens and of prompts, whatever their chunks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvgraph
from kvgraph import Engine, RequestError, SamplingParams, Token
from kvgraph.contract.dims import NUM_LOGITS
from kvgraph.errors import KernelError
from kvgraph.ops import native
from kvgraph.runtime import outcome
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.logprobs import TokenLogprobs, score
from tests.runtime.scripted import greedy
from tests.runtime.test_faults import Recalling
from tests.runtime.test_sampling_kernel import long_rows
from tests.support.isa import forced_isa

# -- the kernel


def by_definition(row: Any) -> tuple[Any, Any]:
    """log_softmax of a row, and its ids, likeliest first."""
    exact = np.where(np.isnan(row), -np.inf, row).astype(np.float64)
    shifted = exact - exact.max()
    return shifted - np.log(np.exp(shifted).sum()), np.argsort(-exact, kind="stable")


@given(
    kind=st.sampled_from(["trained", "flat", "ties", "equal", "zeros", "masked", "late", "steep"]),
    vocab=st.sampled_from([1, 7, 100, 2047, 5000, 20003]),
    most=st.lists(st.sampled_from([0, 1, 5, 20]), min_size=1, max_size=4),
    isa=st.sampled_from(["avx2", "avx512"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100)
def test_entries_are_those_of_log_softmax(
    kind: str, vocab: int, most: list[int], isa: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = long_rows(kind, vocab, 2, seed)
    logits[0, rng.integers(vocab)] = np.nan
    logits[:, rng.integers(vocab)] = 1
    before = logits.copy()
    asked = [(int(rng.integers(2)), int(rng.integers(vocab)), each) for each in most]
    with forced_isa(isa):
        found = score(logits, asked)
    for (row, token, count), (chosen, top) in zip(asked, found, strict=True):
        wanted, order = by_definition(logits[row])
        assert (chosen.token_id, order[chosen.rank - 1]) == (token, token)
        assert [each.token_id for each in top] == order[:count].tolist()
        assert [each.rank for each in top] == list(range(1, min(count, vocab) + 1))
        for each in (chosen, *top):
            assert each.logprob == pytest.approx(wanted[each.token_id], abs=1e-5)
    np.testing.assert_array_equal(logits, before)


def test_infinite_logits() -> None:
    logits = np.array([[0, np.inf, np.inf], [-np.inf, np.nan, -np.inf]], np.float32)
    certain, nothing = score(logits, [(0, 0, 3), (1, 2, 1)])
    assert [each.logprob for each in certain.top] == [0, 0, -np.inf]
    assert certain.chosen == (0, -np.inf, 3)
    assert nothing.chosen == (2, -np.inf, 3)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((2, 0, 0), "row: expected 0 to 1, got 2"),
        ((0, 9, 0), "token: expected 0 to 8, got 9"),
        ((0, -1, 0), "token: expected 0 to 8, got -1"),
        ((0, 0, 21), "most: expected 0 to 20, got 21"),
    ],
)
def test_bad_entries(asked: tuple[int, int, int], message: str) -> None:
    with pytest.raises(KernelError, match=f"^{re.escape(f'logprobs: 1: {message}')}$"):
        native.logprobs(np.zeros((2, 9), np.float32), [(0, 0, 0), asked])
    with pytest.raises(KernelError, match=r"^logprobs: expected dense float32 logits .* float64"):
        native.logprobs(np.zeros((2, 9)), [(0, 0, 0)])


# -- in an engine


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


PROMPT = [*range(100, 160)]


def recalling(artifact: Artifact, **options: Any) -> Engine:
    return Engine(artifact, session=Recalling(artifact), **({"num_pages": 40} | options))


def assert_close(found: Any, wanted: Any) -> None:
    """Equal ids and ranks; log-probabilities as close as the kernel's, over equal logits."""
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert isinstance(mine, TokenLogprobs)
        for a, b in zip((mine.chosen, *mine.top), (other.chosen, *other.top), strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert a.logprob == pytest.approx(b.logprob, abs=1e-5)


def test_what_is_not_asked_is_none(artifact: Artifact) -> None:
    done = recalling(artifact).generate([PROMPT])[0]
    assert (done.logprobs, done.prompt_logprobs) == (None, None)


def test_tokens_and_prompt_agree(artifact: Artifact) -> None:
    """What the output says of its tokens is what they get as a prompt; sampling has no part."""
    engine = recalling(artifact)
    shaped = {"temperature": 3.0, "seed": 1, "logit_bias": {7: 100.0}, "presence_penalty": 2.0}
    options: list[dict[str, Any]] = [{}, shaped]
    for fields in options:
        first = engine.generate([PROMPT], greedy(20, logprobs=3, **fields))[0]
        assert first.logprobs is not None
        assert [each.chosen.token_id for each in first.logprobs] == first.token_ids
        assert all(len(each.top) == 3 for each in first.logprobs)
        again = engine.generate([PROMPT + first.token_ids], greedy(1, prompt_logprobs=3))[0]
        assert again.prompt_logprobs is not None
        assert again.prompt_logprobs[0] is None
        assert_close(again.prompt_logprobs[len(PROMPT) :], first.logprobs)


@pytest.mark.parametrize(
    "options", [{}, {"max_batch_tokens": 7}, {"num_pages": 8}, {"max_batch_size": 1}]
)
def test_a_prompt_of_many_chunks_among_others(artifact: Artifact, options: dict[str, Any]) -> None:
    """Few tokens of a step get logits, pages are short, and others have pages of the prompt."""
    wanted = recalling(artifact).generate([PROMPT], greedy(9, prompt_logprobs=0))[0]
    engine = recalling(artifact, **options)
    engine.scheduler.scored_tokens = 5
    steps: list[int] = []
    run = engine.session.run
    engine.session.run = (  # type: ignore[method-assign]
        lambda inputs, *rest, **more: (
            steps.append(len(inputs.logits_indices)) or run(inputs, *rest, **more)
        )
    )
    asks = greedy(9, prompt_logprobs=0)
    plain = greedy(9)
    done = engine.generate([PROMPT, PROMPT, PROMPT, PROMPT], [plain, asks, plain, asks])
    for each in done:
        assert each.token_ids == wanted.token_ids
    assert wanted.prompt_logprobs is not None
    for each in done[1::2]:
        assert each.prompt_logprobs is not None
        assert_close(each.prompt_logprobs[1:], wanted.prompt_logprobs[1:])
    assert max(steps) <= 5 + 4


def test_a_prompt_of_one_token(artifact: Artifact) -> None:
    done = recalling(artifact).generate([[5]], greedy(2, prompt_logprobs=2))[0]
    assert done.prompt_logprobs == [None]


def test_a_step_gives_both(artifact: Artifact) -> None:
    engine = recalling(artifact)
    engine.submit(PROMPT, greedy(2, logprobs=0, prompt_logprobs=1))
    first, second = engine.step()[0], engine.step()[0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == len(PROMPT)
    assert second.prompt_logprobs is None
    assert first.logprobs is not None
    assert second.logprobs is not None
    assert second.logprobs.chosen.token_id == second.token_id
    assert second.logprobs.top == ()


def test_a_graph_that_gives_few_logits(artifact: Artifact) -> None:
    """It was built for one row of logits a request."""

    class Bounded(Recalling):
        limits: ClassVar = {NUM_LOGITS: 8}

    engine = Engine(artifact, session=Bounded(artifact), num_pages=40, max_batch_size=8)
    with pytest.raises(RequestError, match="prompt_logprobs: expected None, as the graph gives"):
        engine.submit(PROMPT, greedy(2, prompt_logprobs=1))
    engine = Engine(artifact, session=Bounded(artifact), num_pages=40, max_batch_size=5)
    assert engine.scheduler.scored_tokens == 3


def test_forced_tokens_come_once_after_steps_that_fail(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each step fails once, when its tokens are drawn and their grammars have taken them."""
    shape = r"(yes|no), because [ab]{2}\. So be it!"
    asked = SamplingParams(max_new_tokens=40, temperature=1, seed=7, logprobs=0, guided_regex=shape)
    engine = recalling(artifact)
    undisturbed = engine.generate([PROMPT], asked)[0]
    assert re.fullmatch(shape, undisturbed.text)
    whole, calls = outcome.tokens_with_logprobs, itertools.count()

    def failing(*args: Any) -> Any:
        if next(calls) % 2 == 0:
            raise MemoryError("injected")
        return whole(*args)

    monkeypatch.setattr(outcome, "tokens_with_logprobs", failing)
    engine.submit(PROMPT, asked)
    told: list[Token] = []
    while engine.busy:
        with suppress(MemoryError):
            told += engine.step()
    assert [token.token_id for token in told] == undisturbed.token_ids
    assert [token.logprobs for token in told] == undisturbed.logprobs
