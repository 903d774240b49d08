"""Checks of guided decoding: types and limits, before a grammar is compiled.

A grammar is compiled in the engine's process, and some grammars of few bytes take minutes or all
memory there, or crash the process. The compiler's own limits (`guide.LIMITS`) stop most of them.
This module rejects the rest: a "multipleOf" compiles to as many states as the value of its digits;
combined patterns multiply their states; an object takes time quadratic in its keys; nested rules
recurse on the stack. The compiler holds numbers as float64, so large ones would change, as some
fractions do. It takes an open bound for a closed one where the other bound is near.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import NamedTuple, cast
from urllib.parse import unquote

from kvgraph.contract.values import shown
from kvgraph.errors import RequestError
from kvgraph.runtime.arguments import instance

MOST_BYTES = 1 << 16
MOST_DEPTH = 64
MOST_KEYS = 512
MOST_MULTIPLE = 10_000
"""Largest value of a "multipleOf"'s digits (0.01: 1); of their product in combined schemas."""
MOST_BOUNDED_MULTIPLE = 1_000
"""The same next to one of BOUNDS. llguidance follows bound and multiple together: from about 2,000
on it gives up in the middle of some texts."""
MOST_COMBINED = 4
MOST_RULES = 1000
MOST_REPEATS = 1000
"""Most repeats of a part of a grammar. Combining a terminal of 10,000 with another never ends."""
MOST_INTEGER = 1 << 53
"""Largest magnitude of a number in a schema: integers up to it are exact as float64."""

KINDS = ("guided_json", "guided_regex", "guided_grammar")
"""Fields of SamplingParams; at most one is given."""

ANY_OBJECT = '{"type": "object"}'

COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords whose schemas apply together with their sibling keywords."""

COSTLY = ("pattern", "format", "multipleOf")
BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
VALUES = ("const", "enum")

NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
"""Keywords whose value maps names to schemas."""
PLAIN = (*VALUES, "default", "examples")
"""Keywords whose values are not schemas."""

# Each takes linear time: they run on a server's event loop.
RULE = re.compile(r"^[^\S\n]*[?!]?[\w-][^:\n|]*:", re.MULTILINE)
"""The start of a rule or a terminal, in Lark's form and in GBNF."""
REPEATS = re.compile(r"(?:\{\s*+(?:\d*+\s*+,\s*+)?|~\s*+)(\d+)")
"""The last number of `{m,n}` and of `~n`."""
LITERAL = re.compile(r'"(?:[^"\\\n]|\\.)*+"?|(/(?:[^/\\\n]|\\.)++/?)')
"""A string literal, or a regular expression."""


class Grammar(NamedTuple):
    """The grammar that a text must match; `kind` is one of KINDS."""

    kind: str
    text: str


