"""/v1/chat/completions: the engine's own answers, in OpenAI's form."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvgraph import Engine, SamplingParams
from kvgraph.serve import chats
from kvgraph.serve.chats import tools_of
from kvgraph.serve.protocol import ChatRequest
from tests.serve.running import Server, answered, refusal, serving
from tests.support.artifacts import rehash

PATH = "/v1/chat/completions"
MESSAGES = [
    {"role": "system", "content": "You answer in one sentence."},
    {"role": "user", "content": "What does the import statement do?"},
]
BODY: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
CONTINUED = {"continue_final_message": True}


def test_an_answer_is_the_engines_own(server: Server, engine: Engine) -> None:
    answer = answered(server.post(PATH, BODY))
    done = engine.chat(MESSAGES, SamplingParams(max_tokens=12))
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": done.text},
            "logprobs": None,
            "finish_reason": done.finish_reason,
        }
    ]
    count = len(engine.apply_chat_template(MESSAGES))
    assert answer["usage"]["prompt_tokens"] == count
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["object"] == "chat.completion"
    again = answered(server.post(PATH, BODY))
    assert again["choices"] == answer["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == (count - 1) // 16 * 16


@pytest.mark.parametrize("fields", [{}, {"n": 2, "seed": 3, "temperature": 1}])
def test_a_stream_is_the_whole_answer(server: Server, fields: dict[str, Any]) -> None:
    body = {**BODY, **fields, "logprobs": True, "top_logprobs": 1}
    whole = answered(server.post(PATH, body))
    *frames, last = server.events(PATH, {**body, "stream_options": {"include_usage": True}})
    assert {frame["object"] for frame in frames} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        first, *others = [
            one for f in frames for one in f["choices"] if one["index"] == choice["index"]
        ]
        assert first["delta"] == {"role": "assistant", "content": ""}
        text = "".join([one["delta"].get("content", "") for one in others])
        assert text == choice["message"]["content"]
        assert others[-1]["finish_reason"] == choice["finish_reason"]
        scores = [token for one in others for token in one["logprobs"]["content"]]
        tokens = [token["token"] for token in scores]
        assert tokens == [token["token"] for token in choice["logprobs"]["content"]]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_frames_tell_the_usage_so_far(server: Server) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    frames = server.events(PATH, {**BODY, "stream_options": options})
    counts = [frame["usage"]["completion_tokens"] for frame in frames]
    assert counts == sorted(counts)
    assert counts[0] == 0  # the role
    assert counts[-2:] == [12, 12]
    assert {frame["usage"]["prompt_tokens"] for frame in frames} == {
        frames[-1]["usage"]["prompt_tokens"]
    }


def test_logprobs(server: Server) -> None:
    choice = answered(server.post(PATH, {**BODY, "logprobs": True, "top_logprobs": 2}))["choices"]
    content = choice[0]["logprobs"]["content"]
    assert len(content) == 12
    for token in content:
        assert bytes(token["bytes"]).decode() == token["token"]
        assert len(token["top_logprobs"]) == 2
        assert token["logprob"] <= token["top_logprobs"][0]["logprob"] <= 0


def test_bytes_of_tokens_are_those_of_the_text(server: Server) -> None:
    text = "the \U0001f600 of h\u00e9"
    body = {"messages": MESSAGES, "guided_regex": text, "logprobs": True, "max_tokens": 40}
    choice = answered(server.post(PATH, body))["choices"][0]
    assert choice["message"]["content"] == text
    written = b"".join([bytes(token["bytes"]) for token in choice["logprobs"]["content"]])
    assert written == text.encode()


def test_without_a_limit_it_has_all_room_that_is_left(server: Server, engine: Engine) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "ignore_eos": True}
    usage = answered(server.post(PATH, body))["usage"]
    assert usage["total_tokens"] == engine.model.max_seq_len


def test_a_developer_and_a_turn_without_calls(server: Server, engine: Engine) -> None:
    messages = [
        {"role": "developer", "content": "You answer in one sentence."},
        MESSAGES[1],
        {"role": "assistant", "content": "It binds.", "tool_calls": []},
        MESSAGES[1],
    ]
    plain = [MESSAGES[0], MESSAGES[1], {"role": "assistant", "content": "It binds."}, MESSAGES[1]]
    answer = answered(server.post(PATH, {**BODY, "messages": messages}))
    done = engine.chat(plain, SamplingParams(max_tokens=12))
    assert answer["choices"][0]["message"]["content"] == done.text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"a": 1}},
            {"reasoning_effort": "low", "a": 1},
        ),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}},
            {"reasoning_effort": "high"},
        ),
    ],
)
def test_an_effort_is_a_variable_of_the_template(
    fields: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    given = ChatRequest(messages=MESSAGES, **fields)
    assert rendered(given)["chat_template_kwargs"] == expected


def test_an_answer_goes_on_with_the_last_message(server: Server, engine: Engine) -> None:
    messages = [MESSAGES[1], {"role": "assistant", "content": "It binds a"}]
    answer = answered(server.post(PATH, {**BODY, "messages": messages} | CONTINUED))
    done = engine.chat(messages, SamplingParams(max_tokens=12), continue_final_message=True)
    assert answer["choices"][0]["message"]["content"] == done.text
    counted = answered(server.post("/tokenize", {"messages": messages} | CONTINUED))
    assert counted["count"] == answer["usage"]["prompt_tokens"]
    both = {**BODY, "messages": messages, "add_generation_prompt": True} | CONTINUED
    answer = server.post(PATH, both)
    assert "expected no add_generation_prompt next to it" in refusal(answer, 400)
    assert answer.json()["error"]["param"] == "continue_final_message"
    alone = {"prompt": "The"} | CONTINUED
    assert "expected messages next to it" in refusal(server.post("/tokenize", alone), 400)


@pytest.mark.parametrize(
    ("refused", "text"),
    [
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": "It binds.", "refusal": None}, "It binds."),
    ],
)
def test_what_an_assistant_refused(
    server: Server, engine: Engine, refused: dict[str, Any], text: str
) -> None:
    messages = [MESSAGES[1], {"role": "assistant", **refused}, MESSAGES[1]]
    plain = [MESSAGES[1], {"role": "assistant", "content": text}, MESSAGES[1]]
    answer = answered(server.post(PATH, {**BODY, "messages": messages}))
    assert answer["usage"]["prompt_tokens"] == len(engine.apply_chat_template(plain))
    done = engine.chat(plain, SamplingParams(max_tokens=12))
    assert answer["choices"][0]["message"]["content"] == done.text


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "user"}, "messages[0].content: expected text or a list of text parts"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "a"}]}, "expected 'text'"),
        (
            {"role": "assistant", "content": None, "function_call": {"name": "f"}},
            "messages[0].function_call: expected text or tool_calls instead, got dict {'name': 'f'}"
            "; `tool_calls` is its newer name",
        ),
        (
            {"role": "assistant", "audio": {"id": "a"}},
            "messages[0].audio: expected text or tool_calls instead, got dict {'id': 'a'}",
        ),
        (
            {"role": "assistant", "content": [{"type": "refusal"}]},
            "expected 'text', got str 'refusal'",
        ),
    ],
)
def test_messages_without_text(server: Server, message: dict[str, Any], sentence: str) -> None:
    answer = server.post(PATH, {**BODY, "messages": [message]})
    assert sentence in refusal(answer, 400)


def test_parts_of_text_are_text(server: Server, engine: Engine) -> None:
    parts = [{"type": "text", "text": "What is"}, {"type": "text", "text": " it?"}]
    messages = [{"role": "user", "content": parts}]
    answer = answered(server.post(PATH, {**BODY, "messages": messages}))
    assert answer["choices"][0]["message"]["content"] == (
        engine.chat(messages, SamplingParams(max_tokens=12)).text
    )


def rendered(given: ChatRequest) -> dict[str, Any]:
    """The keywords with which its messages are rendered."""
    seen: dict[str, Any] = {}

    def render(messages: Any, **fields: Any) -> str:
        seen.update(fields)
        return ""

    prompts = SimpleNamespace(render_chat=render, tokenize=lambda text, special_tokens: [])
    served: Any = SimpleNamespace(prompts=prompts, require_chats=lambda: None)
    asyncio.run(chats._rendered(served, given, tools_of(given)))
    return seen


@pytest.mark.parametrize("missing", ["tokenizer.json", "chat_template.jinja"])
def test_an_artifact_that_lacks_a_file_for_chats(
    artifact: Path, tmp_path: Path, missing: str
) -> None:
    """A client cannot add the file, and does not learn where the artifact is."""
    folder = Path(shutil.copytree(artifact, tmp_path / "model.kvg"))
    (folder / missing).unlink()
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["files"][missing]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    rehash(folder)
    said = f"messages: expected a model with {missing}, got none; use /v1/completions"
    with serving(tmp_path / "log", folder, "--threads", 1) as server:
        for path in (PATH, "/tokenize"):
            assert refusal(server.post(path, {"messages": MESSAGES}), 400) == said
        assert missing in refusal(server.post("/v1/responses", {"input": "Hi"}), 400)
        if missing == "tokenizer.json":
            told = refusal(server.post("/v1/completions", {"prompt": "Hi"}), 400)
            assert told == f"expected {missing} for a text prompt, got none; pass token ids"
        else:
            assert server.complete("Hi")["choices"][0]["text"]
