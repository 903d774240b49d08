"""What a server refuses: the status, and one sentence in OpenAI's form."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.serve.running import Server, frames, refusal

MESSAGES = [{"role": "user", "content": "Hi"}]
NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        ({"prompts": "a"}, "unknown field `prompts`", None),
        ({"max_tokens": "8"}, "Expected `int | null`, got `str`", "max_tokens"),
        ({"max_tokens": True}, "got `bool`", "max_tokens"),
        ({"max_tokens": -1}, "Expected `int` >= 0", "max_tokens"),
        ({"max_tokens": 0}, "expected at least 1 without echo, got 0", "max_tokens"),
        ({"max_tokens": 3000}, "at most 2048 tokens with the output", "max_tokens"),
        ({"prompt": "is " * 3000}, "got 3002 of prompt and 4 of output", "prompt"),
        ({"prompt": ""}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": []}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": [""]}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": ["The", []]}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": [5, "The"]}, "expected token ids alone", "prompt"),
        ({"prompt": [2048]}, "expected token ids in [0, 2048), got 2048", None),
        ({"prompt": {"a": 1}}, "got `object`", "prompt"),
        ({"temperature": -1}, "temperature: expected >= 0 and finite, got -1", "temperature"),
        ({"top_p": 0}, "top_p: expected in (0, 1]", "top_p"),
        ({"n": 0}, "Expected `int` >= 1", "n"),
        ({"n": 128, "prompt": ["a", "b"]}, "at most 128 choices, got 256", "n"),
        ({"seed": -(2**63) - 1}, "seed: expected >= -9223372036854775808", "seed"),
        ({"stop": [""]}, "stop", "stop"),
        ({"stop": ["a"] * 17}, "length <= 16", "stop"),
        ({"min_tokens": 5}, "min_tokens: expected at most max_tokens=4, got 5", "min_tokens"),
        ({"logprobs": 21}, "Expected `int` <= 20", "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected token ids, got 'a'", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "expected in [-100, 100]", "logit_bias[5]"),
        ({"logit_bias": {"2048": 1}}, "expected token ids in [0, 2048), got 2048", None),
        ({"suffix": "end"}, "suffix: expected none", "suffix"),
        ({"best_of": 3}, "best_of: expected n=1, got 3", "best_of"),
        ({"stream_options": {"usage": True}}, "unknown field `usage`", None),
    ],
)
def test_a_completion_that_cannot_be(
    server: Server, fields: dict[str, Any], sentence: str, param: str | None
) -> None:
    answer = server.post("/v1/completions", {"prompt": "The", "max_tokens": 4, **fields})
    assert sentence in refusal(answer, 400)
    if param is not None:
        assert answer.json()["error"]["param"] == param
    assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"messages": []}, "length >= 1"),
        ({"messages": [{}]}, "messages[0].role: expected text"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "got robot"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: expected text"),
        ({"messages": "Hi"}, "Expected `array`, got `str`"),
        ({"max_tokens": 0}, "max_tokens: expected >= 1, got 0"),
        ({"max_completion_tokens": 0, "max_tokens": 4}, "max_tokens: expected >= 1, got 0"),
        ({"logprobs": 3}, "Expected `bool | null`, got `int`"),
        ({"response_format": {"type": "xml"}}, "response_format: expected type text"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"prompt": "The"}, "unknown field `prompt`"),
    ],
)
def test_a_chat_that_cannot_be(server: Server, fields: dict[str, Any], sentence: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert sentence in refusal(answer, 400)
    head, is_said, _ = sentence.partition(":")
    if is_said:
        assert answer.json()["error"]["param"] == head


@pytest.mark.parametrize("stream", [False, True])
def test_streams_are_refused_before_any_header(server: Server, stream: bool) -> None:
    body = {"prompt": [9999], "stream": stream}
    assert "token ids" in refusal(server.post("/v1/completions", body), 400)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "expected JSON"),
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"prompt": "The", "user": NaN}', "expected JSON"),
        (b'{"prompt": "\\ud800"}', "expected JSON"),
        (b'{"prompt": "\\udc00 The"}', "expected JSON"),
        (b'{"prompt": "\xed\xa0\x80"}', "expected JSON"),
        (NESTED.encode(), "Expected `object`, got `array`"),
        (f'{{"prompt": "The", "user": {NESTED}}}'.encode(), "nests less deeply"),
        (b'{"prompt": "The", "seed": ' + b"9" * 10_000 + b"}", "body: "),
        (b'{"prompt": "The", "temperature": 1e400}', "Number out of range"),
        (b'{"max_tokens": 4}', "missing required field `prompt`"),
    ],
)
def test_a_body_that_is_none(server: Server, body: bytes, sentence: str) -> None:
    assert sentence in refusal(server.client.post("/v1/completions", content=body), 400)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large(server: Server, path: str, chunked: bool) -> None:
    body = b'{"prompt": "' + b"a" * (4 << 20) + b'"}'
    content = iter([body[: 1 << 20], body[1 << 20 :]]) if chunked else body
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert "at most 4194304 bytes" in refusal(client.post(path, content=content), 413)


def test_paths_and_methods(server: Server) -> None:
    assert "/v1/nothing" in refusal(server.client.get("/v1/nothing"), 404)
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert "GET" in refusal(server.client.get(path), 405)
    assert "POST" in refusal(server.post("/v1/models", {}), 405)


def test_a_refused_request_harms_no_other_one(server: Server) -> None:
    fields = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
    whole = server.complete("The import", **fields)["choices"][0]["text"]
    body = {"prompt": "The import", "stream": True, **fields}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        for bad in ({"prompt": [9999]}, {"prompt": "The", "top_p": 5}, {"prompt": 5}):
            refusal(server.post("/v1/completions", bad), 400)
        pieces = [frame["choices"][0]["text"] for frame in frames(stream.iter_lines())]
    assert "".join(pieces) == whole


def test_a_grammar_that_fails_behind_its_first_token(server: Server) -> None:
    """llguidance takes 2,000 alternatives at one place; the last sentence is of the client."""
    labels = " | ".join(f'"label {i}"' for i in range(2500))
    asked = {"prompt": "The", "guided_grammar": f'start: ("a" | "b") label\nlabel: {labels}'}
    sentence = "expected a grammar that can be followed, got "
    assert sentence in refusal(server.post("/v1/completions", asked), 400)
    events = server.events("/v1/completions", asked)
    (error,) = [event["error"] for event in events if "error" in event]
    assert sentence in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
