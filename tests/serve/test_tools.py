"""Structured output and calls of tools, over HTTP and with OpenAI's client."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvgraph.runtime.tools import Tools
from kvgraph.serve.chats import tools_of
from kvgraph.serve.protocol import ChatRequest
from tests.serve.running import Server, answered
from tests.serve.test_openai_client import client_of

pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
DAY = {"type": "integer", "minimum": 1, "maximum": 31}
CITY = {"enum": ["Rome", "Oslo"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"$ref": "#/$defs/City"}, "day": DAY},
            "required": ["city", "day"],
            "additionalProperties": False,
            "$defs": {"City": CITY},
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
ONE_OF_TWO: Any = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"which": {"enum": [1, 2]}},
            "required": ["which"],
            "additionalProperties": False,
        },
    },
}


OBJECT = {"type": "json_object"}
FORCED = {"tools": [WEATHER], "tool_choice": "required"}


def form(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}


def require_call(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    assert re.fullmatch("[a-zA-Z0-9]{9}", call["id"])  # Mistral's templates take no other
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert sorted(arguments) == ["city", "day"]
        assert arguments["city"] in CITY["enum"]
        assert 1 <= arguments["day"] <= 31
    else:
        assert call["function"]["name"] == "pick"
        assert arguments in ({"which": 1}, {"which": 2})


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_fits_its_schema(server: Server, choice: Any) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER, ONE_OF_TWO], "tool_choice": choice}
    for seed in range(4):
        choices = answered(server.post(PATH, body | {"seed": seed, "max_tokens": 60}))["choices"]
        is_named = choice != "required"
        assert choices[0]["finish_reason"] == ("stop" if is_named else "tool_calls")
        assert choices[0]["message"]["content"] is None
        (call,) = choices[0]["message"]["tool_calls"]
        require_call(call)
        assert choice == "required" or call["function"]["name"] == "weather"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_is_no_text_that_has_a_format(server: Server, choice: Any) -> None:
    """Agents send the format of their last answer with every question."""
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 60}
    answer = answered(server.post(PATH, body | {"response_format": form({"type": "array"})}))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    require_call(call)


def test_a_format_of_an_object_may_have_a_schema(server: Server) -> None:
    """As llama.cpp has it."""
    schema = {"type": "object", "properties": {"a": {"const": 3}}, "required": ["a"]}
    schema |= {"additionalProperties": False}
    body = {"messages": MESSAGES, "response_format": OBJECT | {"schema": schema, "name": None}}
    answer = answered(server.post(PATH, body))
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": 3}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_comes_as_one_piece_of_a_stream(server: Server, choice: Any) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "max_tokens": 60}
    first, *frames = [frame["choices"][0] for frame in server.events(PATH, body)]
    assert first["delta"]["role"] == "assistant"
    (call,) = [call for frame in frames for call in frame["delta"].get("tool_calls", [])]
    assert call.pop("index") == 0
    require_call(call)
    *others, last = frames
    assert last["delta"] == {}, "openai's client ends a call at the frame behind it"
    assert last["finish_reason"] == ("stop" if choice == NAMED else "tool_calls")
    assert {frame["finish_reason"] for frame in others} == {None}
    assert not any(frame["delta"].get("content") for frame in frames)


def pieces(frames: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]], str]:
    """Text, calls and reason of a stream of one choice."""
    choices = [frame["choices"][0] for frame in frames]
    text = "".join([one["delta"].get("content", "") for one in choices])
    calls = [call["function"] for one in choices for call in one["delta"].get("tool_calls", [])]
    return text, calls, choices[-1]["finish_reason"]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize(
    ("cut", "arguments"),
    [
        ({"stop": "city"}, '{"'),
        ({"stop": ":{"}, ""),
        ({"stop": "}"}, None),
        ({"stop": "ments", "include_stop_str_in_output": True}, ""),
        ({"stop": ":", "min_tokens": 12}, None),
    ],
)
def test_a_call_that_is_cut_is_one_as_far_as_it_goes(
    server: Server, choice: Any, cut: dict[str, Any], arguments: str | None
) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": choice, "seed": 1}
    body |= {"max_tokens": 80, **cut}
    (answer,) = answered(server.post(PATH, body))["choices"]
    assert answer["finish_reason"] == "stop"
    (call,) = answer["message"]["tool_calls"]
    assert answer["message"]["content"] is None
    assert call["function"]["name"] == "weather"
    assert arguments is None or call["function"]["arguments"] == arguments
    assert '{"city":"Rome","day":31}'.startswith(call["function"]["arguments"][:9])
    assert pieces(server.events(PATH, body)) == ("", [call["function"]], "stop")


def test_a_call_ends_at_any_token(server: Server) -> None:
    """It is text until its name is whole."""
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "seed": 2}
    whole = answered(server.post(PATH, body | {"max_tokens": 80}))
    (known,) = whole["choices"][0]["message"]["tool_calls"]
    whole_text = '{"name":"weather","arguments":' + known["function"]["arguments"] + "}"
    kinds = set()
    for most in range(1, whole["usage"]["completion_tokens"]):
        cut = body | {"max_tokens": most}
        (answer,) = answered(server.post(PATH, cut))["choices"]
        message = answer["message"]
        assert answer["finish_reason"] == "length"
        kinds.add("tool_calls" in message)
        if "tool_calls" in message:
            (call,) = message["tool_calls"]
            assert call["function"]["name"] == "weather"
            assert known["function"]["arguments"].startswith(
                call["function"]["arguments"].strip("}")
            )
            expected = ("", [call["function"]], "length")
        else:
            assert whole_text.startswith(message["content"])
            assert not message["content"].startswith('{"name":"weather"')
            expected = (message["content"], [], "length")
        assert pieces(server.events(PATH, cut)) == expected
    assert kinds == {True, False}


def test_openais_client_reads_calls_and_schemas(server: Server) -> None:
    with client_of(server) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=[WEATHER], tool_choice="required", max_tokens=60
        )
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "weather"
        schema = {
            "type": "object",
            "properties": {"day": DAY},
            "required": ["day"],
            "additionalProperties": False,
        }
        form = {"type": "json_schema", "json_schema": {"name": "day", "schema": schema}}
        answer = client.chat.completions.create(
            model="tiny", messages=MESSAGES, response_format=form, max_tokens=60
        )
        assert 1 <= json.loads(answer.choices[0].message.content)["day"] <= 31


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_free_answer_is_text(server: Server, choice: str | None) -> None:
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 8, "tools": [WEATHER]}
    body |= {"tool_choice": choice}
    message = answered(server.post(PATH, body))["choices"][0]["message"]
    assert sorted(message) == ["content", "role"]
    text = "".join(
        frame["choices"][0]["delta"].get("content", "") for frame in server.events(PATH, body)
    )
    assert text == message["content"]


def test_a_completion_may_be_guided(server: Server) -> None:
    text = server.complete("A day: ", guided_regex="(Mon|Tues)day", max_tokens=20)["choices"][0]
    assert text["text"] in ("Monday", "Tuesday")
    assert text["finish_reason"] == "stop"
    grammar = server.complete("A day: ", guided_grammar='start: "a" "b"', max_tokens=20)
    assert grammar["choices"][0]["text"] == "ab"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"guided_regex": "("}, "guided_regex: expected "),
        ({"guided_json": {"type": "strin"}}, "guided_json: expected "),
        (
            {"response_format": OBJECT, "guided_regex": "a"},
            "guided_regex: expected none together with r",
        ),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_json, guided_regex: expected at most"),
        ({"response_format": form({"type": "strin"})}, "response_format: expected what llguidance"),
        ({"response_format": form({"a": [[]] * 70000})}, "response_format: expected 1 to 65536 by"),
        ({"response_format": form({"$ref": "#/a"})}, "response_format: expected what llguidance "),
        (
            FORCED | {"guided_regex": "a"},
            "guided_regex: expected none together with tools, got one",
        ),
        (
            FORCED | {"guided_grammar": "a"},
            "guided_grammar: expected none together with tools, got one",
        ),
        (FORCED | {"response_format": {"type": "x"}}, "response_format: expected type text, json_"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs: expected no 'tools', got "),
        ({"response_format": {"type": "other"}}, "response_format: expected type text, json_"),
        ({"response_format": {"type": "json_schema"}}, "response_format: expected type text"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "guided_json": {}},
            "guided_json: expected none together with tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"function": {"name": "clock"}}},
            'tool_choice: expected "none", "auto", "required", or a function of the tools, got ',
        ),
        (
            {"tool_choice": "required"},
            "tool_choice: expected tools next to 'required', got none",
        ),
        (
            {"tool_choice": "required", "tools": []},
            "tool_choice: expected tools next to 'required', got none",
        ),
        (
            {"response_format": OBJECT | {"json_schema": {"schema": {}}}},
            "response_format: expected type text, json_object, or json_schema with a schema, and ",
        ),
        (
            {"response_format": {"type": "json_object", "schema": 1}},
            "response_format: expected type text",
        ),
        (
            {"tool_choice": "\n"},
            'tool_choice: expected "none", "auto", "required", or a function of the tools, got '
            "'\\n'",
        ),
        ({"tools": [{"type": "other"}]}, "tools: expected functions with a name, got "),
        ({"tools": [{"type": "function"}]}, "tools: expected functions with a name, got "),
    ],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], sentence: str) -> None:
    answer = server.post(PATH, {"messages": MESSAGES, "max_tokens": 4} | fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].startswith(sentence)
    assert error["param"] == sentence.partition(":")[0].partition(",")[0]


@pytest.mark.parametrize("arguments", [r'{"a":"\ud83d"}', '{"a":1e999}'])
def test_any_call_can_be_sent_back(server: Server, arguments: str) -> None:
    """Also one whose text is JSON, and whose values are none."""
    function = {"name": "f", "arguments": arguments}
    call = {"id": "a", "type": "function", "function": function}
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}]
    found = answered(server.post("/tokenize", {"messages": messages}))["tokens"]
    text = answered(server.post("/detokenize", {"tokens": found}))["prompt"]
    assert json.dumps(arguments) in text
    body = {"messages": messages, "max_tokens": 2}
    answered(server.post("/v1/chat/completions", body))
    items = [
        {"role": "user", "content": "x"},
        {"type": "function_call", "call_id": "a", **function},
    ]
    answered(server.post("/v1/responses", {"input": items, "max_output_tokens": 2}))


def test_a_format_of_text_excludes_no_call(server: Server) -> None:
    body = {"messages": MESSAGES, **FORCED, "response_format": {"type": "text"}, "max_tokens": 80}
    (answer,) = answered(server.post(PATH, body))["choices"]
    assert answer["message"]["tool_calls"]


def tools(*given: dict[str, Any], choice: Any = None) -> Tools:
    return tools_of(ChatRequest(messages=[{}], tools=list(given), tool_choice=choice))


def test_texts_that_are_calls() -> None:
    known = tools(WEATHER, CLOCK)
    call = known.call_in(' {"name": "clock", "parameters": {"a": "\\u00e9"}}')
    assert call is not None
    assert call["function"] == {"name": "clock", "arguments": '{"a": "\\u00e9"}'}
    for text in ("", "Rome", "[]", '{"name": "other", "arguments": {}}', '{"name": "clock"}'):
        assert known.call_in(text) is None
    for text in ('{"name": []}', "[" * 100_000, '{"name": "clock", "arguments": "x"}'):
        assert known.call_in(text) is None


@pytest.mark.parametrize(
    "arguments",
    ['{"a":"\\ud800"}', '{ "a" : 1e999 }', '{"a":12345678901234567890.5,"a":2}', "{}"],
)
def test_arguments_are_as_they_were_written(arguments: str) -> None:
    call = tools(CLOCK).call_in(f'\n{{"arguments":{arguments} , "name":"clock" }} ')
    assert call is not None
    assert call["function"]["arguments"] == arguments


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"clock","arguments":{"a":NaN}}',
        '{"name":"clock","arguments":{}} x',
        '{"name":"clock","arguments":{}',
        '{"name":"clock";"arguments":{}}',
        '{"name":"clock","arguments":{},}',
        "{",
        "{}",
    ],
)
def test_texts_that_are_no_calls(text: str) -> None:
    assert tools(CLOCK).call_in(text) is None
