"""`structured_outputs` and `guided_choice`, as vLLM has them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgraph.runtime.grammars import Grammar
from kvgraph.runtime.guide import _compile
from kvgraph.serve.shapes import shape_of_choice
from tests.serve.running import Server, answered, refusal
from tests.serve.test_tools import FORCED, MESSAGES, OBJECT

llguidance = pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

ROUTES = {
    "/v1/completions": {"prompt": "A day: "},
    "/v1/chat/completions": {"messages": MESSAGES},
}
DAYS = ["Mon.", "Tues|day", "a (b) [c]*"]
CHOICES = [{"guided_choice": DAYS}, {"structured_outputs": {"choice": DAYS}}]
ONE_OF = "structured_outputs: expected one of json, regex, grammar, choice, json_object, got "
TOGETHER = "expected none together with"


@pytest.fixture(params=ROUTES)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def texts(server: Server, path: str, fields: dict[str, Any]) -> list[str]:
    body = {**ROUTES[path], "max_tokens": 60, "temperature": 100, "n": 6, "seed": 1}
    choices = answered(server.post(path, body | fields))["choices"]
    assert {one["finish_reason"] for one in choices} == {"stop"}
    return [one["message"]["content"] if "message" in one else one["text"] for one in choices]


@pytest.mark.parametrize("fields", CHOICES)
def test_a_text_is_one_of_some(server: Server, path: str, fields: dict[str, Any]) -> None:
    found = set(texts(server, path, fields))
    assert len(found) > 1
    assert found <= set(DAYS)


def test_a_choice_may_be_empty(server: Server, path: str) -> None:
    assert set(texts(server, path, {"guided_choice": [""]})) == {""}


def test_each_form_guides(server: Server, path: str) -> None:
    schema = {"enum": [{"a": 1}]}
    for asked in (schema, json.dumps(schema)):
        assert set(texts(server, path, {"structured_outputs": {"json": asked}})) == {'{"a":1}'}
    for days in ({"regex": "(Mon|Tues)day"}, {"grammar": 'start: "Monday" | "Tuesday"'}):
        assert set(texts(server, path, {"structured_outputs": days})) <= {"Monday", "Tuesday"}
    body = {**ROUTES[path], "max_tokens": 1, "structured_outputs": {"json_object": True}}
    (one,) = answered(server.post(path, body))["choices"]
    assert (one["message"]["content"] if "message" in one else one["text"]).startswith("{")


def test_a_format_guides(server: Server, path: str) -> None:
    """Of a chat it is OpenAI's field, of a completion vLLM's."""
    schema = {"enum": [{"a": 1}]}
    asked = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert set(texts(server, path, {"response_format": asked})) == {'{"a":1}'}
    body = {**ROUTES[path], "max_tokens": 4, "response_format": {"type": "xml"}}
    assert refusal(server.post(path, body), 400).startswith("response_format: expected type text")


def test_one_thing_said_twice(server: Server, path: str) -> None:
    """Clients of vLLM send its old name and its new one."""
    for name, asked in (("regex", "ab"), ("choice", ["ab"]), ("grammar", 'start: "ab"')):
        both = {f"guided_{name}": asked, "structured_outputs": {name: asked}}
        assert set(texts(server, path, both)) == {"ab"}


def test_no_field_is_none(server: Server) -> None:
    more = {"structured_outputs": None, "guided_choice": None}
    assert server.complete("The", **more)["choices"] == server.complete("The")["choices"]


@pytest.mark.parametrize(
    "text", ["a.b", "x|y", "\\d", "(", "[a-z]", "{2}", "^a$", "a b/c", "#&~-", "\n\t", "é😀", '"']
)
def test_a_choice_is_taken_as_it_is_written(text: str) -> None:
    tokenizer = llguidance.LLTokenizer("byte")
    shape = shape_of_choice("guided_choice", ["other", text])
    matcher = _compile(tokenizer, Grammar(shape.kind, str(shape.value)))
    for other in ("a" * len(text), "ab", "12"):
        tokens = tokenizer.tokenize_str(other)
        tried = matcher.deep_copy()
        assert tried.try_consume_tokens(tokens) < len(tokens) or not tried.is_accepting()
    tokens = tokenizer.tokenize_str(text)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, f"{ONE_OF}none"),
        ({"json": {}, "regex": "a"}, f"{ONE_OF}json, regex"),
        ({"json_object": False}, "structured_outputs.json_object: expected true, got false"),
        ({"choice": []}, "structured_outputs.choice: expected one or more texts, got none"),
        ({"regex": "("}, "structured_outputs.regex: expected what llguidance takes"),
        ({"grammar": "a"}, "structured_outputs.grammar: expected what llguidance takes"),
        ({"grammar": "%json"}, "structured_outputs.grammar: expected no %json"),
        ({"json": {"type": "strin"}}, "structured_outputs.json: expected what llguidance takes"),
        ({"json": "{"}, "structured_outputs.json: expected a JSON schema, got no JSON"),
        ({"json": {"const": 2**60}}, "structured_outputs.json: expected numbers of at most 2**53"),
    ],
)
def test_what_is_refused(server: Server, path: str, given: Any, sentence: str) -> None:
    answer = server.post(path, {**ROUTES[path], "max_tokens": 4, "structured_outputs": given})
    assert refusal(answer, 400).startswith(sentence)
    assert answer.json()["error"]["param"] == sentence.partition(":")[0]


@pytest.mark.parametrize(
    ("fields", "sentence", "param"),
    [
        (
            {"structured_outputs": {"whitespace_pattern": " "}},
            "body: Object contains unknown field `whitespace_pattern`",
            "structured_outputs",
        ),
        ({"structured_outputs": "a"}, "body: Expected `object | null`", "structured_outputs"),
        ({"guided_choice": "a"}, "body: Expected `array | null`", "guided_choice"),
        ({"guided_choice": []}, "guided_choice: expected one or more texts, got none", None),
        (
            {"guided_choice": ["." * 40_000, "." * 40_000]},
            "guided_choice: expected at most 65536 bytes of texts, got 80002",
            None,
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_json": {}},
            f"guided_json: {TOGETHER} structured_outputs.regex, got one",
            None,
        ),
        (
            {"structured_outputs": {"regex": "a"}, "guided_choice": ["a"]},
            f"guided_choice: {TOGETHER} structured_outputs.regex, got one",
            None,
        ),
        (
            {"guided_choice": ["a"], "guided_grammar": "a"},
            f"guided_grammar: {TOGETHER} guided_choice, got one",
            None,
        ),
        (
            {"response_format": OBJECT, "structured_outputs": {"regex": "a"}},
            f"structured_outputs: {TOGETHER} response_format, got one",
            None,
        ),
        (
            {**FORCED, "guided_choice": ["a"]},
            f"guided_choice: {TOGETHER} tools, got one",
            None,
        ),
    ],
)
def test_fields_that_are_refused(
    server: Server, fields: dict[str, Any], sentence: str, param: str | None
) -> None:
    answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4} | fields)
    assert refusal(answer, 400).startswith(sentence)
    assert answer.json()["error"]["param"] == (param or sentence.partition(":")[0])
