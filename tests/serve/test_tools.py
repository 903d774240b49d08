"""Structured output and calls of tools, over HTTP and with OpenAI's client."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgraph.serve.protocol import ChatRequest
from kvgraph.serve.tools import Tools
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


def require_call(call: dict[str, Any]) -> None:
    assert call["type"] == "function"
    assert call["id"].startswith("call_")
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert sorted(arguments) == ["city", "day"]
        assert arguments["city"] in CITY["enum"]
        assert 1 <= arguments["day"] <= 31
    else:
        assert call["function"]["name"] == "pick"
        assert arguments in ({"which": 1}, {"which": 2})


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
def test_a_forced_call_fits_its_schema(server: Server, choice: Any) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER, ONE_OF_TWO], "tool_choice": choice}
    for seed in range(4):
        choices = answered(server.post(PATH, body | {"seed": seed, "max_tokens": 60}))["choices"]
        assert choices[0]["finish_reason"] == "tool_calls"
        assert choices[0]["message"]["content"] is None
        (call,) = choices[0]["message"]["tool_calls"]
        require_call(call)
        assert choice == "required" or call["function"]["name"] == "weather"


def test_a_call_comes_as_one_piece_of_a_stream(server: Server) -> None:
    body = {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "required", "max_tokens": 60}
    first, *frames = [frame["choices"][0] for frame in server.events(PATH, body)]
    assert first["delta"]["role"] == "assistant"
    (call,) = [call for frame in frames for call in frame["delta"].get("tool_calls", [])]
    assert call.pop("index") == 0
    require_call(call)
    assert frames[-1]["finish_reason"] == "tool_calls"
    assert not any(frame["delta"].get("content") for frame in frames)


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
        ({"guided_regex": "("}, "guided_regex: "),
        ({"response_format": {"type": "other"}}, "response_format: expected type text, json_"),
        ({"response_format": {"type": "json_schema"}}, "response_format: expected type text"),
        (
            {"tools": [WEATHER], "tool_choice": "required", "guided_json": {}},
            "guided_json: expected none besides response_format or tools",
        ),
        (
            {"tools": [WEATHER], "tool_choice": {"function": {"name": "clock"}}},
            'tool_choice: expected "none", "auto", "required", or a function of the tools, got ',
        ),
        ({"tool_choice": "required"}, "tool_choice: expected "),
        (
            {"tool_choice": "\n"},
            'tool_choice: expected "none", "auto", "required", or a function of the tools, got \\n',
        ),
        ({"tools": [{"type": "other"}]}, "tools: expected functions with a name, got "),
        ({"tools": [{"type": "function"}]}, "tools: expected functions with a name, got "),
    ],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], sentence: str) -> None:
    answer = server.post(PATH, {"messages": MESSAGES, "max_tokens": 4} | fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(sentence)


def tools(*given: dict[str, Any], choice: Any = None) -> Tools:
    return Tools(ChatRequest(messages=[{}], tools=list(given), tool_choice=choice))


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


def test_definitions_of_several_functions() -> None:
    other = json.loads(json.dumps(WEATHER))
    other["function"]["name"] = "climate"
    other["function"]["parameters"]["$defs"]["City"] = {"enum": ["Bonn"]}
    schema = tools(WEATHER, other, choice="required").schema()
    assert schema is not None
    assert len(schema["anyOf"]) == 2
    assert [own["$defs"]["City"] for own in schema["$defs"].values()] == [CITY, {"enum": ["Bonn"]}]
    for number, own in schema["$defs"].items():
        assert own["properties"]["city"] == {"$ref": f"#/$defs/{number}/$defs/City"}


def test_references_are_the_tools_own(server: Server) -> None:
    """Below names that are those of keywords, too."""
    digit = {"type": "integer", "minimum": 1, "maximum": 2}
    parameters = {
        "$id": "https://example.org/s",
        "type": "object",
        "properties": {
            "v": digit,
            "w": {"$ref": "#/properties/v"},
            "u": {"$ref": "https://example.org/s#/$defs/U"},
            "t": {"enum": [{"$ref": "#"}]},
            "default": {"$ref": "#/$defs/enum"},
        },
        "required": ["v", "w", "u", "t", "default"],
        "additionalProperties": False,
        "$defs": {"U": digit, "enum": {"$ref": "#/$defs/U"}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 120}
    message = answered(server.post(PATH, body))["choices"][0]["message"]
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert arguments.pop("t") == {"$ref": "#"}
    assert sorted(arguments) == ["default", "u", "v", "w"]
    assert set(arguments.values()) <= {1, 2}


def test_parameters_are_objects(server: Server) -> None:
    limited = {"properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "f", "parameters": limited}}
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 40}
    message = answered(server.post(PATH, body))["choices"][0]["message"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    tool["function"]["parameters"] = {"type": "string"}  # type: ignore[index]
    answer = server.post(PATH, body)
    assert answer.status_code == 400
    assert "expected parameters of type 'object' of 'f', got 'string'" in answer.text
    tool["function"]["parameters"] = {"type": "object", "$defs": [1]}  # type: ignore[index]
    assert server.post(PATH, body).status_code in (200, 400)
