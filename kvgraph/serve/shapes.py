"""Shape: the grammar that a request asks for, under the request's field names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from msgspec import Struct

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.values import brief
from kvgraph.errors import RequestError
from kvgraph.runtime.grammars import MOST_BYTES
from kvgraph.serve.errors import ServeError


class Shape(NamedTuple):
    """The grammar of a text, and the field of the request that gives it.

    `kind`: the field of SamplingParams for `value`. `parts`: if `value` joins the schemas of
    several places, such as `tools[2] 'name'`, these places and schemas.
    """

    field: str
    value: JsonObject | str | bool
    kind: str = "guided_json"
    parts: tuple[tuple[str, JsonObject], ...] = ()

    @property
    def origin(self) -> str:
        """Name of the field, or fields, for errors about the value."""
        fields = dict.fromkeys(place.partition("[")[0] for place, _ in self.parts)
        return ", ".join(fields) or self.field


class StructuredOutputs(Struct, forbid_unknown_fields=True, kw_only=True):
    """vLLM's `structured_outputs`; exactly one field is given."""

    json: str | JsonObject | bool | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None

    def shape(self) -> Shape:
        """The grammar of the given field. ServeError unless exactly one is given."""
        fields = self.__struct_fields__
        given = [name for name in fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise refused(
                "structured_outputs", f"one of {', '.join(fields)}", ", ".join(given) or "none"
            )
        field = f"structured_outputs.{given[0]}"
        if self.choice is not None:
            return shape_of_choice(field, self.choice)
        if self.json_object is False:
            raise refused(field, "true", "false")
        kind = "guided_json" if self.json_object else f"guided_{given[0]}"
        return Shape(field, getattr(self, given[0]), kind)


def shape_of_choice(field: str, texts: Sequence[str]) -> Shape:
    """A regular expression that matches one of `texts`. ServeError if there are none."""
    if not texts:
        raise refused(field, "one or more texts", "none")
    size = sum([len(text.encode(errors="surrogatepass")) + 1 for text in texts])
    if size > MOST_BYTES:
        raise refused(field, f"at most {MOST_BYTES} bytes of texts", str(size))
    pattern = "|".join([SPECIAL.sub(r"\\\g<0>", text) for text in texts])
    return Shape(field, pattern or "()", "guided_regex")


SPECIAL = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
"""Characters with a meaning in regular expressions of Rust's syntax."""


def schema_of_format(field: str, given: JsonObject) -> JsonObject | None:
    """The schema of a `response_format`; None for text.

    Takes OpenAI's forms, and `schema` with type json_object, as llama.cpp and others do. ServeError
    for any other form."""
    kind = given.get("type")
    schema = given.get("schema") if kind == "json_object" else None
    named = given.get("json_schema") if kind == "json_schema" else None
    if isinstance(named, dict):
        schema = named.get("schema")
    known = FORMATS.get(kind) if isinstance(kind, str) else None
    others = [name for name in given if name not in (known or ()) and given[name] is not None]
    is_missing = kind == "json_schema" and schema is None
    if known is None or others or is_missing or not isinstance(schema, dict | None):
        expected = "type text, json_object, or json_schema with a schema"
        raise refused(field, f"{expected}, and nothing else", brief(given))
    return None if kind == "text" else schema or {"type": "object"}


FORMATS = {
    "text": ("type",),
    "json_object": ("type", "schema"),
    "json_schema": ("type", "json_schema"),
}
"""Types of a `response_format`, each with its fields."""


@contextmanager
def as_serve_errors() -> Iterator[None]:
    """Convert a RequestError that starts with a place in the request to a ServeError."""
    try:
        yield
    except RequestError as error:
        place = str(error).partition(":")[0]
        raise ServeError(400, str(error), param=field_of(place)) from error


def refused(place: str, expected: str, got: str) -> ServeError:
    return ServeError(400, f"{place}: expected {expected}, got {got}", param=field_of(place))


def field_of(place: str) -> str:
    """The field of a place: `tools[2]` for `tools[2] 'name'`."""
    return place.partition(" ")[0]
