"""Texts that a schema excludes, and that llguidance alone would take."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvgraph.runtime.grammars import Grammar
from kvgraph.runtime.guide import _compile
from kvgraph.runtime.quoting import without_nul

CHARACTERS = '"\\\n\x01xAé]['


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return pytest.importorskip("llguidance").LLTokenizer("byte")


def takes(tokenizer: Any, kind: str, grammar: str, text: str) -> bool:
    matcher = _compile(tokenizer, Grammar(kind, grammar)).deep_copy()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    "pattern",
    [
        r'[^"]',
        r"[^\\]",
        r'[^"\\]',
        r'[^<>"]',
        r"[^ -~]",
        r"[\x00-\x1f]",
        r'a|[^"]',
        r"\p{Cc}|x",
        r"\PP|\pC",
        r'[^]"]',
        r"[]\\[^ -~]]",
        r'[^!-["]',
        r'[--["[^\]]]]',
        r'[^"&&\D]',
        r'(?i)[^a"]',
        r'[^[:^punct:]"]|[^"]',
        r"\[|[^\]\\]",
        r'[^"\n\r]',
        r'[^\s"]',
        r".|\n",
        r"[\w\W]",
    ],
)
def test_a_pattern_takes_what_it_takes_outside_of_json(pattern: str, tokenizer: Any) -> None:
    schema = json.dumps({"type": "string", "pattern": f"^(?:{pattern})$"})
    keys = json.dumps(
        {"patternProperties": {f"^(?:{pattern})$": {}}, "additionalProperties": False}
    )
    for one in CHARACTERS:
        expected = takes(tokenizer, "guided_regex", pattern, one)
        text = json.dumps(one, ensure_ascii=False)
        assert takes(tokenizer, "guided_json", schema, text) == expected, one
        assert takes(tokenizer, "guided_json", keys, f"{{{text}:1}}") == expected, one


@pytest.mark.parametrize("pattern", ["a-[", "[a", '(?x)[^"] # [', "a\\", r"\[^a\]", "a]"])
def test_a_pattern_without_a_class_stays_as_it_is(pattern: str) -> None:
    assert without_nul(pattern) == pattern


def test_patterns_that_are_names_or_values(tokenizer: Any) -> None:
    schema = {
        "properties": {
            "pattern": {"const": {"pattern": '[^"]'}},
            "deep": {"anyOf": [{"items": {"pattern": '^[^"]$'}, "type": "array"}]},
        },
        "required": ["pattern", "deep"],
        "additionalProperties": False,
    }
    for last, expected in (("x", True), ('"', False)):
        text = json.dumps({"pattern": {"pattern": '[^"]'}, "deep": [last]}, separators=(",", ":"))
        assert takes(tokenizer, "guided_json", json.dumps(schema), text) == expected


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"g": {"type": "integer"}}},
        {"properties": {"g": {"type": "integer"}}, "additionalProperties": {"type": "null"}},
        {"patternProperties": {"^g": {"type": "integer"}}},
        {"required": ["g"], "additionalProperties": {"type": "integer"}},
    ],
)
def test_an_open_key_is_no_other_spelling_of_a_named_one(schema: Any, tokenizer: Any) -> None:
    text = json.dumps({"items": schema | {"type": "object"}, "type": "array"})
    assert not takes(tokenizer, "guided_json", text, r'[{"g":1,"\u0067":null}]')
    assert takes(tokenizer, "guided_json", text, r'[{"g":1}]')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"properties": {"g": {}}, "const": "\x1b"},
        {"properties": {"g": {}}, "enum": ["\x1b"]},
        {"properties": {"g": {}}, "type": "string", "pattern": r"^\x1b$"},
    ],
)
def test_control_characters_that_a_schema_may_need(schema: Any, tokenizer: Any) -> None:
    assert takes(tokenizer, "guided_json", json.dumps(schema), r'"\u001b"')


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"prefixItems": [{"const": "a"}]}, {'["a"]': True, "[3]": False, '["a",1]': True}),
        (
            {"prefixItems": [{"const": "a"}], "items": {"const": 1}},
            {'["a",1]': True, "[1]": False, '["a",2]': False},
        ),
        ({"items": {"const": 1}}, {"[1,1]": True, "[2]": False}),
        ({"items": [{"const": 1}]}, {"[1]": True, "[1,1]": False, "[2]": False}),
        ({}, {"[1]": True, '["a",2]': True}),
        ({"uniqueItems": False, "items": {"const": 1}}, {"[1,1]": True, "[2]": False}),
        (
            {"items": {"properties": {"uniqueItems": {"const": 1}}, "type": "object"}},
            {'[{"uniqueItems":1}]': True, '[{"uniqueItems":2}]': False},
        ),
    ],
)
def test_items_that_llguidance_alone_would_drop(
    schema: Any, texts: dict[str, bool], tokenizer: Any
) -> None:
    array = {"type": "array", "minItems": 1, "additionalItems": False} | schema
    for text, expected in texts.items():
        assert takes(tokenizer, "guided_json", json.dumps(array), text) == expected, text
