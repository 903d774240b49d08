"""What a caller says a text must look like: types and limits, checked before anything is compiled.

A grammar is compiled on the engine's thread, and some of few bytes take minutes or all memory
there. The compiler bounds most of them by itself (`guide.LIMITS`). The rest is refused here: a
"multipleOf" compiles to as many states as its number; patterns that must hold together are
multiplied; the time of an object is quadratic in its keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from kvgraph.errors import RequestError
from kvgraph.runtime.arguments import instance, said

MOST_BYTES = 1 << 16
MOST_DEPTH = 64
MOST_KEYS = 512
MOST_MULTIPLE = 10_000
MOST_COMBINED = 4

KINDS = ("guided_json", "guided_regex", "guided_grammar")
"""Fields of SamplingParams of which at most one is given."""

ANY_OBJECT = '{"type": "object"}'

COMBINING = ("$ref", "allOf", "anyOf", "oneOf")
"""Keywords whose schemas hold together with what stands next to them."""

COSTLY = ("pattern", "format", "multipleOf")


class Grammar(NamedTuple):
    """What a text must look like; `kind` is one of KINDS."""

    kind: str
    text: str


def grammar_of(given: Mapping[str, object]) -> Grammar | None:
    """Of the KINDS the one that is `given`, checked; None where none is. RequestError names it."""
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
    if name == "guided_grammar" and "%json" in text:
        raise RequestError(f"{name}: expected no %json, got one; use guided_json for a schema")
    return Grammar(name, text)


def schema_text(name: str, value: object) -> str:
    """A JSON schema as text; of any object for True and {}."""
    if value is True or value == {}:
        return ANY_OBJECT
    if not isinstance(value, str | Mapping):
        raise RequestError(f"{name}: expected a JSON schema, as a dict or text, got {said(value)}")
    try:
        text = value if isinstance(value, str) else json.dumps(dict(value), allow_nan=False)
        _require_size(name, text)
        schema = json.loads(text)
    except RecursionError as error:
        raise _too_deep(name) from error
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{name}: expected a JSON schema, got no JSON ({error})") from error
    if not isinstance(schema, dict):
        raise RequestError(f"{name}: expected a JSON schema, an object, got {said(schema)}")
    _require_bounded(name, schema)
    return text if schema else ANY_OBJECT


def _require_size(name: str, text: str) -> None:
    size = len(text.encode(errors="surrogatepass"))
    if not 0 < size <= MOST_BYTES:
        raise RequestError(f"{name}: expected 1 to {MOST_BYTES} bytes, got {size}")


def _require_bounded(name: str, schema: dict[str, object]) -> None:
    """RequestError for what no other limit bounds."""
    combines, costly = False, 0
    for part in _objects(name, schema):
        if len(part) > MOST_KEYS:
            raise RequestError(
                f"{name}: expected at most {MOST_KEYS} keys in an object, got {len(part)}"
            )
        multiple = part.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > MOST_MULTIPLE:
            raise RequestError(
                f'{name}: expected "multipleOf" of at most {MOST_MULTIPLE}, got {multiple}'
            )
        own = sum(key in part for key in COSTLY)
        joined = sum(key in part for key in COMBINING)
        every = part.get("allOf")
        combines |= joined > 1 or bool(joined and own)
        combines |= isinstance(every, list) and len(every) > 1
        costly += own
    if combines and costly > MOST_COMBINED:
        raise RequestError(
            f"{name}: expected at most {MOST_COMBINED} of {', '.join(COSTLY)} in a schema that "
            f"combines others, got {costly}"
        )


def _objects(name: str, schema: object) -> Iterator[dict[str, object]]:
    """Every object in the schema, however deep; RequestError below MOST_DEPTH."""
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
