"""What a server refuses: the status, and one sentence in OpenAI's form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import msgspec
import pytest

from kvgraph.serve.items import ResponseRequest
from kvgraph.serve.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.serve.running import Server, answered, frames, refusal

MESSAGES = [{"role": "user", "content": "Hi"}]
NESTED = "[" * 100_000 + "]" * 100_000
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        ({"prompts": "a"}, "unknown field `prompts`", None),
        ({"max_tokens": "8"}, "Expected `int | null`, got `str`", "max_tokens"),
        ({"max_tokens": True}, "got `bool`", "max_tokens"),
        ({"max_tokens": 1.5}, "Expected `int | null`, got `float`", "max_tokens"),
        ({"max_tokens": 0.0}, "expected at least 1 without echo, got 0", "max_tokens"),
        ({"prompt": 5.0}, "got `int`", "prompt"),
        ({"prompt": [5, 1.25]}, "got `float`", "prompt"),
        ({"max_tokens": -1}, "Expected `int` >= 0", "max_tokens"),
        ({"max_tokens": 0}, "expected at least 1 without echo, got 0", "max_tokens"),
        ({"max_tokens": 3000}, "at most 2048 tokens of prompt and output", "max_tokens"),
        ({"prompt": "is " * 3000}, "got 3002 of prompt and 4 of output", "prompt"),
        ({"prompt": ""}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": []}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": [""]}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": ["The", []]}, "expected a prompt, got an empty one", "prompt"),
        ({"prompt": [5, "The"]}, "expected token ids alone", "prompt"),
        ({"prompt": [2048]}, "prompt: expected token ids in [0, 2048), got 2048", "prompt"),
        ({"prompt": [2048], "echo": True}, "prompt: expected token ids in [0, 2048)", "prompt"),
        ({"prompt": "a" * 400_000}, "got a text of at least 4302", "prompt"),
        (
            {"prompt": [5] * 2048, "max_tokens": 0, "echo": True},
            "got 2048 of prompt, and an echo alone computes one of output too",
            "prompt",
        ),
        ({"prompt": {"a": 1}}, "got `object`", "prompt"),
        ({"temperature": -1}, "temperature: expected >= 0 and finite, got -1", "temperature"),
        ({"top_p": 0}, "top_p: expected in (0, 1]", "top_p"),
        ({"n": 0}, "Expected `int` >= 1", "n"),
        ({"n": 128, "prompt": ["a", "b"]}, "at most 128 choices, got 256", "n"),
        ({"seed": -(2**63) - 1}, "seed: expected >= -9223372036854775808", "seed"),
        ({"stop": [""]}, "stop", "stop"),
        ({"stop": ["a"] * 17}, "length <= 16", "stop"),
        ({"stop": ["a", "b" * 4096]}, "at most 4096 characters together, got 4097", "stop"),
        ({"stop_token_ids": [5] * 1025}, "length <= 1024", "stop_token_ids"),
        ({"min_tokens": 5}, "min_tokens: expected at most max_tokens=4, got 5", "min_tokens"),
        ({"logprobs": 21}, "Expected `int` <= 20", "logprobs"),
        ({"logit_bias": {"a": 1}}, "logit_bias: expected token ids, got 'a'", "logit_bias"),
        ({"logit_bias": {"5": 101}}, "expected in [-100, 100]", "logit_bias[5]"),
        ({"logit_bias": {"2048": 1}}, "expected token ids in [0, 2048), got 2048", "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "length <= 1024", "logit_bias"),
        ({"suffix": "end"}, "suffix: expected none", "suffix"),
        ({"best_of": 3}, "best_of: expected n=1, got 3", "best_of"),
        ({"stream_options": {"usage": True}}, "unknown field `usage`", None),
        (
            {"n": 64, "max_tokens": 2000, "logprobs": 20},
            "at most 2097152 tokens and log-probabilities in all choices, got 2816000 in 128000 ",
            None,
        ),
        (
            {"prompt": ["is " * 1000] * 100, "echo": True, "logprobs": 20},
            "log-probabilities in all choices, got 2213200 in 100600 ",
            None,
        ),
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
        ({"max_completion_tokens": 0, "max_tokens": 4}, "max_completion_tokens: expected >= 1"),
        ({"logprobs": 3}, "Expected `bool | null`, got `int`"),
        ({"response_format": {"type": "xml"}}, "response_format: expected type text"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"top_logprobs": 2}, "top_logprobs: expected logprobs: true next to it, got none"),
        (
            {"top_logprobs": 2, "logprobs": False},
            "top_logprobs: expected logprobs: true next to it, got false",
        ),
        ({"modalities": ["text", "audio"]}, "modalities: expected text alone, got 'audio'"),
        ({"modalities": "audio"}, "Expected `array | null`, got `str`"),
        ({"reasoning_effort": 3}, "Expected `str | null`, got `int`"),
        ({"prompt": "The"}, "unknown field `prompt`"),
        ({"functions": []}, "got `array` - at `$.functions`; `tools` is its newer name"),
        ({"function_call": "auto"}, "`tool_choice` is its newer name"),
        ({"audio": {"voice": "x"}}, "Expected `null`, got `object` - at `$.audio`"),
        ({"moderation": {}}, "Expected `null`, got `object` - at `$.moderation`"),
        ({"web_search_options": {}}, "got `object` - at `$.web_search_options`"),
        ({"skip_special_tokens": False}, "skip_special_tokens: expected true, got False"),
        ({"add_special_tokens": True}, "add_special_tokens: expected false, got True"),
        ({"use_beam_search": True}, "use_beam_search: expected false, got True"),
        ({"length_penalty": "x"}, "length_penalty: expected 1.0, got 'x'"),
        ({"truncate_prompt_tokens": 4}, "got `int` - at `$.truncate_prompt_tokens`"),
    ],
)
def test_a_chat_that_cannot_be(server: Server, fields: dict[str, Any], sentence: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert sentence in refusal(answer, 400)
    assert answer.json()["error"]["code"] is None
    head, is_said, _ = sentence.partition(":")
    if is_said:
        assert answer.json()["error"]["param"] == head


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXTS, {"prompt": "is " * 3000}, "prompt"),
        (TEXTS, {"prompt": "The", "max_tokens": 3000}, "max_tokens"),
        (CHATS, {"messages": [{"role": "user", "content": "is " * 3000}]}, "messages"),
        (CHATS, {"messages": [{"role": "user", "content": "is " * 90_000}]}, "messages"),
        (CHATS, {"messages": MESSAGES, "max_tokens": 3000}, "max_tokens"),
        (
            CHATS,
            {"messages": MESSAGES, "max_completion_tokens": 3000, "max_tokens": 4},
            "max_completion_tokens",
        ),
    ],
)
def test_what_is_longer_than_the_context_has_a_code(
    server: Server, path: str, fields: dict[str, Any], param: str
) -> None:
    answer = server.post(path, fields)
    sentence = refusal(answer, 400)
    assert sentence.startswith(f"{param}: expected at most 2048 tokens")
    assert "maximum context length" in sentence
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_fields_without_effect(server: Server) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    more = {"parallel_tool_calls": False, "verbosity": "low", "modalities": ["text"]}
    whole = body | more | {"top_logprobs": 0, "reasoning_effort": "low"}
    one, other = [answered(server.post("/v1/chat/completions", each)) for each in (body, whole)]
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(("path", "adds"), [(TEXTS, True), (CHATS, False)])
def test_vllms_fields_that_change_nothing(server: Server, path: str, adds: bool) -> None:
    body = {"messages": MESSAGES} if path == CHATS else {"prompt": "The"}
    plain = {"skip_special_tokens": True, "spaces_between_special_tokens": True}
    plain |= {"use_beam_search": False, "length_penalty": 1, "add_special_tokens": adds}
    taken = {"priority": 3, "request_id": "a", "guided_decoding_backend": "guidance"}
    body |= {"max_tokens": 8, "temperature": 0}
    one, other = [answered(server.post(path, each)) for each in (body, body | plain | taken)]
    assert one["choices"] == other["choices"]


@pytest.mark.parametrize(
    ("path", "kind", "needed"),
    [
        (TEXTS, CompletionRequest, {"prompt": "a"}),
        (CHATS, ChatRequest, {"messages": MESSAGES}),
        ("/v1/responses", ResponseRequest, {"input": "Hi"}),
        ("/tokenize", TokenizeRequest, {"prompt": "a"}),
        ("/tokenize", TokenizeRequest, {"messages": MESSAGES}),
        ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
    ],
)
def test_null_is_as_absent(
    server: Server, path: str, kind: type[msgspec.Struct], needed: dict[str, Any]
) -> None:
    body = dict.fromkeys(kind.__struct_fields__) | needed
    answer = answered(server.post(path, body))
    if path == "/tokenize":
        assert answer == answered(server.post(path, needed))


@pytest.mark.parametrize("stream", [False, True])
def test_streams_are_refused_before_any_header(server: Server, stream: bool) -> None:
    body = {"prompt": [9999], "stream": stream}
    assert "token ids" in refusal(server.post("/v1/completions", body), 400)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (b"", "expected JSON, got an empty body"),
        (b"{", "expected JSON"),
        (b"\xff\xfe", "expected JSON"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"prompt": "The", "user": NaN}', "expected JSON"),
        (b'{"prompt": "\\ud800"}', "expected text in Unicode, got half of a surrogate pair"),
        (b'{"prompt": "\\udc00 The"}', "got half of a surrogate pair"),
        (b'{"prompt": "\\\\\\ud83d\\n"}', "got half of a surrogate pair"),
        (b'{"prompt": "\\\\ud800"', "expected JSON, got what is none"),
        (b'{"prompt": "\\ud83d\\ude42"', "expected JSON, got what is none"),
        (b'{"prompt": "\xed\xa0\x80"}', "expected JSON"),
        (NESTED.encode(), "Expected `object`, got `array`"),
        (f'{{"prompt": "The", "user": {NESTED}}}'.encode(), "nests less deeply"),
        (b'{"prompt": "The", "max_tokens": 1.0,', "expected JSON, got what is none"),
        (b'{"prompt": "The", "max_tokens": 1.0} x', "expected JSON, got what is none"),
        (f'{{"max_tokens": 1.0, "prompt": "The", "user": {NESTED}}}'.encode(), "nests less"),
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
    for path in ("/v1/nothing", "/v1/embeddings", "/" + "v1/" * 5000):
        assert refusal(server.client.get(path), 404).endswith("got another")
    for path in ("/chat/completions", f"{CHATS}/chat/completions", f"{CHATS}s"):
        assert refusal(server.post(path, {}), 404).endswith(f"did you mean {CHATS}?")
    for path in (TEXTS, CHATS, "/v1/responses", "/tokenize", "/detokenize"):
        assert "GET" in refusal(server.client.get(path), 405)
    assert "POST" in refusal(server.post("/v1/models", {}), 405)
    assert "/tokenize/" in refusal(server.post("/tokenize/", {"prompt": "a"}), 404)


@pytest.mark.parametrize("path", [TEXTS, CHATS, "/tokenize", "/detokenize"])
def test_a_body_in_another_encoding(server: Server, path: str) -> None:
    answer = server.client.post(path, content=b"any", headers={"content-encoding": "gzip"})
    assert refusal(answer, 415) == "content-encoding: expected identity, got 'gzip'"
    assert answer.headers["accept-encoding"] == "identity"
    twice = [("content-encoding", "identity"), ("content-encoding", "gzip")]
    answer = server.client.post(path, content=b"any", headers=twice)
    assert refusal(answer, 415) == "content-encoding: expected identity, got 'identity, gzip'"
    body = {"prompt": 5}
    assert "got `int`" in refusal(
        server.post("/tokenize", body, **{"content-encoding": "Identity"}), 400
    )


def test_the_log_has_what_generates_nothing(server: Server) -> None:
    before = len(server.log())
    asked = [("GET", "/nothing"), ("GET", TEXTS), ("POST", "/tokenize"), ("POST", "/detokenize")]
    asked += [("GET", "/v1/models"), ("GET", "/version"), ("GET", "/health")]
    for method, path in asked:
        body = {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}.get(path)
        server.client.request(method, path, json=body)
    lines = [json.loads(line) for line in server.log()[before:].splitlines()]
    assert [(line["path"], line["status"]) for line in lines] == [
        ("/nothing", 404),
        (TEXTS, 405),
        ("/tokenize", 200),
        ("/detokenize", 200),
        ("/v1/models", 200),
        ("/version", 200),
    ]


@pytest.mark.parametrize(
    ("path", "methods"),
    [(TEXTS, {"POST"}), ("/v1/models", {"GET", "HEAD"}), ("/", {"GET", "HEAD"})],
)
def test_a_path_tells_its_methods(server: Server, path: str, methods: set[str]) -> None:
    refused, asked = (server.client.request(name, path) for name in ("DELETE", "OPTIONS"))
    refusal(refused, 405)
    assert (asked.status_code, asked.content) == (204, b"")
    for answer in (refused, asked):
        assert set(answer.headers["allow"].split(", ")) == {*methods, "OPTIONS"}
    head = server.client.head(path)
    assert (head.status_code, head.content) == (200 if "GET" in methods else 405, b"")
    if "GET" in methods:
        assert head.headers["content-length"] == str(len(server.client.get(path).content))


def test_a_refused_request_harms_no_other_one(server: Server) -> None:
    fields = {"max_tokens": 100, "ignore_eos": True, "temperature": 0}
    whole = server.complete("The import", **fields)["choices"][0]["text"]
    body = {"prompt": "The import", "stream": True, **fields}
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        for bad in ({"prompt": [9999]}, {"prompt": "The", "top_p": 5}, {"prompt": 5}):
            refusal(server.post("/v1/completions", bad), 400)
        pieces = [frame["choices"][0]["text"] for frame in frames(stream.iter_lines())]
    assert "".join(pieces) == whole


def test_a_prompt_that_cannot_be_runs_none_of_the_others(server: Server) -> None:
    before = server.client.get("/metrics").text
    refusal(server.post(TEXTS, {"prompt": [[1, 2], [3, 4], [5000]]}), 400)
    assert _counters(server.client.get("/metrics").text) == _counters(before)


def _counters(text: str) -> list[str]:
    names = ("kvgraph:prompt_tokens_total", "kvgraph:request_success_total")
    return [line for line in text.splitlines() if line.startswith(names)]


def test_a_grammar_that_fails_behind_its_first_token(server: Server) -> None:
    """llguidance takes 2,000 alternatives at one place; the last sentence is of the client."""
    labels = " | ".join(f'"label {i}"' for i in range(2500))
    asked = {"prompt": "The", "guided_grammar": f'start: ("a" | "b") label\nlabel: {labels}'}
    sentence = "expected a grammar that can be followed, got "
    assert sentence in refusal(server.post("/v1/completions", asked), 400)
    events = server.events("/v1/completions", asked)
    (error,) = [event["error"] for event in events if "error" in event]
    assert sentence in error["message"]
    assert (error["type"], error["code"]) == ("invalid_request_error", None)
    assert error.keys() == {"message", "type", "param", "code"}