def grammar_of(given: Mapping[str, object]) -> Grammar | None:
    """The one of KINDS that is `given`, checked; None if none is. RequestError names the field."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) > 1:
        raise RequestError(f"{', '.join(names)}: expected at most one of them, got {len(names)}")
    if not names:
        return None
    name = names[0]
    if name == "guided_json":
        return Grammar(name, schema_text(name, given[name]))
    instance(name, given[name], str, "text")
    text = cast(str, given[name])
    _require_size(name, text)
    if name == "guided_regex":
        _require_ended(name, text)
    if name == "guided_grammar":
        if "%json" in text:
            raise RequestError(f"{name}: expected no %json, got one; use guided_json for a schema")
        _require_few(name, LITERAL.sub(lambda found: found[1] or '""', text))
    return Grammar(name, text)


def schema_text(name: str, value: object) -> str:
    """A JSON schema as text; the schema of any object for True and {}."""
    if value is True or value == {}:
        return ANY_OBJECT
    if not isinstance(value, str | Mapping):
        raise RequestError(f"{name}: expected a JSON schema, as a dict or text, got {shown(value)}")
    try:
        text = value if isinstance(value, str) else _as_text(dict(value))
        _require_size(name, text)
        schema = json.loads(text)
    except RecursionError as error:
        raise _too_deep(name) from error
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{name}: expected a JSON schema, got no JSON ({error})") from error
    if not isinstance(schema, dict):
        raise RequestError(f"{name}: expected a JSON schema, an object, got {shown(schema)}")
    _require_bounded(name, schema)
    return text if schema else ANY_OBJECT


_as_text = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode
"""JSON without spaces. ValueError for NaN and infinities."""


def require_small(name: str, value: object) -> None:
    """Raise RequestError for JSON values that are too long as text, or too deeply nested."""
    try:
        _require_size(name, _as_text(value))
    except RecursionError as error:
        raise _too_deep(name) from error
    for _ in _objects(name, value):
        pass


def _require_few(name: str, rules: str) -> None:
    """Raise RequestError if a grammar, without its string literals, has too many rules or
    repeats."""
    if (count := len(RULE.findall(rules))) > MOST_RULES:
        raise RequestError(f"{name}: expected at most {MOST_RULES} rules, got {count}")
    for number in REPEATS.findall(rules):
        digits = number.lstrip("0") or "0"
        if len(digits) > 4 or int(digits) > MOST_REPEATS:
            got = digits if len(digits) <= 20 else f"a number of {len(digits)} digits"
            raise RequestError(f"{name}: expected at most {MOST_REPEATS} repeats, got {got}")


def _require_size(name: str, text: str) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if not 0 < size <= MOST_BYTES:
        raise RequestError(f"{name}: expected 1 to {MOST_BYTES} bytes, got {size}")


def _require_ended(name: str, pattern: object) -> None:
    """Raise RequestError for a regular expression with a lone backslash at its end, which the
    compiler leaves out."""
    if isinstance(pattern, str) and (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise RequestError(
            f"{name}: expected a regular expression without a lone backslash at its end, got "
            f"{shown(pattern)}; write two for the character"
        )


def _require_bounded(name: str, schema: dict[str, object]) -> None:
    """Raise RequestError for a schema that the compiler's limits do not bound."""
    _require_exact(name, schema)
    combines, costly, multiples, most_combined = False, 0, 1, MOST_MULTIPLE
    for part in _objects(name, schema):
        if len(part) > MOST_KEYS:
            raise RequestError(
                f"{name}: expected at most {MOST_KEYS} keys in an object, got {len(part)}"
            )
        multiple = _digits(part.get("multipleOf"))
        bounds = [bound for bound in BOUNDS if isinstance(part.get(bound), int | float)]
        most = MOST_BOUNDED_MULTIPLE if bounds else MOST_MULTIPLE
        most_combined = min(most, most_combined)
        if multiple > most:
            where = f' next to "{bounds[0]}"' if bounds else ""
            raise RequestError(
                f'{name}: expected "multipleOf" with digits of at most {most}{where}, '
                f"got {shown(part['multipleOf'])}"
            )
        multiples *= multiple
        own = sum(key in part for key in COSTLY)
        combines |= _combines(part, own > 0)
        costly += own
    if combines and costly > MOST_COMBINED:
        raise RequestError(
            f"{name}: expected at most {MOST_COMBINED} of {', '.join(COSTLY)} in a schema that "
            f"combines others, got {costly}"
        )
    if combines and multiples > most_combined:
        raise RequestError(
            f'{name}: expected values of "multipleOf" with digits that multiply to at most '
            f"{most_combined} in a schema that combines others, got {multiples}"
        )


def _combines(part: dict[str, object], has_own: bool) -> bool:
    """Whether several schemas hold at this place. `has_own`: the part itself limits values."""
    joined, every = sum(key in part for key in COMBINING), part.get("allOf")
    return joined > 1 or bool(joined and has_own) or (isinstance(every, list) and len(every) > 1)


def _require_distinct_keys(name: str, part: dict[str, object]) -> None:
    """Raise RequestError if repeated keys could satisfy "minProperties": the compiler counts a
    repeated key twice, unless the schema names it."""
    least, required = part.get("minProperties"), part.get("required")
    named = len(required) if isinstance(required, list) else 0
    is_closed = part.get("additionalProperties") is False and not part.get("patternProperties")
    if isinstance(least, int | float) and least > named + 1 and not is_closed:
        raise RequestError(
            f'{name}: expected "minProperties" of at most {named + 1}, one more than "required" '
            f"has, since llguidance counts a repeated key twice, got {shown(least)}; name the keys "
            'in "required"'
        )


def _digits(multiple: object) -> int:
    """The digits of a number as an integer: 25 for 0.25. 1 if it is not a number."""
    if isinstance(multiple, int):
        return abs(multiple) or 1
    if not isinstance(multiple, float) or not math.isfinite(multiple):
        return 1
    _, digits, exponent = Decimal(repr(multiple)).normalize().as_tuple()
    assert isinstance(exponent, int)
    return int("".join(map(str, digits))) * 10 ** max(exponent, 0) or 1


