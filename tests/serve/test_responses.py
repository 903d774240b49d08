"""/v1/responses: the answers of a chat, as items and as events."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from kvgraph import Engine, SamplingParams
from kvgraph.runtime.logprobs import Logprob, TokenLogprobs
from kvgraph.runtime.sampling import NO_TOKEN, Token
from kvgraph.serve.answers import Spelling
from kvgraph.serve.chats import tools_of
from kvgraph.serve.generation import Generation
from kvgraph.serve.items import Chat, ResponseRequest
from kvgraph.serve.jobs import Job
from kvgraph.serve.protocol import ChatRequest
from kvgraph.serve.responses import response_events
from tests.serve.running import Server, answered, refusal

PATH, CHATS = "/v1/responses", "/v1/chat/completions"
ASKED = "What does the import statement do?"
RULE = "You answer in one sentence."
MESSAGES = [{"role": "system", "content": RULE}, {"role": "user", "content": ASKED}]
BODY: dict[str, Any] = {
    "input": ASKED,
    "instructions": RULE,
    "temperature": 0,
    "max_output_tokens": 12,
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "name": "clock",
    "parameters": {"type": "object", "properties": {"utc": {"type": "boolean"}}},
}
USER = {"role": "user", "content": "Hi"}


def events(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a stream: each has its type as the frame's name, and they are numbered."""
    with server.client.stream("POST", PATH, json={**body, "stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        frames = "\n".join(answer.iter_lines()).strip().split("\n\n")
    return read([frame.encode() for frame in frames])


def read(frames: list[bytes]) -> list[dict[str, Any]]:
    found = []
    for number, frame in enumerate(frames):
        name, data = frame.decode().strip().split("\n")
        one = json.loads(data.removeprefix("data: "))
        assert name == f"event: {one['type']}"
        assert one["sequence_number"] == number
        found.append(one)
    return found


def without_names(response: dict[str, Any]) -> dict[str, Any]:
    """Of a response, what another answer to the same request has too."""
    drop = ("id", "call_id", "created_at", "completed_at", "usage")
    items = [{k: v for k, v in item.items() if k not in drop} for item in response["output"]]
    return {k: v for k, v in response.items() if k not in drop} | {"output": items}


def test_an_answer_is_the_engines_own(server: Server, engine: Engine) -> None:
    answer = answered(server.post(PATH, BODY))
    done = engine.chat(MESSAGES, SamplingParams(max_tokens=12))
    (item,) = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [
        {"type": "output_text", "text": done.text, "annotations": [], "logprobs": []}
    ]
    assert (answer["object"], answer["status"]) == ("response", "incomplete")
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["instructions"] == RULE
    usage, count = answer["usage"], len(engine.apply_chat_template(MESSAGES))
    assert (usage["input_tokens"], usage["output_tokens"]) == (count, 12)
    assert usage["total_tokens"] == count + 12
    again = answered(server.post(PATH, BODY))
    assert again["usage"]["input_tokens_details"]["cached_tokens"] == (count - 1) // 16 * 16
    assert again["id"] != answer["id"]
    assert without_names(again) == without_names(answer)


def test_the_additional_fields_of_chats_are_here() -> None:
    renamed = {"messages", "max_tokens", "max_completion_tokens", "logprobs", "response_format"}
    renamed |= {"reasoning_effort", "verbosity"}
    of_chats = set(ChatRequest.__struct_fields__) - renamed - {"modalities"}
    assert of_chats <= set(ResponseRequest.__struct_fields__)


def test_an_answer_continues_the_last_message(server: Server, engine: Engine) -> None:
    chat = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": "It binds a"}]
    body = {**BODY, "input": chat, "instructions": None, "continue_final_message": True}
    (item,) = answered(server.post(PATH, body))["output"]
    done = engine.chat(chat, SamplingParams(max_tokens=12), continue_final_message=True)
    assert item["content"][0]["text"] == done.text
    refused = server.post(PATH, body | {"add_generation_prompt": True})
    assert "expected no add_generation_prompt next to it" in refusal(refused, 400)


def test_a_text_that_ends_is_complete(server: Server) -> None:
    answer = answered(server.post(PATH, {**BODY, "guided_regex": "ab"}))
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    assert answer["completed_at"] >= answer["created_at"]
    assert answer["output"][0]["status"] == "completed"


@pytest.mark.parametrize("fields", [{}, {"top_logprobs": 1}, {"tools": [CLOCK]}])
def test_a_stream_is_the_whole_answer(server: Server, fields: dict[str, Any]) -> None:
    body = {**BODY, **fields}
    whole = answered(server.post(PATH, body))
    told = events(server, body)
    kinds = [one["type"].removeprefix("response.") for one in told]
    deltas = [one for one in told if one["type"].endswith(".delta")]
    added = ["created", "in_progress", "output_item.added", "content_part.added"]
    ended = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds == [*added, *["output_text.delta"] * len(deltas), *ended]
    (item,) = whole["output"]
    (part,) = item["content"]
    assert "".join([one["delta"] for one in deltas]) == part["text"]
    assert [score for one in deltas for score in one["logprobs"]] == part["logprobs"]
    assert bool(part["logprobs"]) == ("top_logprobs" in fields)
    assert told[-4]["text"] == part["text"]
    assert told[-3]["part"] == part
    assert told[-2]["item"] == told[-1]["response"]["output"][0]
    assert {one["item_id"] for one in told if "item_id" in one} == {told[-2]["item"]["id"]}
    assert without_names(told[-1]["response"]) == without_names(whole)
    assert (told[0]["response"]["status"], told[0]["response"]["output"]) == ("in_progress", [])
    assert told[0]["response"]["id"] == told[-1]["response"]["id"]


def test_logprobs_are_those_of_a_chat(server: Server) -> None:
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    (part,) = answered(server.post(PATH, {**BODY, **asked}))["output"][0]["content"]
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    chat = answered(server.post(CHATS, {**body, "logprobs": True, "top_logprobs": 2}))
    assert part["logprobs"] == chat["choices"][0]["logprobs"]["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "clock"}])
def test_a_call(server: Server, choice: Any) -> None:
    body = {"input": "Hi", "tools": [CLOCK], "tool_choice": choice, "temperature": 0}
    answer = answered(server.post(PATH, body))
    (item,) = answer["output"]
    assert (item["type"], item["name"], item["status"]) == ("function_call", "clock", "completed")
    assert isinstance(json.loads(item["arguments"]), dict)
    assert len(item["call_id"]) == 9
    assert (answer["tools"], answer["tool_choice"]) == ([CLOCK], choice)
    told = events(server, body)
    assert [one["type"].removeprefix("response.") for one in told[2:]] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert told[2]["item"]["arguments"] == ""
    assert told[3]["delta"] == told[4]["arguments"] == item["arguments"]
    assert told[4]["name"] == item["name"]  # which openai 3.3 requires, and 3.57 does not have
    assert told[5]["item"] == told[6]["response"]["output"][0]
    assert without_names(told[6]["response"]) == without_names(answer)


def test_allowed_tools_and_a_call_that_is_cut(server: Server) -> None:
    other = CLOCK | {"name": "other"}
    named = {"type": "function", "name": "clock"}
    choice = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    body = {"input": "Hi", "tools": [other, CLOCK], "tool_choice": choice, "temperature": 0}
    whole = answered(server.post(PATH, body))
    assert whole["output"][0]["name"] == "clock"
    most = whole["usage"]["output_tokens"] - 2
    cut = answered(server.post(PATH, {**body, "max_output_tokens": most}))
    (item,) = cut["output"]
    assert (cut["status"], item["status"], item["type"]) == (
        "incomplete",
        "incomplete",
        "function_call",
    )


def test_a_format(server: Server) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer = answered(server.post(PATH, {"input": "Hi", "text": text}))
    assert json.loads(answer["output"][0]["content"][0]["text"]).keys() == {"a"}
    assert answer["text"] == text


def chat_of(**fields: Any) -> ChatRequest:
    return Chat(msgspec.convert(fields, ResponseRequest)).request


def test_items_are_messages() -> None:
    parts = [{"type": "output_text", "text": "Let me see.", "annotations": []}]
    call = {"type": "function_call", "id": "fc_1", "name": "clock", "arguments": "{}"}
    chat = chat_of(
        instructions=RULE,
        input=[
            {"type": "message", "role": "developer", "content": "Now."},
            {"type": None, "role": "user", "content": [{"type": "input_text", "text": ASKED}]},
            {"type": "reasoning", "id": "rs_1", "summary": []},
            {"id": "msg_1", "type": "message", "role": "assistant", "content": parts},
            {**call, "call_id": "a"},
            {**call, "call_id": "b"},
            {"type": "function_call_output", "call_id": "a", "output": "12:00"},
            {"type": "function_call_output", "call_id": "b", "output": parts},
            {**call, "call_id": "c"},
        ],
    )
    function = {"name": "clock", "arguments": "{}"}
    calls = [{"id": name, "type": "function", "function": function} for name in "abc"]
    text = [{"type": "text", "text": "Let me see."}]
    assert chat.messages == [
        {"role": "system", "content": RULE},
        {"role": "developer", "content": "Now."},
        {"role": "user", "content": [{"type": "text", "text": ASKED}]},
        {"role": "assistant", "content": text, "tool_calls": calls[:2]},
        {"role": "tool", "content": "12:00", "tool_call_id": "a"},
        {"role": "tool", "content": text, "tool_call_id": "b"},
        {"role": "assistant", "content": None, "tool_calls": calls[2:]},
    ]


def test_fields_are_a_chats() -> None:
    chat = chat_of(input="Hi", reasoning={"effort": "low"}, seed=3, cache_salt="a", tools=[CLOCK])
    assert chat.messages == [USER]
    assert (chat.reasoning_effort, chat.seed, chat.cache_salt) == ("low", 3, "a")
    function = {name: value for name, value in CLOCK.items() if name != "type"}
    assert chat.tools == [{"type": "function", "function": function}]
    assert (chat.logprobs, chat.response_format) == (False, {"type": "text"})


CALL = {"type": "function_call", "name": "a", "arguments": "{", "call_id": "c"}


@pytest.mark.parametrize(
    ("fields", "param", "sentence"),
    [
        ({"input": []}, "input", "length >= 1"),
        ({"input": [{"type": "reasoning"}]}, "input", "expected a message, got none"),
        ({"input": [{"role": "robot", "content": ""}]}, "input[0].role", "user, assistant"),
        ({"input": [USER, {"role": "user"}]}, "input[1].content", "text or a list of parts"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0].type",
            "expected input_text or output_text, got 'input_image'",
        ),
        (
            {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
            "input[0].content[0].text",
            "expected text, got None",
        ),
        (
            {"input": [USER, {"type": "item_reference", "id": "msg_1"}]},
            "input[1].type",
            "got 'item_reference'; no response is kept: send its items in `input` (set `store` to",
        ),
        ({"input": [{"id": "msg_1"}]}, "input[0].type", "got 'item_reference'; no response"),
        ({"input": [USER, CALL | {"arguments": {}}]}, "input[1].arguments", "expected text"),
        ({"input": [CALL | {"call_id": 1}]}, "input[0].call_id", "expected text, got 1"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "no response is kept"),
        ({"conversation": "conv_1"}, "conversation", "send its items in `input`"),
        ({"background": True}, "background", "expected false, got true"),
        ({"n": 2}, "n", "expected 1, got 2"),
        ({"truncation": "auto"}, "truncation", "auto"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "at most 2048 tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens", "expected >= 1, got 0"),
        ({"input": "Hi " * 3000}, "input", "at most 2048 tokens"),
        ({"tools": [{"type": "web_search"}]}, "tools", "expected functions, got 'web_search'"),
        (
            {"tools": [CLOCK], "tool_choice": {"type": "function", "name": "x"}},
            "tool_choice",
            "a function of the tools",
        ),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "json_schema with a schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": "no"}}}},
            "text.format",
            "llguidance",
        ),
        ({"seed": "x"}, "seed", "Expected"),
        ({"unknown": 1}, "unknown", "unknown"),
    ],
)  # fmt: skip
def test_refusals(server: Server, fields: dict[str, Any], param: str | None, sentence: str) -> None:
    body = {"input": "Hi", "max_output_tokens": 4} | fields
    assert sentence in refusal(server.post(PATH, body), 400)
    error = server.post(PATH, {**body, "stream": True}).json()["error"]
    assert error["param"] == param


