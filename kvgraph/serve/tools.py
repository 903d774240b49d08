"""Calls of tools: JSON of a name and arguments, for any model.

A `tool_choice` of "required", or of one function, guides the text: it is one call of a tool, whose
arguments fit the tool's schema. With "auto" the text is free; one that is a call of a tool counts
as one. With "none" the model is shown no tools.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from urllib.parse import urljoin

from kvgraph.contract.plain import JsonObject
from kvgraph.runtime.grammars import PLAIN
from kvgraph.serve.errors import ServeError
from kvgraph.serve.protocol import ChatRequest, brief

MOST_TOOLS = 128

SPACE = " \t\n\r"
"""What JSON allows between its parts."""

NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a function without `parameters` takes, as OpenAI says."""


class Tools:
    """The functions that a chat may call. ServeError for what is no function, or for a choice of
    none of them."""

    def __init__(self, given: ChatRequest) -> None:
        self._schemas: dict[str, JsonObject] = {}
        choice = given.tool_choice
        for tool in [] if choice == "none" else given.tools or []:
            name, schema = _function(tool)
            self._schemas[name] = schema
        if len(self._schemas) > MOST_TOOLS:
            raise _refused("tools", f"at most {MOST_TOOLS} functions", str(len(self._schemas)))
        self._forced = self._forced_by(choice)
        self._is_named = isinstance(choice, dict)

    def _forced_by(self, choice: str | JsonObject | None) -> list[str]:
        """Names of which one must be called."""
        if choice in (None, "auto", "none"):
            return []
        if choice == "required":
            found = list(self._schemas)
        else:
            function = choice.get("function") if isinstance(choice, dict) else None
            name = function.get("name") if isinstance(function, dict) else None
            found = [known for known in self._schemas if known == name]
        if not found:
            expected = '"none", "auto", "required", or a function of the tools'
            raise _refused("tool_choice", expected, brief(choice))
        return found

    def __bool__(self) -> bool:
        return bool(self._schemas)

    def schema(self) -> JsonObject | None:
        """Of a text that must be a call; None where it may be another one."""
        if not self._forced:
            return None
        own = {str(i): _resource(self._schemas[name], i) for i, name in enumerate(self._forced)}
        _require_own_names(list(own.values()))
        calls = []
        for number, name in zip(own, self._forced, strict=True):
            fields = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}}
            required = {"required": ["name", "arguments"], "additionalProperties": False}
            calls.append({"type": "object", "properties": fields, **required})
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": own}

    def read(self, text: str, reason: str | None) -> tuple[JsonObject | None, str | None]:
        """The call that a whole text is, if any, and the finish reason for the client; `reason` is
        why the text ended.

        As OpenAI has it: "stop" for the call of a function that the request names, "tool_calls" for
        another one; of one that was cut, the reason stays.
        """
        if call := self.call_in(text):
            return call, "stop" if self._is_named else "tool_calls"
        return self._cut_call_in(text), reason

    def call_in(self, text: str) -> JsonObject | None:
        """The call that a whole text is, as OpenAI's clients read it; None of another text.

        Its arguments are those of the text, character by character.
        """
        fields = _fields(text)
        name, _ = fields.get("name", (None, ""))
        if not isinstance(name, str) or name not in self._schemas:
            return None
        arguments, written = fields.get("arguments", fields.get("parameters", (None, "")))
        if not isinstance(arguments, dict):
            return None
        return _call(name, written)

    def _cut_call_in(self, text: str) -> JsonObject | None:
        """The beginning of a forced call, as its grammar writes it, if its name is whole."""
        start, rest = '{"name":', ',"arguments":'
        if not self._forced or not text.startswith(start):
            return None
        try:
            name, end = _Decoder().raw_decode(text, len(start))
        except ValueError:
            return None
        return _call(name, text[end + len(rest) :] if text.startswith(rest, end) else "")

    def may_be_call(self, text: str) -> bool:
        """Whether a text that goes on may turn out to be a call."""
        return bool(self._schemas) and (not text.strip() or text.lstrip().startswith("{"))


def _call(name: str, arguments: str) -> JsonObject:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _function(tool: JsonObject) -> tuple[str, JsonObject]:
    """Name, and schema of the arguments."""
    function = tool.get("function") if tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise _refused("tools", "functions with a name", brief(tool))
    schema = function.get("parameters")
    if schema is None:
        return name, NO_ARGUMENTS
    if not isinstance(schema, dict):
        raise _refused("tools", f"a JSON schema as parameters of {name!r}", brief(schema))
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise _refused("tools", f"parameters of type 'object' of {name!r}", brief(kind))
    return name, {**schema, "type": "object"}


def _resource(schema: JsonObject, number: int) -> JsonObject:
    """A schema that may stand in another one: by its `$id` its references are its own.

    Without `$schema`: every version is read as the newest.
    """
    rest = {key: value for key, value in schema.items() if key != "$schema"}
    return rest | {"$id": _resolved(f"https://kvgraph.invalid/{number}/", schema.get("$id"))}


def _require_own_names(schemas: list[JsonObject]) -> None:
    """ServeError for two different schemas of one `$id`: a reference would find either."""
    known: dict[str, object] = {}
    for schema in schemas:
        for name, part in _resources(schema):
            try:
                is_own = known.setdefault(name, part) == part
            except RecursionError:
                is_own = False
            if not is_own:
                raise _refused("tools", "schemas of which each has its own $id", f"{name!r} twice")


def _resources(schema: JsonObject) -> Iterator[tuple[str, JsonObject]]:
    """The parts of a schema that have an `$id`, itself among them, with the whole of it."""
    left: list[tuple[str, object]] = [("", schema)]
    while left:
        base, part = left.pop()
        if isinstance(part, dict):
            named = part.get("$id")
            if isinstance(named, str) and named.partition("#")[0]:
                base = _resolved(base, named)
                yield base, part
            left += [(base, each) for key, each in part.items() if key not in PLAIN]
        elif isinstance(part, list):
            left += [(base, each) for each in part]


def _resolved(base: str, name: object) -> str:
    """An `$id` below `base`, without a fragment; `base` where it says nothing."""
    try:
        return urljoin(base, name).partition("#")[0] if isinstance(name, str) else base
    except ValueError as error:
        raise _refused("tools", "an $id that is a URI", brief(name)) from error


class _Decoder(json.JSONDecoder):
    """Of one value at a place of a text; ValueError for what JSON does not have, as NaN."""

    def __init__(self) -> None:
        super().__init__(parse_constant=self._refuse)

    @staticmethod
    def _refuse(constant: str) -> None:
        raise ValueError(constant)

    def value(self, text: str, at: int) -> tuple[object, int]:
        """A value, and where what follows it and white space begins."""
        found, end = self.raw_decode(text, at)
        return found, _skipped(text, end)


def _fields(text: str) -> dict[str, tuple[object, str]]:
    """Each field of a text that is one JSON object: its value, and how that is written. None of
    another text."""
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
    """Behind white space."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


def _refused(param: str, expected: str, got: str) -> ServeError:
    return ServeError(400, f"{param}: expected {expected}, got {got}", param=param)
