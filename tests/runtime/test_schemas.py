"""What is taken out of a schema or written in another way, and the texts that are left."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvgraph import RequestError
from kvgraph.runtime.grammars import MOST_BYTES, Grammar, require_small
from kvgraph.runtime.guide import _compile, refusal_of
from kvgraph.runtime.schemas import FORMATS, UNREAD, read_schema, without_annotations
from tests.runtime.test_quoting import takes

STANDARD = [
    "date",
    "date-time",
    "duration",
    "email",
    "hostname",
    "idn-email",
    "idn-hostname",
    "ipv4",
    "ipv6",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "time",
    "uri",
    "uri-reference",
    "uri-template",
    "uuid",
]
"""Formats of JSON Schema."""

ANY_FORMAT = '"no format at all"'


@pytest.fixture(scope="module")
def llguidance() -> Any:
    return pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def tokenizer(llguidance: Any) -> Any:
    return llguidance.LLTokenizer("byte")


def require_texts(tokenizer: Any, schema: Any, texts: dict[str, bool]) -> None:
    for text, expected in texts.items():
        assert takes(tokenizer, "guided_json", json.dumps(schema), text) == expected, text


def is_known(llguidance: Any, schema: Any) -> bool:
    """Whether llguidance itself takes a schema."""
    try:
        source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError:
        return False
    return not llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0).is_error()


def test_formats_and_keys_are_those_of_llguidance(llguidance: Any) -> None:
    known = {f for f in (*STANDARD, *FORMATS) if is_known(llguidance, {"format": f})}
    assert known == set(FORMATS)
    assert not [key for key in UNREAD if is_known(llguidance, {key: {}})]


@pytest.mark.parametrize("name", ["path", "password", "uuid4", "idn-email", "cuid2"])
def test_an_unknown_format_is_an_annotation(name: str, tokenizer: Any) -> None:
    schema = {"type": "string", "format": name, "pattern": "^[ab]+$"}
    require_texts(tokenizer, schema, {'"ab"': True, ANY_FORMAT: False})
    named = {"type": "object", "properties": {"format": {"const": name}}, "required": ["format"]}
    require_texts(tokenizer, named, {f'{{"format":"{name}"}}': True, '{"format":1}': False})
    require_texts(tokenizer, {"const": {"format": name}}, {f'{{"format":"{name}"}}': True})


def test_a_known_format_holds(tokenizer: Any) -> None:
    schema = {"type": "string", "format": "date"}
    require_texts(tokenizer, schema, {'"2026-11-29"': True, ANY_FORMAT: False})


NAMES = {"type": "string", "enum": ["x", "y"], "title": "E"}


@pytest.mark.parametrize(
    ("names", "more", "texts"),
    [
        (True, {}, {'{"q":true}': True, '{"q":1}': False}),
        ({"type": "string"}, {}, {'{"q":true}': True, '{"q":1}': False}),
        ({"type": "string", "format": "uuid4", "title": "T"}, {}, {'{"q":true}': True}),
        (NAMES, {}, {"{}": True, '{"x":true}': True, '{"x":1}': False, '{"q":true}': False}),
        ({"$ref": "#/$defs/e"}, {}, {'{"x":true,"y":false}': True, '{"q":true}': False}),
        ({"const": "x"}, {}, {'{"x":true}': True, '{"y":true}': False}),
        (NAMES, {"required": ["x"]}, {"{}": False, '{"x":true}': True, '{"y":true}': False}),
        (
            NAMES,
            {"properties": {"y": {"const": 3}, "z": {}}},
            {'{"x":true,"y":3}': True, '{"y":true}': False, '{"z":1}': False},
        ),
        (NAMES, {"additionalProperties": False}, {"{}": True, '{"x":true}': False}),
    ],
)
@pytest.mark.parametrize("is_exact", [True, False])
def test_names_of_properties(
    names: Any, more: Any, texts: dict[str, bool], is_exact: bool, tokenizer: Any
) -> None:
    part = {"type": "object", "additionalProperties": {"type": "boolean"}, "propertyNames": names}
    own = {"$id": "https://example.org/s", "$defs": {"e": NAMES}}
    for schema in ({**part, **more, **own}, {"items": {**part, **more, **own}, "type": "array"}):
        read = read_schema(schema, is_exact=is_exact)
        assert "propertyNames" not in json.dumps(read)
        listed = {f"[{t}]": e for t, e in texts.items()} if "items" in schema else texts
        require_texts(tokenizer, schema, listed)
        require_texts(tokenizer, read, listed)


@pytest.mark.parametrize(
    "names",
    [
        {"pattern": "^a$"},
        {"enum": ["a"], "minLength": 1},
        {"enum": ["a"], "const": "a"},
        {"type": "integer", "enum": [1]},
        {"enum": [1]},
        {"$ref": "#/$defs/none"},
        {"$ref": "#/properties/circle"},
        False,
        {"type": "string", "format": "uuid"},
    ],
)
def test_names_that_are_no_list(names: Any, tokenizer: Any) -> None:
    circle = {"circle": {"$ref": "#/properties/circle"}}
    schema = {"type": "object", "properties": circle, "propertyNames": names}
    assert read_schema(schema)["propertyNames"] == names
    assert "propertyNames" not in read_schema(schema, is_exact=False)
    assert refusal_of(Grammar("guided_json", json.dumps(schema))) is not None


@pytest.mark.parametrize("count", [600, 200])
def test_names_that_make_a_large_schema_are_refused(count: int, tokenizer: Any) -> None:
    names = {"enum": [str(i) for i in range(count)]}
    rest = {"type": "string", "enum": ["a" * (1000 if count == 200 else 1)]}
    schema = {"type": "object", "propertyNames": names, "additionalProperties": rest}
    with pytest.raises(RequestError, match=r"got one that it refuses \(propertyNames that make"):
        _compile(tokenizer, Grammar("guided_json", json.dumps(schema)))


def branch(tag: Any, more: Any = (), **fields: Any) -> dict[str, Any]:
    """A branch of a union, as pydantic writes it where the tag has a default."""
    value = {"const": tag, "default": tag} if isinstance(tag, str | int) else {"enum": tag}
    properties = {"kind": value, "x": {"type": "boolean"}, **fields}
    made = {"type": "object", "properties": properties, "additionalProperties": False}
    return made | {"required": ["x"]} | dict(more)


CAT, DOG = '{"kind":"cat","x":true}', '{"kind":"dog","x":true}'
ANIMALS = {CAT: True, DOG: True, '{"x":true}': False, '{"kind":"cow","x":true}': False}
REFERENCES = [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog", "description": "A dog."}]
PAIR = {"$defs": {"cat": branch("cat"), "dog": branch("dog")}, "oneOf": REFERENCES}
OLD = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "definitions": PAIR["$defs"],
    "oneOf": [{"$ref": "#/definitions/cat"}, {"$ref": "#/definitions/dog"}],
}


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (PAIR, ANIMALS),
        (PAIR | {"discriminator": {"propertyName": "kind", "mapping": {}}}, ANIMALS),
        (OLD, ANIMALS),
        ({"oneOf": [branch("cat"), branch(["dog", "wolf"])]}, ANIMALS),
        ({"oneOf": [branch("cat", {"required": ["kind", "x"]}), branch("dog")]}, ANIMALS),
        ({"oneOf": [branch(1), branch(2)]}, {'{"kind":1,"x":true}': True, '{"x":true}': False}),
        (
            {"oneOf": [branch("cat", kind={"$ref": "#/$defs/k"}), branch("dog")]}
            | {"$defs": {"k": {"const": "cat"}}},
            ANIMALS,
        ),
        (
            {"$defs": {"cat": branch("cat", x={"oneOf": REFERENCES}), "dog": branch("dog")}}
            | {"oneOf": REFERENCES},
            {f'{{"kind":"cat","x":{DOG}}}': True, '{"kind":"cat","x":{"x":true}}': False},
        ),
    ],
)
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_tag_of_a_union_is_required(
    schema: Any, texts: dict[str, bool], is_exact: bool, tokenizer: Any
) -> None:
    before = json.dumps(schema)
    require_texts(tokenizer, read_schema(schema, is_exact=is_exact), texts)
    assert json.dumps(schema) == before
    require_texts(tokenizer, schema, texts)


def test_a_union_of_one_branch(tokenizer: Any) -> None:
    require_texts(tokenizer, {"oneOf": [branch("cat")]}, {CAT: True, '{"x":true}': True})


@pytest.mark.parametrize(
    "branches",
    [
        [branch("cat"), branch("cat")],
        [branch("cat"), {"type": "object"}],
        [branch("cat"), {"properties": {"kind": {"const": "dog"}}}],
        [branch(1), branch(True)],
        [branch("cat"), {"$ref": "#/$defs/none"}],
        [branch("cat"), {"$ref": "#/oneOf/0"}],
        [{"type": "integer"}, {"type": "number"}],
        [branch(["cat", "dog"]), branch("dog")],
    ],
)
def test_a_union_without_a_tag(branches: Any, tokenizer: Any) -> None:
    schema = {"oneOf": branches}
    assert "oneOf" in read_schema(schema)
    refused = refusal_of(Grammar("guided_json", json.dumps(schema)))
    assert refused is not None
    assert "coerce" not in str(refused)
    if branches[0] == {"type": "integer"}:
        assert str(refused).endswith("(oneOf constraints are not supported; use anyOf)")
        require_texts(tokenizer, read_schema(schema, is_exact=False), {"1": True, "1.5": True})


def test_a_reference_through_a_union_leads_on(tokenizer: Any) -> None:
    schema = {
        "type": "object",
        "properties": {
            "a": {"oneOf": [branch("cat"), branch("dog")]},
            "b": {"$ref": "#/properties/a/oneOf/0"},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    texts = {f'{{"a":{DOG},"b":{CAT}}}': True, f'{{"a":{DOG},"b":{DOG}}}': False}
    for is_exact in (True, False):
        require_texts(tokenizer, read_schema(schema, is_exact=is_exact), texts)


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "maxItems": 2},
            {"[1,1]": True, "[1,2]": True, "[3]": False, "[1,2,1]": False},
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^a$"}, "maxProperties": 1}
            | {"additionalProperties": {"type": "null"}},
            {'{"b":null}': True, '{"b":1}': False, '{"a":null,"b":null}': False},
        ),
        ({"oneOf": [{"type": "integer"}, {"enum": [1]}]}, {"1": True, "7": True, '"a"': False}),
        ({"not": {"const": "a"}, "type": "string", "maxLength": 1}, {'"a"': True, '"aa"': False}),
        (
            {"type": "object", "patternProperties": {"^(?!x)": {"const": 1}, "^x$": {"const": 2}}}
            | {"additionalProperties": False},
            {'{"y":3}': True, '{"x":2}': True, '{"x":1}': False},
        ),
        *(
            ({"type": "string", "pattern": pattern, "maxLength": 2}, {'"b"': True, '"bbb"': False})
            for pattern in (r"(?<n>a)\k<n>", "(?P<n>a)(?P=n)", r"a\Z", "a(?=x)")
        ),
        ({"type": "string", "pattern": r"^[(?=]$"}, {'"="': True, '"b"': False}),
        (
            {"if": {"required": ["a"]}, "then": {"required": ["b"]}, "else": False}
            | {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False},
            {'{"a":1}': True, '{"a":2}': False, '{"b":1}': False},
        ),
        (
            {"anyOf": [{"type": "number"}, {"type": "string", "pattern": r"^(?!^[-+.]*$)\d*$"}]},
            {"1": True, '"1"': True, '"-"': True, "[]": False},
        ),
        ({"type": "string", "pattern": r"^\bx$", "maxLength": 1}, {'"y"': True, '"yy"': False}),
        (
            {"type": "integer", "minimum": 7, "maximum": 2**63, "exclusiveMinimum": -1e30},
            {"7": True, "6": False},
        ),
        ({"type": "string", "pattern": r"^\\b(?:x)$"}, {r'"\\bx"': True, '"x"': False}),
        (
            {"type": "object", "properties": {"not": {"const": 1}}, "required": ["not"]},
            {'{"not":1}': True, '{"not":2}': False},
        ),
        ({"const": {"uniqueItems": True}}, {'{"uniqueItems":true}': True, "{}": False}),
    ],
)
def test_a_lenient_reading_keeps_what_llguidance_takes(
    schema: Any, texts: dict[str, bool], tokenizer: Any
) -> None:
    require_texts(tokenizer, read_schema(schema, is_exact=False), texts)
    listed = {"type": "array", "items": schema, "maxItems": 1}
    read = read_schema(listed, is_exact=False)
    require_texts(tokenizer, read, {f"[{text}]": taken for text, taken in texts.items()})


@pytest.mark.parametrize("key", UNREAD)
def test_an_exact_reading_refuses_what_a_lenient_one_leaves_out(key: str, tokenizer: Any) -> None:
    schema = {"type": "object", key: True}
    with pytest.raises(RequestError, match=re.escape(f'Unimplemented keys: ["{key}"]')):
        _compile(tokenizer, Grammar("guided_json", json.dumps(schema)))
    assert read_schema(schema, is_exact=False) == {"type": "object"}


def test_annotations_are_left_out() -> None:
    schema = {
        "title": "S",
        "description": "d" * 100,
        "properties": {"title": {"title": "T", "const": {"title": "v"}}, "description": True},
        "default": {"type": "null"},
        "anyOf": [{"examples": [{"a": 1}], "$ref": "#/default"}],
        "enum": [{"description": "v"}],
    }
    assert without_annotations(schema) == {
        "properties": {"title": {"const": {"title": "v"}}, "description": True},
        "default": {"type": "null"},
        "anyOf": [{"$ref": "#/default"}],
        "enum": [{"description": "v"}],
    }


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [{}] * MOST_BYTES},
        {"properties": {str(i): {"title": "t"} for i in range(MOST_BYTES)}},
        {"x": "a" * MOST_BYTES},
        {"x": json.loads("[" * 80 + "]" * 80)},
        {"x": json.loads('{"title":"a","x":' * 80 + "1" + "}" * 80)},
    ],
)
def test_a_schema_above_the_limits_stays_above_them(schema: Any) -> None:
    with pytest.raises(RequestError, match=r"a: expected (1 to 65536 bytes|at most 64 levels), go"):
        require_small("a", without_annotations(schema))


def test_a_part_that_references_lead_through_stays(tokenizer: Any) -> None:
    """What llguidance says of it is true then."""
    led = {
        "if": {"properties": {"x": {"const": 1}}},
        "properties": {"a": {"$ref": "#/if/properties/x"}},
    }
    assert "if" in read_schema(led, is_exact=False)
    keys = {"a": {"$ref": "#/properties/c"}, "c": {"const": 1}}
    closed = {"properties": keys, "propertyNames": {"enum": ["a"]}}
    assert read_schema(closed)["propertyNames"] == {"enum": ["a"]}
    assert read_schema(closed, is_exact=False)["properties"] == keys
