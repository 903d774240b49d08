"""OpenAI's own Python client, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgraph import Engine, SamplingParams
from kvgraph.serve.items import Reasoning, ResponseRequest, TextConfig
from kvgraph.serve.protocol import ChatRequest, CompletionRequest
from tests.serve.running import SECONDS, Server, answered, serving

openai = pytest.importorskip("openai", reason="needs the package openai")

PROMPT = "The import statement"
MESSAGES: Any = [{"role": "user", "content": "What does the import statement do?"}]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 12}


def client_of(server: Server, key: str = "none") -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=SECONDS)


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with client_of(server) as client:
        yield client


def test_no_field_of_the_client_is_unknown() -> None:
    """A new one is taken without effect, or has a sentence."""
    from openai.types import completion_create_params as texts
    from openai.types import shared_params
    from openai.types.chat import completion_create_params as chats
    from openai.types.responses import ResponseTextConfigParam
    from openai.types.responses import response_create_params as responses

    for theirs, ours in (
        (texts.CompletionCreateParamsBase, CompletionRequest),
        (chats.CompletionCreateParamsBase, ChatRequest),
        (responses.ResponseCreateParamsBase, ResponseRequest),
    ):
        assert set(theirs.__annotations__) <= set(ours.__struct_fields__)
    assert set(shared_params.Reasoning.__annotations__) <= set(Reasoning.__struct_fields__)
    assert set(ResponseTextConfigParam.__annotations__) <= set(TextConfig.__struct_fields__)


def test_completions(client: Any, engine: Engine) -> None:
    done = engine.generate([PROMPT], SamplingParams(max_tokens=12))[0]
    answer = client.completions.create(prompt=PROMPT, **GREEDY)
    assert answer.choices[0].text == done.text
    assert answer.choices[0].finish_reason == done.finish_reason
    pieces = list(client.completions.create(prompt=PROMPT, stream=True, **GREEDY))
    assert "".join([piece.choices[0].text for piece in pieces]) == done.text


def test_chats(client: Any, engine: Engine) -> None:
    done = engine.chat(MESSAGES, SamplingParams(max_tokens=12))
    answer = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert answer.choices[0].message.content == done.text
    assert answer.usage.completion_tokens == 12
    *pieces, last = client.chat.completions.create(
        messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    assert "".join([piece.choices[0].delta.content or "" for piece in pieces]) == done.text
    assert last.usage.completion_tokens == 12
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_logprobs(client: Any) -> None:
    answer = client.chat.completions.create(
        messages=MESSAGES, logprobs=True, top_logprobs=2, **GREEDY
    )
    content = answer.choices[0].logprobs.content
    assert "".join([token.token for token in content]) == answer.choices[0].message.content
    assert content[0].logprob == pytest.approx(content[0].top_logprobs[0].logprob)
    scores = client.completions.create(
        prompt=PROMPT, echo=True, logprobs=1, **{**GREEDY, "max_tokens": 0}
    )
    assert scores.choices[0].text == PROMPT
    assert scores.choices[0].logprobs.token_logprobs[0] is None


def test_vllms_fields_go_in_extra_body(client: Any, engine: Engine) -> None:
    extra = {"ignore_eos": True, "min_tokens": 4, "top_k": 1, "cache_salt": "mine"}
    done = engine.generate([PROMPT], SamplingParams(max_tokens=12, ignore_eos=True))[0]
    fields = {**GREEDY, "temperature": 1}
    answer = client.completions.create(prompt=PROMPT, extra_body=extra, **fields)
    assert answer.choices[0].text == done.text


TOOL = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "boolean"}}}}
FORCED = {"tool_choice": "required", "max_tokens": 40}
CHAT = {"messages": MESSAGES, "max_tokens": 8}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("completions", {"prompt": PROMPT, "max_tokens": 8, "logprobs": 2}),
        ("chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("chat/completions", CHAT | FORCED | {"tools": [{"type": "function", "function": TOOL}]}),
        ("responses", {"input": PROMPT, "max_output_tokens": 8, "top_logprobs": 2}),
        (
            "responses",
            {
                "input": PROMPT,
                "max_output_tokens": 40,
                "tools": [{"type": "function", **TOOL}],
                "tool_choice": "required",
            },
        ),
    ],
)
def test_every_field_is_one_of_the_clients(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    """What it reads has all that its types require; the client itself checks nothing."""
    from openai.types import Completion
    from openai.types.chat import ChatCompletion, ChatCompletionChunk
    from openai.types.responses import Response, ResponseStreamEvent
    from pydantic import TypeAdapter

    if "tool_choice" in fields:
        pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")
    whole, piece = {
        "completions": (Completion, Completion),
        "chat/completions": (ChatCompletion, ChatCompletionChunk),
        "responses": (Response, ResponseStreamEvent),
    }[path]
    body = {"temperature": 0, **fields}
    TypeAdapter(whole).validate_python(answered(server.post(f"/v1/{path}", body)))
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", f"/v1/{path}", json=body) as stream:
        data = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(data) > 1  # tokens of a slow reader come in one frame
    for frame in map(json.loads, data):
        if path == "completions":  # OpenAI's have null before the last, which its type has not
            frame["choices"] = [{"finish_reason": "stop"} | _given(c) for c in frame["choices"]]
        TypeAdapter(piece).validate_python(frame)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def test_a_second_turn_has_the_call_and_its_result(client: Any, server: Server) -> None:
    pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")
    tools = [{"type": "function", "function": TOOL}]
    asked = [{"role": "user", "content": "Is it so?"}]
    fields = {**GREEDY, "max_tokens": 40, "tools": tools}
    first = client.chat.completions.create(messages=asked, tool_choice="required", **fields)
    (call,) = first.choices[0].message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is so."}
    talk = [*asked, first.choices[0].message, result]
    answer = client.chat.completions.create(messages=talk, **fields)
    assert answer.choices[0].message.content
    shown = [*asked, first.choices[0].message.model_dump(exclude_none=True), result]
    rendered = answered(server.post("/tokenize", {"messages": shown, "tools": tools}))
    text = answered(server.post("/detokenize", {"tokens": rendered["tokens"]}))["prompt"]
    assert answer.usage.prompt_tokens == rendered["count"]
    assert f'Answer:{{"name":"f","arguments":{call.function.arguments}}}' in text
    assert text.endswith("Result: It is so.\n\nAnswer:")
    assert '"name": "f"' in text


def test_models(client: Any) -> None:
    assert [model.object for model in client.models.list()] == ["model"]


def test_leaving_a_stream_cancels_it(client: Any, server: Server) -> None:
    fields = {**GREEDY, "max_tokens": 2000, "n": 16}
    before = server.state()["generated_tokens"]
    with client.completions.create(
        prompt=PROMPT, stream=True, extra_body={"ignore_eos": True}, **fields
    ) as stream:
        next(iter(stream))
    server.wait_until_idle()
    assert server.state()["generated_tokens"] - before < 16 * 2000


def test_errors_have_their_classes(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="at most 2048 tokens") as refused:
        client.completions.create(prompt=PROMPT, **{**GREEDY, "max_tokens": 9999})
    assert refused.value.param == "max_tokens"
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="role"):
        client.chat.completions.create(messages=[{"role": "robot", "content": "Hi"}], **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="a")


def test_errors_of_a_server_that_is_full(artifact: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("mine")
    arguments = ("--max-batch-size", 1, "--max-queued-requests", 0, "--api-key-file", keys)
    with serving(tmp_path / "log", artifact, "--threads", 1, *arguments) as server:
        server.client.headers["authorization"] = "Bearer mine"
        with client_of(server, "other") as client, pytest.raises(openai.AuthenticationError):
            client.models.list()
        with client_of(server, "mine") as client:
            fields = {**GREEDY, "max_tokens": 2000}
            with client.completions.create(prompt=PROMPT, stream=True, **fields) as stream:
                next(iter(stream))
                with pytest.raises(openai.RateLimitError, match="queue") as refused:
                    client.completions.create(prompt=PROMPT, **GREEDY)
            assert int(refused.value.response.headers["retry-after"]) >= 1
            server.wait_until_idle()
            client.completions.create(prompt=PROMPT, **GREEDY)
