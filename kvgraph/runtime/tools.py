"""Tool calls: JSON objects with a name and arguments, for any model.

A `tool_choice` of "required", or of one function, guides the text: it is one call of a tool, with
arguments that fit the tool's schema. With "auto" the text is free; a text that is a call of a tool
is answered as a call. With a `response_format` too, the text is guided to be one or the other. With
"none" the model sees no tools. With "allowed_tools" it sees all tools, as OpenAI specifies (so that
the prompt stays the same), but only allowed ones are calls.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TypeAlias
from urllib.parse import urljoin

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.values import brief
from kvgraph.errors import RequestError
from kvgraph.runtime.grammars import PLAIN, Grammar, require_small, schema_text
from kvgraph.runtime.guide import refusal_of
from kvgraph.runtime.schemas import schema_as_read

Choice: TypeAlias = str | JsonObject | None
"""A `tool_choice` in OpenAI's form; None: "auto"."""

Parts: TypeAlias = tuple[tuple[str, str], ...]
"""Places in a request, each with its JSON schema, that are joined into one schema."""

SPACE = " \t\n\r"
"""Whitespace that JSON allows between its tokens."""

ALPHANUMERIC = string.ascii_letters + string.digits

CALL, REST = '{"name":', ',"arguments":'
"""The text of a guided call before its name, and between name and arguments."""

NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of the arguments of a function without `parameters`, as OpenAI specifies."""


class Tools:
    """The functions that a chat may call.

    `given`: JSON schemas of functions in OpenAI's form. `format_field`: the request's field of a
    format, if the text may also be one that fits it.
    RequestError for an invalid function, or for a choice that matches no function.
    """

    def __init__(
        self,
        given: Sequence[JsonObject],
        choice: Choice = None,
        format_field: str | None = None,
    ) -> None:
        self._schemas: dict[str, JsonObject] = {}
        self._places: dict[str, tuple[str, bool]] = {}
        """The place of each function in the request, and whether it is strict."""
        self._format_field = format_field
        for at, tool in enumerate([] if choice == "none" else given):
            name, schema = _function(tool)
            if name in self._schemas:
                raise refused("tools", "functions of different names", f"{name!r} twice")
            self._schemas[name] = schema
            is_strict = tool["function"].get("strict") is True
            self._places[name] = f"tools[{at}] {brief(name)}", is_strict
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice = self._allow(choice)
        self._forced = self._forced_by(choice)
        self._is_named = isinstance(choice, dict)
        self._shares = format_field is not None and not self._forced
        """Whether the text is guided to be either a call or a `response_format`'s text."""
        self._begun = [
            f"{CALL}{json.dumps(name, ensure_ascii=False)}{REST}"
            for name in (self._schemas if self._shares else ())
        ]

    def _allow(self, given: JsonObject) -> str:
        """Keep only the allowed functions; return the mode, "auto" or "required"."""
        allowed = given.get("allowed_tools")
        fields = allowed if isinstance(allowed, dict) else {}
        mode, tools = fields.get("mode"), fields.get("tools")
        if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
            expected = "allowed_tools with a mode of auto or required, and one or more tools"
            raise refused("tool_choice", expected, brief(given))
        found = {}
        for tool in tools:
            name = _name(tool)
            if name is None or name not in self._schemas:
                raise refused("tool_choice", "allowed functions of the tools", brief(tool))
            found[name] = self._schemas[name]
        self._schemas = found
        return str(mode)

    def _forced_by(self, choice: Choice) -> list[str]:
        """Names of functions, one of which must be called; empty if a call is optional."""
        if choice in (None, "auto", "none"):
            return []
        if choice == "required" and not self._schemas:
            raise refused("tool_choice", "tools next to 'required'", "none")
        if choice == "required":
            found = list(self._schemas)
        else:
            function = choice.get("function") if isinstance(choice, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            found = [known for known in self._schemas if known == name]
        if not found:
            expected = '"none", "auto", "required", or a function of the tools'
            raise refused("tool_choice", expected, brief(choice))
        return found

    def __bool__(self) -> bool:
        return bool(self._schemas)

    @property
    def forces_call(self) -> bool:
        return bool(self._forced)

    @cached_property
    def parts(self) -> tuple[tuple[str, JsonObject], ...]:
        """The functions that may be called: the place of each, and its schema as it is read.
        RequestError for a schema that is too large."""
        made = list[tuple[str, JsonObject]]()
        for name in self._forced or self._schemas:
            place, is_strict = self._places[name]
            schema = _of_newest(self._schemas[name])
            made.append((place, schema_as_read(place, schema, is_exact=is_strict)))
        return tuple(made)

    def schema(self, asked: JsonObject | None = None) -> JsonObject:
        """The schema of a call, or of either a call or a text that fits `asked`."""
        called = self._forced or list(self._schemas)
        require_small("tools", [schema for _, schema in self.parts])
        own = [_resource(*part, at) for at, part in enumerate(self.parts)]
        texts: list[JsonObject] = []
        for arguments, name in zip(own, called, strict=True):
            fields = {"name": {"const": name}, "arguments": arguments}
            required = {"required": ["name", "arguments"], "additionalProperties": False}
            texts.append({"type": "object", "properties": fields, **required})
        named = [("tools", schema) for schema in own]
        if asked is not None:
            assert self._format_field is not None
            texts.append(_resource(self._format_field, asked, len(own)))
            named.append((self._format_field, texts[-1]))
        _require_own_names(named)
        return texts[0] if len(texts) == 1 else {"anyOf": texts}

    def read(self, text: str, reason: str | None) -> tuple[JsonObject | None, str | None]:
        """The call in a whole text, if any, and the finish reason for the client.

        `reason`: why the text ended. As OpenAI specifies, the result is "stop" for the call of a
        function that the request names, and "tool_calls" for another call; a call that was cut
        keeps `reason`.
        """
        if call := self.call_in(text):
            return call, "stop" if self._is_named else "tool_calls"
        return self._cut_call_in(text), reason

    def call_in(self, text: str) -> JsonObject | None:
        """The call that a whole text is, in OpenAI's form; None for any other text.

        The arguments are copied from the text unchanged. If the text may also be a response
        format's, a call must have exactly the fields that its grammar writes.
        """
        fields = _fields(text)
        if self._shares and list(fields) != ["name", "arguments"]:
            return None
        name, _ = fields.get("name", (None, ""))
        if not isinstance(name, str) or name not in self._schemas:
            return None
        arguments, written = fields.get("arguments", fields.get("parameters", (None, "")))
        if not isinstance(arguments, dict):
            return None
        return _call(name, written)

    def _cut_call_in(self, text: str) -> JsonObject | None:
        """The beginning of a forced call, as its grammar writes it, if its name is whole."""
        if not self._forced or not text.startswith(CALL):
            return None
        try:
            name, end = _Decoder().raw_decode(text, len(CALL))
        except ValueError:
            return None
        return _call(name, text[end + len(REST) :] if text.startswith(REST, end) else "")

    def may_be_call(self, text: str) -> bool:
        """Whether an unfinished text may become a call."""
        if self._shares:  # a text of the format may have a `name` too
            return any(text.startswith(call) or call.startswith(text) for call in self._begun)
        return bool(self._schemas) and (not text.strip() or text.lstrip().startswith("{"))


def refused(place: str, expected: str, got: str) -> RequestError:
    return RequestError(f"{place}: expected {expected}, got {got}")


def texts_of(parts: Sequence[tuple[str, JsonObject]]) -> Parts:
    """The parts' schemas as text. RequestError names the place of a bad schema."""
    return tuple([(place, schema_text(place, schema)) for place, schema in parts])


def refused_part(parts: Parts) -> tuple[str, RequestError] | None:
    """The place whose schema llguidance rejects, and why; None if it rejects only all together."""
    for place, schema in parts:
        if error := refusal_of(Grammar("guided_json", schema)):
            return place, error
    return None


def _call(name: str, arguments: str) -> JsonObject:
    """A call in OpenAI's form. Templates of Mistral's models take only ids like its own: nine
    letters and digits."""
    function = {"name": name, "arguments": arguments}
    own = "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
    return {"id": own, "type": "function", "function": function}


def _name(tool: object) -> str | None:
    """Name of a function; None if `tool` is not a function."""
    function = None
    if isinstance(tool, dict) and tool.get("type") == "function":
        function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _function(tool: JsonObject) -> tuple[str, JsonObject]:
    """Name of a function, and the schema of its arguments."""
    name = _name(tool)
    if name is None:
        raise refused("tools", "functions with a name", brief(tool))
    schema = tool["function"].get("parameters")
    if schema is None:
        return name, NO_ARGUMENTS
    if not isinstance(schema, dict):
        raise refused("tools", f"a JSON schema as parameters of {name!r}", brief(schema))
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise refused("tools", f"parameters of type 'object' of {name!r}", brief(kind))
    return name, {**schema, "type": "object"}


def _of_newest(schema: JsonObject) -> JsonObject:
    """A schema without `$schema`: every version is read as the newest."""
    return {key: value for key, value in schema.items() if key != "$schema"}


def _resource(place: str, schema: JsonObject, number: int) -> JsonObject:
    """A schema that can be part of another one: its references are relative to its `$id`."""
    own = _resolved(place, f"https://kvgraph.invalid/{number}/", schema.get("$id"))
    return _of_newest(schema) | {"$id": own}


def _require_own_names(schemas: list[tuple[str, JsonObject]]) -> None:
    """Raise RequestError if two different schemas share an `$id`: a reference is then ambiguous."""
    known: dict[str, object] = {}
    for field, schema in schemas:
        for name, part in _resources(field, schema):
            try:
                is_own = known.setdefault(name, part) == part
            except RecursionError:
                is_own = False
            if not is_own:
                raise refused(field, "schemas of which each has its own $id", f"{name!r} twice")


def _resources(field: str, schema: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """All parts of a schema with an `$id`, including the schema itself, by resolved `$id`."""
    left: list[tuple[str, object]] = [("", schema)]
    while left:
        base, part = left.pop()
        if isinstance(part, dict):
            named = part.get("$id")
            if isinstance(named, str) and named.partition("#")[0]:
                base = _resolved(field, base, named)
                yield base, part
            left += [(base, each) for key, each in part.items() if key not in PLAIN]
        elif isinstance(part, list):
            left += [(base, each) for each in part]


def _resolved(field: str, base: str, name: object) -> str:
    """An `$id` resolved against `base`, without its fragment; `base` if there is none."""
    try:
        return urljoin(base, name).partition("#")[0] if isinstance(name, str) else base
    except ValueError as error:
        raise refused(field, "an $id that is a URI", brief(name)) from error


class _Decoder(json.JSONDecoder):
    """Decodes one value inside a text; ValueError for NaN and infinities, which JSON lacks."""

    def __init__(self) -> None:
        super().__init__(parse_constant=self._refuse)

    @staticmethod
    def _refuse(constant: str) -> None:
        raise ValueError(constant)

    def value(self, text: str, at: int) -> tuple[object, int]:
        """A value, and the position after it and following whitespace."""
        found, end = self.raw_decode(text, at)
        return found, _skipped(text, end)


def _fields(text: str) -> dict[str, tuple[object, str]]:
    """Fields of a text that is exactly one JSON object: value, and its text. Empty for any other
    text."""
    decoder, fields = _Decoder(), dict[str, tuple[object, str]]()
    try:
        at, end = _skipped(text, 0), len(text.rstrip(SPACE))
        while at < end - 1 and text[at] == ("," if fields else "{"):
            key, at = decoder.value(text, _skipped(text, at + 1))
            if not isinstance(key, str) or text[at] != ":":
                return {}
            start = _skipped(text, at + 1)
            value, at = decoder.value(text, start)
            fields[key] = value, text[start:at].rstrip(SPACE)
    except (ValueError, IndexError, RecursionError):
        return {}
    return fields if at == end - 1 and text[at] == "}" else {}


def _skipped(text: str, at: int) -> int:
    """Position after whitespace."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at
