"""Parameters of functions: schemas that stand in the one of a call, and what of them is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgraph.serve.chats import tools_of
from kvgraph.serve.protocol import ChatRequest
from tests.serve.running import Server, answered, refusal

pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

PATH = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
DIGIT = {"enum": [1, 2]}
NUMBER = {"enum": [8, 9]}
HOME = "https://example.org/s"
REFERENCES: dict[str, dict[str, Any]] = {
    "pointer": {"$ref": "#/$defs/q", "$defs": {"q": DIGIT}},
    "escaped": {"$ref": "#/$defs/%71", "$defs": {"q": DIGIT}},
    "anchor": {"$ref": "#q", "$defs": {"0q": {"$anchor": "q", **DIGIT}}},
    "anchor below $id": {"$id": HOME, "$ref": "#q", "$defs": {"0q": {"$anchor": "q", **DIGIT}}},
    "relative": {"$id": HOME, "$ref": "s#/$defs/q", "$defs": {"q": DIGIT}},
    "rooted": {"$id": HOME, "$ref": "/s#/$defs/q", "$defs": {"q": DIGIT}},
    "absolute": {"$id": f"{HOME}#", "$ref": f"{HOME}#/$defs/q", "$defs": {"q": DIGIT}},
    "relative $id": {"$id": "s", "$ref": "s#/$defs/q", "$defs": {"q": DIGIT}},
    "fragment alone": {"$id": "#", "$ref": "#/$defs/q", "$defs": {"q": DIGIT}},
    "no text": {"$id": 5, "$ref": "#/$defs/q", "$defs": {"q": DIGIT}},
    "inner $id": {"$ref": "inner", "$defs": {"q": {"$id": "inner", **DIGIT}}},
    "inner root": {
        "$ref": "#/$defs/q",
        "$defs": {
            "q": {"$id": "https://example.org/q", "$ref": "#/$defs/z", "$defs": {"z": DIGIT}},
            "z": NUMBER,
        },
    },
    "draft 4": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "$ref": "#/definitions/q",
        "definitions": {"q": DIGIT},
    },
    "draft 7": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "$id": HOME,
        "$ref": "s#/definitions/q",
        "definitions": {"q": DIGIT},
    },
}


def taking(schema: dict[str, Any], name: str = "f") -> dict[str, Any]:
    """A function that needs an argument `a`, which fits a schema."""
    own = {"$schema", "$id", "$anchor", "$defs", "definitions", "$ref"} & schema.keys()
    value = {key: schema[key] for key in schema.keys() - (own - {"$ref"})}
    fields: dict[str, Any] = {"type": "object", "properties": {"a": value}, "required": ["a"]}
    fields |= {key: schema[key] for key in own - {"$ref"}} | {"additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": fields}}


def called(server: Server, *tools: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Name and arguments of a forced call."""
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "required", "max_tokens": 120}
    body |= {"seed": seed}
    (answer,) = answered(server.post(PATH, body))["choices"]
    (call,) = answer["message"]["tool_calls"]
    return {"name": call["function"]["name"], **json.loads(call["function"]["arguments"])}


@pytest.mark.parametrize("name", REFERENCES)
def test_references_hold_as_in_a_schema_of_its_own(server: Server, name: str) -> None:
    assert called(server, taking(REFERENCES[name]))["a"] in DIGIT["enum"]
    other = taking({"$ref": "#/$defs/q", "$defs": {"q": NUMBER}}, "g")
    for functions in ((taking(REFERENCES[name]), other), (other, taking(REFERENCES[name]))):
        call = called(server, *functions)
        assert call["a"] in (DIGIT if call["name"] == "f" else NUMBER)["enum"]


@pytest.mark.parametrize("reference", ["#/a", "#a", "other", "https://example.org/t", "# a"])
def test_a_reference_to_nothing_is_refused_by_name(server: Server, reference: str) -> None:
    tools = [taking(DIGIT), taking({"$ref": reference}, "g: ,")]
    answer = server.post(PATH, {"messages": MESSAGES, "tools": tools, "tool_choice": "required"})
    sentence = refusal(answer, 400)
    place = "tools[1] 'g: ,'"
    assert sentence.startswith(f"{place}: expected what llguidance takes, got one that it refuses ")
    assert reference.strip("#") in sentence
    assert "$defs/" not in sentence
    assert answer.json()["error"]["param"] == "tools[1]"


