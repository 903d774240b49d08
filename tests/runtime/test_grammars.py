"""Grammars that are refused before a request runs, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from kvgraph import RequestError
from kvgraph.runtime.gbnf import GBNF
from kvgraph.runtime.grammars import Grammar, grammar_of
from kvgraph.runtime.guide import _compile

BIG = 2**53 + 1
ENDLESS = '{"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]}'
MOST = "guided_grammar: expected at most 1000 rules"


def rules(count: int, sign: str) -> str:
    """A chain of `count` rules, and the last one."""
    return "".join(f'r{i}{sign} r{i + 1} "x"\n' for i in range(count)) + f'r{count}{sign} "a"\n'


@pytest.fixture
def tokenizer() -> Any:
    return pytest.importorskip("llguidance").LLTokenizer("byte")


def takes(tokenizer: Any, grammar: Grammar, text: str) -> bool:
    matcher = _compile(tokenizer, grammar).deep_copy()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "integer", "minimum": -(2**63), "maximum": -(2**63)}, '2\\*\\*53 in "minimum"'),
        ({"type": "integer", "exclusiveMaximum": 1e30}, '2\\*\\*53 in "exclusiveMaximum"'),
        ({"const": BIG}, f'2\\*\\*53 in "const".*{BIG}'),
        ({"type": "integer", "enum": [1e22]}, '2\\*\\*53 in "enum".*1e\\+22'),
        ({"const": 524070745.81621724}, 'in "const" that llguidance reads exactly.*use fewer'),
        ({"items": {"enum": [[-1.370790601649496e-08]]}}, 'in "enum" that llguidance reads ex'),
        ({"type": "number", "minimum": 524070745.81621724}, 'in "minimum" that llguidance reads'),
        ({"properties": {"id": {"enum": ["a", [{"b": -BIG}]]}}}, '2\\*\\*53 in "enum"'),
        (
            {"multipleOf": 9999.9999},
            '"multipleOf" with digits of at most 10000, got float 9999.9999',
        ),
        ({"multipleOf": 10**4000}, '"multipleOf" with digits of at most 10000'),
        ({"multipleOf": 1e300}, '"multipleOf" with digits of at most 10000'),
        ({"allOf": [{"multipleOf": 997}, {"multipleOf": 991}]}, "at most 10000 .*, got 988027"),
        (
            {"multipleOf": 2500, "exclusiveMinimum": 0},
            'digits of at most 1000 next to "exclusiveMinimum", got int 2500',
        ),
        ({"allOf": [{"multipleOf": 2500}, {"minimum": 1}]}, "at most 1000 .*, got 2500"),
    ],
)
def test_numbers(schema: Any, reason: str) -> None:
    with pytest.raises(RequestError, match=f"guided_json: expected .*{reason}"):
        grammar_of({"guided_json": schema})


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": -(2**53), "exclusiveMaximum": 2**53},
        {"type": "number", "multipleOf": 0.01},
        {"type": "number", "multipleOf": 2500.0},
        {"type": "integer", "multipleOf": 997, "minimum": 1, "maximum": 99_999},
        {"allOf": [{"properties": {"minimum": {"maxLength": 3}, "b": {"multipleOf": 2500}}}, {}]},
        {"const": 1e-300},
        {"enum": [2.0**53, -0.0, 0.1 + 0.2, 3.141592653589793, 808.105378283]},
        {"properties": {"minimum": {"title": "a name, no bound"}, "const": {"type": "null"}}},
        {"type": "integer", "default": BIG},
        {"allOf": [{"multipleOf": 97}, {"multipleOf": 101}]},
        {"properties": {"minimum": {"default": BIG}, "enum": {"examples": [{"minimum": BIG}]}}},
        {"default": {"const": BIG}},
        {"multipleOf": True},
    ],
)
def test_numbers_that_are_exact(schema: Any) -> None:
    assert grammar_of({"guided_json": schema}) is not None


@pytest.mark.parametrize(
    "schema",
    [
        {"exclusiveMinimum": 0, "maximum": 0.5},
        {"exclusiveMinimum": 1.0, "exclusiveMaximum": 1.25},
        {"minimum": -0.25, "exclusiveMaximum": -0.0},
        {"items": {"type": "number", "exclusiveMaximum": 3, "exclusiveMinimum": 2.5}},
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"$ref": "#/$defs/a", "maximum": 0.5, "$defs": {"a": {"exclusiveMinimum": 0}}},
    ],
)
def test_bounds_that_would_let_themselves_through(schema: Any) -> None:
    with pytest.raises(RequestError, match=r'"(min|max|excl).*" at least 1 away from "exclusiveM'):
        grammar_of({"guided_json": schema})


@pytest.mark.parametrize(
    ("schema", "texts"),
    [
        ({"exclusiveMinimum": 0, "maximum": 1}, {"0": False, "0.1": True, "1": True}),
        ({"exclusiveMinimum": 0.25, "maximum": 0.5}, {"0.25": False, "0.5": True}),
        ({"minimum": 0, "exclusiveMaximum": 0.5}, {"0": True, "0.5": False}),
        ({"minimum": 2, "exclusiveMaximum": 3}, {"2": True, "3": False, "2.9": True}),
        ({"enum": [0.1 + 0.2]}, {"0.30000000000000004": True, "0.3": False}),
    ],
)
def test_bounds_that_are_kept(schema: Any, texts: dict[str, bool], tokenizer: Any) -> None:
    grammar = grammar_of({"guided_json": {"type": "number"} | schema})
    assert grammar is not None
    for text, expected in texts.items():
        assert takes(tokenizer, grammar, text) == expected, text
    apart = {"properties": {"a": {"exclusiveMinimum": 0}, "b": {"maximum": 0.5}}}
    assert grammar_of({"guided_json": apart}) is not None


def circle(use: Any) -> Any:
    """A schema that uses a reference in a circle of two."""
    return use | {"$defs": {"a~b": {"$ref": "#/$defs/c%20d"}, "c d": {"$ref": "#/$defs/a~0b"}}}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        circle({"$ref": "#/$defs/a~0b"}),
        circle({"properties": {"a": {}}, "additionalProperties": {"$ref": "#/$defs/c d"}}),
    ],
)
def test_references_in_a_circle(schema: Any) -> None:
    with pytest.raises(RequestError, match=r'"\$ref" that leads to a schema, got str .*to itself'):
        grammar_of({"guided_json": schema})


@pytest.mark.parametrize(
    "schema",
    [
        {"items": {"$ref": "#"}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"items": {"$ref": "#"}}}},
        {"properties": {"$ref": {"$ref": "#/$defs/none"}}},
        {"const": {"$ref": "#"}},
    ],
)
def test_references_that_lead_to_a_schema(schema: Any) -> None:
    assert grammar_of({"guided_json": schema}) is not None


OPEN: dict[str, Any] = {"type": "object", "patternProperties": {"^[ab]$": {"type": "null"}}}


@pytest.mark.parametrize(
    "schema",
    [
        OPEN | {"minProperties": 2},
        OPEN | {"minProperties": 3, "required": ["a"], "additionalProperties": False},
        {"properties": {"x": {"minProperties": 2, "additionalProperties": {"type": "null"}}}},
    ],
)
def test_keys_that_may_repeat(schema: Any) -> None:
    """llguidance would take `{"a":null,"a":null}` for two properties."""
    with pytest.raises(RequestError, match=r'"minProperties" of at most .*, one more than "requ'):
        grammar_of({"guided_json": schema})


@pytest.mark.parametrize(
    "schema",
    [
        OPEN | {"minProperties": 1},
        OPEN | {"minProperties": 2, "required": ["a"]},
        {"const": {"minProperties": 9}},
        {"properties": {"minProperties": {"type": "null"}}},
        {
            "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            "required": ["a", "b"],
            "minProperties": 2,
            "additionalProperties": False,
        },
    ],
)
def test_keys_that_are_counted_right(schema: Any) -> None:
    assert grammar_of({"guided_json": schema}) is not None


@pytest.mark.parametrize(
    ("given", "ended"),
    [
        ({"guided_regex": "a\\"}, {"guided_regex": "a\\\\"}),
        ({"guided_json": {"pattern": "a\\\\\\"}}, {"guided_json": {"pattern": "a\\\\"}}),
        (
            {"guided_json": {"items": {"patternProperties": {"\\": {}}}}},
            {"guided_json": {"properties": {"pattern": {"const": {"pattern": "\\"}}}}},
        ),
    ],
)
def test_a_lone_backslash_at_the_end(given: Any, ended: Any) -> None:
    """llguidance would leave it out."""
    with pytest.raises(RequestError, match=r"expected a regular expression without a lone backsl"):
        grammar_of(given)
    assert grammar_of(ended) is not None


@pytest.mark.parametrize("sign", [":", " ::="])
def test_rules(sign: str) -> None:
    """Three thousand in a chain would end the process."""
    with pytest.raises(RequestError, match=f"{MOST}, got 3001"):
        grammar_of({"guided_grammar": rules(3000, sign)})
    assert grammar_of({"guided_grammar": rules(999, sign)}) is not None
    assert grammar_of({"guided_grammar": "start: A\nA: /b/\n" + ' | "a: b"\n' * 2000}) is not None


@pytest.mark.parametrize("repeat", ["{1001}", "{5000,}", "{0,65000}", "{ , 2000 }", "~1001"])
def test_repeats(repeat: str) -> None:
    with pytest.raises(RequestError, match=r"guided_grammar: expected at most 1000 repeats, got "):
        grammar_of({"guided_grammar": f"start: T{repeat}\nT: /a{{9}}/ & /a*/"})
    assert grammar_of({"guided_grammar": "start: T{0,1000}\nT: /2000/{3}"}) is not None


@pytest.mark.parametrize("repeat", ["9" * 5000, "0" * 5000 + "1001"])
def test_repeats_of_many_digits(repeat: str) -> None:
    with pytest.raises(RequestError, match=r"guided_grammar: expected at most 1000 repeats, got "):
        grammar_of({"guided_grammar": f'start: /"/ "a"{{{repeat}}}'})


def test_repeats_in_a_fixed_text_are_none() -> None:
    assert grammar_of({"guided_grammar": 'start: "year{2024}" "~5000" /"/'}) is not None


@pytest.mark.parametrize("part", ["\n", " ", "a", "{ ", '"', '\\"', "/", "~", "{1,", "a:", "/\\"])
def test_a_long_text_is_checked_to_its_end(part: str) -> None:
    """It is checked on a server's event loop: this takes minutes where the time is quadratic."""
    for start in ('start: "a"', "start: {", 'start: "', "root"):
        text = start + part * (65_000 // len(part))
        assert grammar_of({"guided_grammar": text}) == Grammar("guided_grammar", text)
        assert not GBNF.search(text)
        with pytest.raises(RequestError, match="expected at most 1000 repeats, got 1001"):
            grammar_of({"guided_grammar": f'{text}\nlast: "a"{{1001}}'})
        assert GBNF.search(f'{text}\nlast ::= "a"')


@pytest.mark.parametrize(
    "text",
    [
        'start: "a"',
        '?start: "a" | "b"',
        '!start: "a"',
        'start[capture="x"]: "a"',
        'start: "x ::= y"',
        'root ::= "a: b" | [0-9]+',
        "start: " + rules(990, ":").removeprefix("r0: "),
    ],
)
def test_forms_of_a_grammar(text: str, tokenizer: Any) -> None:
    assert not _compile(tokenizer, Grammar("guided_grammar", text)).is_stopped()


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("guided_grammar", 'start: "a" start', "Too many items"),
        ("guided_grammar", "start: start", "no text is possible"),
        ("guided_regex", r"a[^\s\S]", "no text is possible"),
        ("guided_json", ENDLESS, "Too many items"),
        ("guided_regex", "(a?){5000}a{5000}", "too many expressions"),
        (
            "guided_grammar",
            "start: " + "|".join(f'"label {i}"' for i in range(2500)),
            "max is 2000",
        ),
        ("guided_grammar", "root ::= " + "(" * 9999 + '"a"' + ")" * 9999, "GBNF: "),
    ],
)
def test_what_cannot_be_followed(kind: str, text: str, reason: str, tokenizer: Any) -> None:
    with pytest.raises(RequestError, match=rf"{kind}: expected what llguidance takes.*{reason}"):
        _compile(tokenizer, Grammar(kind, text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('root ::= FOO foo\nFOO ::= "a"\nfoo ::= "b"', "ab"),
        ('root ::= a-b | a_b a-b # a_b "\na-b ::= "a_b" | [\\]a-b]\na_b ::= "a"{2,3}', "aaa]"),
        ('root ::= start "x"\nstart ::= "root ::= start" | root', "root ::= startx"),
    ],
)
def test_gbnf_rules_whose_names_would_collide_in_lark_s_form(
    text: str, expected: str, tokenizer: Any
) -> None:
    grammar = Grammar("guided_grammar", text)
    assert takes(tokenizer, grammar, expected)
    assert not takes(tokenizer, grammar, expected[:-1])
