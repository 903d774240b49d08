"""Several completions of one prompt."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime.artifact import Artifact
from tests.runtime.scripted import assert_empty, greedy
from tests.runtime.test_faults import Recalling

PROMPTS = [[*range(100, 140)], "The import statement"]


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture
def engine(artifact: Artifact) -> Engine:
    return Engine(artifact, session=Recalling(artifact), num_pages=100)


def test_one_behind_another_by_prompt(engine: Engine) -> None:
    """Number i of a seeded request is what seed + i gives alone."""
    sampling = SamplingParams(max_new_tokens=6, temperature=1.0, seed=3, n=4)
    done = engine.generate(PROMPTS, sampling)
    assert [each.index for each in done] == [0, 1, 2, 3] * 2
    assert len({each.request_id for each in done}) == 8
    alone = [
        engine.generate([prompt], SamplingParams(max_new_tokens=6, temperature=1.0, seed=seed))[0]
        for prompt in PROMPTS
        for seed in (3, 4, 5, 6)
    ]
    assert [each.token_ids for each in done] == [each.token_ids for each in alone]
    assert len({tuple(each.token_ids) for each in done}) == 8
    assert_empty(engine)


def test_without_a_seed_they_differ(engine: Engine) -> None:
    done = engine.generate(PROMPTS[:1], SamplingParams(max_new_tokens=8, temperature=2.0, n=3))
    assert len({tuple(each.token_ids) for each in done}) == 3


def test_each_prompt_has_its_own_number(engine: Engine) -> None:
    done = engine.generate([iter([5, 6]), [7]], [greedy(2, n=3), greedy(2)])  # type: ignore[list-item]
    assert [each.index for each in done] == [0, 1, 2, 0]
    assert done[0].token_ids == done[1].token_ids == done[2].token_ids


@pytest.mark.parametrize("scores", [{}, {"prompt_logprobs": 0}])
def test_they_share_the_pages_of_the_prompt(engine: Engine, scores: dict[str, int]) -> None:
    """But for the one that asks about it, whose pages are its own."""
    steps: list[int] = []
    run = engine.session.run
    engine.session.run = lambda inputs, *rest, **more: (  # type: ignore[method-assign]
        steps.append(len(inputs.tokens)) or run(inputs, *rest, **more)
    )
    prompt = [*range(100, 165)]
    engine.generate([prompt], greedy(1, n=5, **scores))
    page = engine.artifact.params().page_size
    computed = 1 + len(scores)
    assert sum(steps) == computed * len(prompt) + (5 - computed) * (1 + (len(prompt) - 1) % page)


def test_all_know_about_the_prompt(engine: Engine) -> None:
    done = engine.generate(PROMPTS[:1], greedy(2, n=3, prompt_logprobs=1))
    plain = engine.generate(PROMPTS[:1], greedy(2, prompt_logprobs=1))[0]
    assert plain.prompt_logprobs is not None
    assert all(each.prompt_logprobs == plain.prompt_logprobs for each in done)


def test_a_stream_and_a_chat_are_one_completion(engine: Engine) -> None:
    with pytest.raises(RequestError, match=r"^n: expected 1 of a single request, got 2; use"):
        next(engine.stream([5], greedy(2, n=2)))
    with pytest.raises(RequestError, match=r"^n: expected 1 of a single request, got 3; use"):
        engine.chat([{"role": "user", "content": "Hello"}], greedy(2, n=3))
    assert not engine.busy