def test_a_refused_function_is_named(server: Server) -> None:
    """With its place in the request, where others are not allowed."""
    cases: list[tuple[dict[str, Any], str]] = [
        ({"const": 2**60}, "expected numbers of at most 2**53 in"),
        ({"type": "strin"}, "expected what llguidance takes, got one that it refuses (Invalid"),
    ]
    choice = {"mode": "required", "tools": [taking({}, "bad")]}
    chosen = {"type": "allowed_tools", "allowed_tools": choice}
    asked = {"response_format": {"type": "json_object"}}
    for more in ({"tool_choice": "required"}, {"tool_choice": chosen}, asked):
        for schema, sentence in cases:
            first = taking({"$schema": "https://example.org/none", **DIGIT})
            tools = [first, taking(NUMBER, "g"), taking(schema, "bad")]
            answer = server.post(PATH, {"messages": MESSAGES, "tools": tools, **more})
            assert refusal(answer, 400).startswith(f"tools[2] 'bad': {sentence}")
            assert answer.json()["error"]["param"] == "tools[2]"


TAG = {"type": "string", "const": "cat", "default": "cat"}
CAT = {"type": "object", "properties": {"kind": TAG}, "additionalProperties": False}
DOG = {**CAT, "properties": {"kind": {"const": "dog"}}}
LENIENT = {
    "unique": ({"type": "array", "items": {"enum": [1]}, "uniqueItems": True, "maxItems": 2}, 0),
    "pattern": ({"type": "string", "pattern": r"^(?=.*\d)a$", "enum": ["a"]}, 0),
    "names": (
        {"type": "object", "propertyNames": {"pattern": "a"}, "additionalProperties": {"enum": [1]}}
        | {"maxProperties": 1},
        0,
    ),
    "union": ({"oneOf": [{"enum": [1, 2]}, {"enum": [2, 3]}]}, 0),
    "format": ({"type": "string", "format": "uuid4", "enum": ["a"]}, 1),
    "all names": ({"type": "object", "propertyNames": {"type": "string"}, "maxProperties": 0}, 1),
    "tag": ({"oneOf": [CAT, DOG]}, 1),
}
"""Schemas that a lenient reading takes, and whether an exact one takes them too."""


@pytest.mark.parametrize("name", LENIENT)
@pytest.mark.parametrize("strict", [None, False, True])
@pytest.mark.parametrize("form", ["tools", "chat", "completion", "responses"])
def test_a_schema_is_read_leniently_unless_it_is_strict(
    server: Server, name: str, strict: bool | None, form: str
) -> None:
    schema, is_exact = LENIENT[name]
    tool = taking(schema)
    tool["function"]["strict"] = strict
    parameters = tool["function"]["parameters"]
    named = {"name": "f", "strict": strict, "schema": parameters}
    asked = {"response_format": {"type": "json_schema", "json_schema": named}, "max_tokens": 60}
    path, body = {
        "tools": (PATH, {"messages": MESSAGES, "tools": [tool], "tool_choice": "required"}),
        "chat": (PATH, {"messages": MESSAGES, **asked}),
        "completion": ("/v1/completions", {"prompt": "Hi", **asked}),
        "responses": (
            "/v1/responses",
            {"input": "Hi", "text": {"format": {"type": "json_schema", **named}}},
        ),
    }[form]
    answer = server.post(path, body | {"seed": 1, "temperature": 0.5})
    if strict and not is_exact:
        assert "expected what llguidance takes, got one that it refuses (" in refusal(answer, 400)
    else:
        assert answer.status_code == 200, answer.text


def test_a_schema_of_an_extension_is_exact(server: Server) -> None:
    schema, _ = LENIENT["unique"]
    for more in ({"guided_json": schema}, {"structured_outputs": {"json": schema}}):
        answer = server.post("/v1/completions", {"prompt": "Hi", "max_tokens": 4, **more})
        assert 'got one that it refuses (Unimplemented keys: ["uniqueItems"])' in refusal(
            answer, 400
        )


def test_annotations_do_not_count(server: Server) -> None:
    notes = {"description": "d" * 1000, "title": "T", "examples": ["e" * 1000], "default": "d"}
    tools = [taking({**DIGIT, **notes}, f"f{i}") for i in range(100)]
    for tool in tools:
        tool["function"]["parameters"] |= {"$schema": "http://json-schema.org/schema#", **notes}
    given = ChatRequest(messages=MESSAGES, tools=tools, tool_choice="required")
    assert len(json.dumps(tools_of(given).schema())) < 30_000


