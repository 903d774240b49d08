"""Tools and a `response_format` in one request: the text is a call, or fits the format."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvgraph.contract.plain import JsonObject
from kvgraph.runtime.grammars import Grammar
from kvgraph.runtime.guide import _compile
from kvgraph.serve.chats import tools_of
from kvgraph.serve.protocol import ChatRequest
from tests.serve.running import Server, answered
from tests.serve.test_tools import (
    CLOCK,
    DAY,
    MESSAGES,
    OBJECT,
    ONE_OF_TWO,
    PATH,
    WEATHER,
    form,
    pieces,
    require_call,
)

llguidance = pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

ASKED: JsonObject = {
    "type": "object",
    "properties": {"day": DAY},
    "required": ["day"],
    "additionalProperties": False,
}
BOTH = {"tools": [WEATHER, ONE_OF_TWO], "response_format": form(ASKED)}
HOME = "https://example.org/s"
LONG = {"type": "string", "enum": ["a" * 40_000]}


def fits(schema: JsonObject, text: str) -> bool:
    """Whether a guided text may be this one."""
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = _compile(tokenizer, Grammar("guided_json", json.dumps(schema)))
    tokens = tokenizer.tokenize_str(text)
    taken: int = matcher.try_consume_tokens(tokens)
    return taken == len(tokens) and bool(matcher.is_accepting())


def taking(schema: JsonObject) -> JsonObject:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}])
def test_an_answer_is_a_call_or_fits_the_format(server: Server, choice: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, **BOTH, **choice, "max_tokens": 120, "temperature": 100}
    kinds = set()
    for seed in range(12):
        (answer,) = answered(server.post(PATH, body | {"seed": seed}))["choices"]
        message, streamed = answer["message"], pieces(server.events(PATH, body | {"seed": seed}))
        calls = message.get("tool_calls", [])
        kinds.add(bool(calls))
        if calls:
            require_call(calls[0])
            assert message["content"] is None
            assert answer["finish_reason"] == "tool_calls"
        else:
            assert 1 <= json.loads(message["content"])["day"] <= 31
            assert answer["finish_reason"] == "stop"
        functions = [call["function"] for call in calls]
        assert streamed == (message["content"] or "", functions, answer["finish_reason"])
    assert kinds == {True, False}


def test_without_tools_to_call_the_format_holds_alone(server: Server) -> None:
    changes: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}]
    for change in changes:
        body = {"messages": MESSAGES, **BOTH, **change, "max_tokens": 120, "temperature": 100}
        for seed in range(4):
            (answer,) = answered(server.post(PATH, body | {"seed": seed}))["choices"]
            assert json.loads(answer["message"]["content"]).keys() == {"day"}


def test_texts_that_a_guide_takes() -> None:
    """References are those of each schema."""
    one = {"enum": [1]}
    asked = {"properties": {"a": {"$ref": "#/$defs/q"}}, "required": ["a"], "$defs": {"q": one}}
    two = {"properties": {"a": {"$ref": "#/$defs/q"}}, "$defs": {"q": {"enum": [2]}}}
    closed = {"type": "object", "additionalProperties": False}
    given = ChatRequest(messages=[{}], tools=[taking(two | closed), CLOCK], response_format=OBJECT)
    schema = tools_of(given).schema(asked | closed)
    for text in (
        '{"a":1}',
        '{"name":"f","arguments":{"a":2}}',
        '{"name":"clock","arguments":{}}',
    ):
        assert fits(schema, text), text
    for text in (
        "{}",
        '{"a":2}',
        '{"name":"f","arguments":{"a":1}}',
        '{"name":"g","arguments":{}}',
    ):
        assert not fits(schema, text), text
    schema = tools_of(given).schema({"type": "object"})
    for text in ("{}", '{"b":[3]}', '{"name":"clock","arguments":{}}'):
        assert fits(schema, text), text
    assert not fits(schema, "[]")


def test_what_fits_the_format_is_no_call_unless_it_is_one() -> None:
    free = tools_of(ChatRequest(messages=[{}], tools=[CLOCK]))
    guided = tools_of(ChatRequest(messages=[{}], tools=[CLOCK], response_format=OBJECT))
    call = '{"name":"clock","arguments":{}}'
    for tools in (free, guided):
        assert tools.call_in(call)
        assert tools.read(call[:20], "length") == (None, "length")
    for text in (
        '{"name":"clock","parameters":{}}',
        '{"arguments":{},"name":"clock"}',
        '{"name":"clock","arguments":{},"day":1}',
    ):
        assert free.call_in(text)
        assert guided.read(text, "stop") == (None, "stop")


def test_a_text_that_fits_the_format_is_not_held() -> None:
    tools = tools_of(ChatRequest(messages=[{}], tools=[CLOCK], response_format=OBJECT))
    for text in ("", "{", '{"na', '{"name":"cl', '{"name":"clock","arguments":{'):
        assert tools.may_be_call(text)
    for text in ("[", '{"day', '{"names":', '{"name":"Bob', '{"name":"clock","day'):
        assert not tools.may_be_call(text)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"response_format": form({"type": "strin"})},
            "response_format: expected what llguidance takes, got one that it refuses (",
        ),
        (
            {"tools": [taking({"$ref": "#/a"})]},
            "tools[0] 'f': expected what llguidance takes, got one that it refuses (",
        ),
        ({"response_format": form({"a": [[]] * 70_000})}, "response_format: expected 1 to 65536"),
        (
            {"tools": [taking({"a": [[]] * 70_000})]},
            "tools[0] 'f': expected 1 to 65536 bytes, got ",
        ),
        (
            {"response_format": form({"type": "string", "enum": ["a" * 65_480]})},
            "response_format, tools: expected 1 to 65536 bytes, got ",
        ),
        (  # each part's URI would be as long
            {"tools": [taking({"$id": HOME + "a" * 70_000, "anyOf": [{"$id": "0"}] * 5_000})]},
            "tools[0] 'f': expected 1 to 65536 bytes, got ",
        ),
        ({"response_format": form({"$id": "https://["})}, "response_format: expected an $id that "),
        (
            {"tools": [taking({"$id": HOME})], "response_format": form({"$id": HOME, **LONG})},
            f"response_format: expected schemas of which each has its own $id, got {HOME!r} twice",
        ),
        (
            {"guided_regex": "a"},
            "guided_regex: expected none together with response_format, got one",
        ),
    ],
)
def test_what_is_refused(server: Server, fields: dict[str, Any], sentence: str) -> None:
    answer = server.post(PATH, {"messages": MESSAGES, "max_tokens": 4, **BOTH, **fields})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith(sentence)
    assert error["param"] == re.split("[:, ]", sentence)[0]