def _require_exact(name: str, schema: dict[str, object]) -> None:
    """Raise RequestError for numbers and patterns that the compiler would change."""
    left: list[tuple[object, bool]] = [(schema, False)]
    bounds, combines = list[tuple[str, float]](), False
    references: list[object] = []
    while left:
        part, is_by_name = left.pop()
        if isinstance(part, list):
            left += [(each, False) for each in part]
        elif isinstance(part, dict) and is_by_name:
            left += [(each, False) for each in part.values()]
        elif isinstance(part, dict):
            _require_distinct_keys(name, part)
            references.append(part.get("$ref"))
            by_pattern = part.get("patternProperties")
            for pattern in (
                part.get("pattern"),
                *(by_pattern if isinstance(by_pattern, dict) else ()),
            ):
                _require_ended(name, pattern)
            own = [(key, number) for key in BOUNDS for number in _numbers(part.get(key))]
            _require_apart(name, own)
            bounds += own
            combines |= _combines(part, bool(own))
            for key in (*BOUNDS, *VALUES):
                for number in _numbers(part.get(key)):
                    _require_float(name, key, number)
            left += [(each, key in NAMED) for key, each in part.items() if key not in PLAIN]
    if combines:
        _require_apart(name, bounds)
    _require_targets(name, schema, references)


def _require_targets(name: str, schema: dict[str, object], references: list[object]) -> None:
    """Raise RequestError for references in a circle, which allow no value."""
    checked = set[str]()
    for reference in references:
        path = set[str]()
        while isinstance(reference, str) and reference not in checked:
            if reference in path:
                raise RequestError(
                    f'{name}: expected a "$ref" that leads to a schema, got {shown(reference)}, '
                    "which leads to itself"
                )
            path.add(reference)
            target = target_of(schema, reference)
            reference = target.get("$ref") if isinstance(target, dict) else None
        checked |= path


def target_of(schema: object, reference: str) -> object:
    """The part of a schema at a JSON pointer with `#` in front; None if there is none."""
    start, *steps = unquote(reference).split("/")
    part: object = schema if start == "#" else None
    for step in steps:
        key = step.replace("~1", "/").replace("~0", "~")
        part = part.get(key) if isinstance(part, dict) else None
    return part


def _require_apart(name: str, bounds: list[tuple[str, float]]) -> None:
    """Raise RequestError for an integer as an open bound, and another bound less than 1 away: the
    compiler would take the integer too."""
    for key, number in bounds:
        if not key.startswith("exclusive") or number % 1:
            continue
        other = "aximum" if key.endswith("inimum") else "inimum"
        sign = 1 if other == "aximum" else -1
        for near, bound in bounds:
            if near.endswith(other) and 0 < sign * (bound - number) < 1:
                raise RequestError(
                    f'{name}: expected "{near}" at least 1 away from "{key}", since llguidance '
                    f"would take {shown(number)} too, got {shown(bound)}; use a bound that is no "
                    "integer"
                )


def _require_float(name: str, key: str, number: float) -> None:
    if abs(number) > MOST_INTEGER and (isinstance(number, int) or number % 1 == 0):
        raise RequestError(
            f'{name}: expected numbers of at most 2**53 in "{key}", since llguidance keeps numbers '
            f"as float64, got {shown(number)}; use a string with a pattern"
        )
    if isinstance(number, float) and _as_read(number) != number:
        raise RequestError(
            f'{name}: expected numbers in "{key}" that llguidance reads exactly, got '
            f"{shown(number)}; use fewer digits"
        )


def _as_read(number: float) -> float:
    """A number as the compiler's JSON reader reads it: its digits, times a power of ten, both
    rounded."""
    sign, digits, exponent = Decimal(repr(number)).as_tuple()
    if not isinstance(exponent, int):
        return math.nan
    whole, power = float(int("".join(map(str, digits)))), float(f"1e{abs(exponent)}")
    read = whole * power if exponent > 0 else whole / power
    return -read if sign else read


def _numbers(value: object) -> Iterator[float]:
    """All numbers in `value`, which may be a list or dict, nested."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, int | float):
            yield one
        left += one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()


def _objects(name: str, schema: object) -> Iterator[dict[str, object]]:
    """Every object in the schema; RequestError if it is deeper than MOST_DEPTH."""
    level = [schema]
    for _ in range(MOST_DEPTH):
        yield from (part for part in level if isinstance(part, dict))
        level = [inner for part in level for inner in _inside(part)]
        if not level:
            return
    raise _too_deep(name)


def _inside(part: object) -> list[object]:
    values = part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    return [value for value in values if isinstance(value, dict | list)]


def _too_deep(name: str) -> RequestError:
    return RequestError(f"{name}: expected at most {MOST_DEPTH} levels, got more")
