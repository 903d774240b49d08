"""Each field of a request that says how to sample reaches the engine, under its own name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvgraph import SamplingParams
from kvgraph.errors import RequestError
from kvgraph.runtime.sampling_params import ALIASES
from kvgraph.serve.errors import ServeError
from kvgraph.serve.protocol import CompletionRequest, Sampled
from kvgraph.serve.sampling import COPIED, refusal, sampling_of

GIVEN: dict[str, Any] = {
    "n": 2,
    "temperature": 0.25,
    "top_p": 0.5,
    "seed": 3,
    "stop": ["x"],
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "ignore_eos": True,
    "top_k": 7,
    "min_p": 0.125,
    "min_tokens": 2,
    "repetition_penalty": 1.5,
    "stop_token_ids": [5],
    "include_stop_str_in_output": True,
    "guided_json": '{"type":"object"}',
    "guided_regex": "ab",
    "guided_grammar": 'start: "a"',
}
"""Values that are no default."""


def sampled(of_model: dict[str, Any] | None = None, **given: Any) -> SamplingParams:
    request = CompletionRequest(prompt="a", **given)
    defaults = of_model or {}
    return sampling_of(request, 100, defaults, max_tokens=9, logprobs=None, prompt_logprobs=None)


def test_no_field_is_forgotten() -> None:
    names = {field.name for field in fields(SamplingParams)} | ALIASES.keys()
    shared = names & set(Sampled.__struct_fields__)
    assert shared - {"logit_bias"} == set(COPIED) == GIVEN.keys()  # whose keys are text


@pytest.mark.parametrize("name", GIVEN)
def test_each_field_reaches_the_sampler(name: str) -> None:
    value = tuple(GIVEN[name]) if isinstance(GIVEN[name], list) else GIVEN[name]
    assert value != getattr(sampled(), name)
    assert getattr(sampled(**{name: GIVEN[name]}), name) == value


@pytest.mark.parametrize(
    ("said", "sentence", "param"),
    [
        (
            "request 'r': min_new_tokens: expected at most max_new_tokens=2, got 3",
            "min_tokens: expected at most max_tokens=2, got 3",
            "min_tokens",
        ),
        (
            "messages[0].role: expected text, got 'max_new_tokens', got it",
            "messages[0].role: expected text, got 'max_new_tokens', got it",
            "messages[0].role",
        ),
    ],
)
def test_only_names_of_fields_are_renamed(said: str, sentence: str, param: str) -> None:
    refused = refusal(RequestError(said))
    assert (refused.message, refused.param) == (sentence, param)


def test_a_list_of_prompts_that_are_of_two_kinds() -> None:
    for prompt in ([1, [2, 3]], [1, "a"]):
        with pytest.raises(ServeError) as caught:
            CompletionRequest(prompt=prompt).prompts  # type: ignore[arg-type]  # noqa: B018
        assert caught.value.message == "prompt: expected token ids alone, got other prompts too"


def test_token_ids_of_a_bias_are_numbers() -> None:
    assert sampled(logit_bias={"5": 2.0}).logit_bias == {5: 2.0}


def test_a_request_that_does_not_say_has_openais_temperature() -> None:
    """Unless the model has one of its own."""
    assert sampled().temperature == 1
    assert sampled({"temperature": 0.5}).temperature == 0.5
    assert sampled({"temperature": 0.5}, temperature=2).temperature == 2