class Failing(Generation):
    """Gives some tokens, and then an error."""

    def __init__(self, steps: list[list[Token]]) -> None:
        self._steps = steps
        self.choices = []

    def __aiter__(self) -> Any:
        return self._each()

    async def _each(self) -> Any:
        for tokens in self._steps:
            yield [SimpleNamespace(index=0, tokens=tokens)]

    def status_of(self, error: str) -> int:
        return 400 if "grammar" in error else 500


@pytest.mark.parametrize(("why", "code"), [("a grammar", "invalid_prompt"), ("x", "server_error")])
@pytest.mark.parametrize("tools", [None, [CLOCK]])
def test_a_stream_that_fails_gives_all_text_before(why: str, code: str, tools: Any) -> None:
    """What was held back as it may have been a call, too."""
    spell = Spelling(lambda tokens: "?" * len(tokens), lambda token: None)
    given = ResponseRequest(input="Hi", tools=tools)
    called = tools_of(Chat(given).request)
    job = Job("id", "tiny", [[5]], [SamplingParams()], b"", True, True, spell, True, tools=called)
    score = TokenLogprobs(Logprob(5, -1.0, 1), ())
    failing = Failing([
        [Token("0", 5, '{"na', None, logprobs=score, characters=4)],
        [Token("0", 6, "m", None, logprobs=score, characters=1),
         Token("0", NO_TOKEN, "e", "error", why)],
    ])  # fmt: skip

    async def main() -> list[bytes]:
        return [frame async for frame in response_events(given, job, failing)]

    told = read(asyncio.run(main()))
    assert "".join([one["delta"] for one in told if one["type"].endswith("delta")]) == '{"name'
    last = told[-1]["response"]
    assert (told[-1]["type"], last["status"]) == ("response.failed", "failed")
    assert last["error"] == {"code": code, "message": why}
    (item,) = last["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", '{"name')
    assert sum([len(one.get("logprobs", [])) for one in told]) == 2