def test_functions_have_definitions_of_their_own(server: Server) -> None:
    for own, others in (({}, {}), ({"$id": "s"}, {"$id": "s"}), ({"$id": HOME}, {})):
        first = taking({**own, "$ref": "#/$defs/q", "$defs": {"q": {"$id": "q", **DIGIT}}})
        inner = {"$ref": "#/$defs/q", "$defs": {"q": {"$id": "q", **NUMBER}}}
        second = taking(others | inner, "g")
        for seed in range(4):
            call = called(server, first, second, seed=seed)
            assert call["a"] in (DIGIT if call["name"] == "f" else NUMBER)["enum"]


@pytest.mark.parametrize("name", ["https://[", "a b", "urn:x y", "https://e/\u00fc"])
def test_a_name_that_is_none_is_refused(server: Server, name: str) -> None:
    body = {"messages": MESSAGES, "tools": [taking({"$id": name, **DIGIT})]}
    sentence = refusal(server.post(PATH, body | {"tool_choice": "required"}), 400)
    assert sentence.startswith("tools[0] 'f': expected ")
    assert name in sentence


def test_one_name_of_two_schemas_is_refused(server: Server) -> None:
    """A reference would find either."""
    inner = {"$ref": "#/$defs/q", "$defs": {"q": {"$id": HOME, **DIGIT}}}
    other = {"$ref": "#/$defs/q", "$defs": {"q": {"$id": f"{HOME}#", **NUMBER}}}
    home = {"$id": HOME, "$ref": "#/$defs/q", "$defs": {"q": DIGIT}}
    relative = {"$id": "https://example.org/t", "$ref": "s", "$defs": {"q": {"$id": "s", **DIGIT}}}
    both = {**home, "$defs": {"q": NUMBER}}
    for first, second in ((inner, other), (inner, home), (home, both), (home, relative)):
        body = {"messages": MESSAGES, "tools": [taking(first), taking(second, "g")]}
        answer = server.post(PATH, body | {"tool_choice": "required"})
        assert refusal(answer, 400) == (
            f"tools: expected schemas of which each has its own $id, got {HOME!r} twice"
        )
    for same in (inner, home):
        assert called(server, taking(same), taking(same, "g"))["a"] in DIGIT["enum"]


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


@pytest.mark.parametrize("more", [{}, {"parameters": None}])
def test_a_function_without_parameters_takes_none(server: Server, more: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "clock", **more}}
    body = {"messages": MESSAGES, "tools": [tool], "tool_choice": "required", "max_tokens": 40}
    given = ChatRequest(messages=MESSAGES, tools=[tool], tool_choice="required")
    schema = tools_of(given).schema()
    assert schema is not None
    none = {"type": "object", "properties": {}, "additionalProperties": False}
    assert none.items() <= schema["properties"]["arguments"].items()
    for seed in range(3):
        (answer,) = answered(server.post(PATH, body | {"seed": seed}))["choices"]
        (call,) = answer["message"]["tool_calls"]
        assert call["function"] == {"name": "clock", "arguments": "{}"}


@pytest.mark.parametrize("levels", [100, 400, 900, *range(930, 1000, 5)])
@pytest.mark.parametrize("choice", ["required", "auto"])
def test_what_nests_deeply_is_refused(server: Server, levels: int, choice: str) -> None:
    deep = "[" * levels + "]" * levels
    fields = [
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"x": DEEP}}}]',
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": DEEP}}}]',
        '"tools": [{"type": "function", "function": {"name": DEEP}}]',
        '"tools": [{"type": DEEP}]',
        '"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": {"a": DEEP}',
        '"response_format": {"type": DEEP}',
        '"response_format": {"type": "json_schema", "json_schema": {"schema": {"x": DEEP}}}',
        '"guided_json": {"x": DEEP}',
    ]
    for field in fields:
        forces = field.startswith('"tools"') and "tool_choice" not in field
        chosen = f'"tool_choice": "{choice}", ' if forces else ""
        body = f'{{"messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 1, {chosen}'
        answer = server.client.post(PATH, content=body + field.replace("DEEP", deep) + "}")
        is_shown = field == fields[0] and choice == "auto"
        assert answer.status_code == 400 or (is_shown and answer.status_code == 200), answer.text
        if field == fields[0] and choice == "required" and levels <= 900:
            error = answer.json()["error"]
            assert error["message"] == "tools[0] 'f': expected at most 64 levels, got more"
            assert error["param"] == "tools[0]"
