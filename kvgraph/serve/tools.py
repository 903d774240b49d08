"""Calls of tools: JSON of a name and arguments, for any model.

A `tool_choice` of "required", or of one function, guides the text: it is one call of a tool, whose
arguments fit the tool's schema. With "auto" the text is free; one that is a call of a tool counts
as one. With "none" the model is shown no tools.
"""

from __future__ import annotations

import json
import uuid

from kvgraph.contract.plain import JsonObject
from kvgraph.serve.errors import ServeError
from kvgraph.serve.protocol import ChatRequest

MOST_TOOLS = 128

SPACE = " \t\n\r"
"""What JSON allows between its parts."""

SCHEMAS_BY_NAME = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
"""Keywords of JSON Schema whose value has a schema for each name."""


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
            raise _refused("tool_choice", expected, str(choice)[:100])
        return found

    def __bool__(self) -> bool:
        return bool(self._schemas)

    @property
    def is_forced(self) -> bool:
        """Whether the text is a call."""
        return bool(self._forced)

    def schema(self) -> JsonObject | None:
        """Of a text that must be a call; None where it may be another one."""
        if not self._forced:
            return None
        own: JsonObject = {}
        calls = []
        for number, name in enumerate(self._forced):
            place = f"#/$defs/{number}"
            own[str(number)] = _moved(self._schemas[name], place)
            fields = {"name": {"const": name}, "arguments": {"$ref": place}}
            required = {"required": ["name", "arguments"], "additionalProperties": False}
            calls.append({"type": "object", "properties": fields, **required})
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), "$defs": own}

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
        function = {"name": name, "arguments": written}
        return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

    def may_be_call(self, text: str) -> bool:
        """Whether a text that goes on may turn out to be a call."""
        return bool(self._schemas) and (not text.strip() or text.lstrip().startswith("{"))


def _function(tool: JsonObject) -> tuple[str, JsonObject]:
    """Name, and schema of the arguments; any object where there is none."""
    function = tool.get("function") if tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise _refused("tools", "functions with a name", str(tool)[:100])
    schema = function.get("parameters")
    if schema is None:
        return name, {"type": "object"}
    if not isinstance(schema, dict):
        raise _refused("tools", f"a JSON schema as parameters of {name!r}", str(schema)[:100])
    kind = schema.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise _refused("tools", f"parameters of type 'object' of {name!r}", repr(kind)[:100])
    return name, {**schema, "type": "object"}


def _moved(schema: JsonObject, place: str) -> JsonObject:
    """A schema whose references to its own parts hold when it stands at `place` of another one."""
    root = schema.get("$id")
    names = ("#", f"{root}#") if isinstance(root, str) else ("#",)

    def moved(part: object) -> object:
        if isinstance(part, list):
            return [moved(each) for each in part]
        if not isinstance(part, dict):
            return part
        return {key: moved_value(key, value) for key, value in part.items()}

    def moved_value(key: str, value: object) -> object:
        if key in ("const", "enum", "default", "examples"):  # values, not schemas
            return value
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):  # a name may be that of a keyword
            return {name: moved(each) for name, each in value.items()}
        if key == "$ref" and isinstance(value, str):
            start = next((name for name in names if value.startswith(name)), None)
            return value if start is None else place + value[len(start) :]
        return moved(value)

    return {key: moved_value(key, value) for key, value in schema.items() if key != "$id"}


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
