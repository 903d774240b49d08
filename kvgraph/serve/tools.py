"""Calls of tools: JSON of a name and arguments, for any model.

A `tool_choice` of "required", or of one function, guides the text: it is one call of a tool, whose
arguments fit the tool's schema. With "auto" the text is free; one that is a call of a tool counts
as one. Where a `response_format` is asked for too, the text is guided to be one or the other. With
"none" the model is shown no tools. With "allowed_tools" it is shown all of them, as OpenAI has it
(so that the prompt stays the same), and calls those that are allowed.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from urllib.parse import urljoin

from kvgraph.contract.plain import JsonObject
from kvgraph.runtime.grammars import PLAIN
from kvgraph.serve.errors import brief
from kvgraph.serve.protocol import ChatRequest
from kvgraph.serve.shapes import refused, require_small_schemas

MOST_TOOLS = 128

SPACE = " \t\n\r"
"""What JSON allows between its parts."""

CALL, REST = '{"name":', ',"arguments":'
"""How a guided call begins, and goes on behind the name."""

NO_ARGUMENTS: JsonObject = {"type": "object", "properties": {}, "additionalProperties": False}
"""What a function without `parameters` takes, as OpenAI says."""


class Tools:
    """The functions that a chat may call. ServeError for what is no function, or for a choice of
    none of them."""

    def __init__(self, given: ChatRequest) -> None:
        self._schemas: dict[str, JsonObject] = {}
        self._format_field = given.format_field
        choice = given.tool_choice
        for tool in [] if choice == "none" else given.tools or []:
            name, schema = _function(tool)
            if name in self._schemas:
                raise refused("tools", "functions of different names", f"{name!r} twice")
            self._schemas[name] = schema
        if len(self._schemas) > MOST_TOOLS:
            raise refused("tools", f"at most {MOST_TOOLS} functions", str(len(self._schemas)))
        if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
            choice = self._allow(choice)
        self._forced = self._forced_by(choice)
        self._is_named = isinstance(choice, dict)
        self._shares = not self._forced and given.schema() is not None
        """Whether a text is guided to be a call or another one."""
        self._begun = [
            f"{CALL}{json.dumps(name, ensure_ascii=False)}{REST}"
            for name in (self._schemas if self._shares else ())
        ]

    def _allow(self, given: JsonObject) -> str:
        """Keep the functions that may be called; the choice among them."""
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

    def _forced_by(self, choice: str | JsonObject | None) -> list[str]:
        """Names of which one must be called."""
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

    def schema(self, asked: JsonObject | None = None) -> JsonObject:
        """Of a text that is a call, or fits a `response_format` that is asked for."""
        called = self._forced or list(self._schemas)
        require_small_schemas("tools", [self._schemas[name] for name in called])
        if asked is not None:
            require_small_schemas(self._format_field, [asked])
        own = {str(i): _resource("tools", self._schemas[name], i) for i, name in enumerate(called)}
        texts: list[JsonObject] = []
        for number, name in zip(own, called, strict=True):
            fields = {"name": {"const": name}, "arguments": {"$ref": f"#/$defs/{number}"}}
            required = {"required": ["name", "arguments"], "additionalProperties": False}
            texts.append({"type": "object", "properties": fields, **required})
        named = [("tools", schema) for schema in own.values()]
        if asked is not None:
            number = str(len(own))
            own[number] = _resource(self._format_field, asked, len(own))
            named.append((self._format_field, own[number]))
            texts.append({"$ref": f"#/$defs/{number}"})
        _require_own_names(named)
        return {**(texts[0] if len(texts) == 1 else {"anyOf": texts}), "$defs": own}

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

        Its arguments are those of the text, character by character. Where another text is asked
        for, a call has the fields that its grammar writes, and no others.
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
        """Whether a text that goes on may turn out to be a call."""
        if self._shares:  # a format may have a `name`, too
            return any(text.startswith(call) or call.startswith(text) for call in self._begun)
        return bool(self._schemas) and (not text.strip() or text.lstrip().startswith("{"))


def _call(name: str, arguments: str) -> JsonObject:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _name(tool: object) -> str | None:
    """Of a function; None of what is none."""
    function = None
    if isinstance(tool, dict) and tool.get("type") == "function":
        function = tool.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) and name else None


def _function(tool: JsonObject) -> tuple[str, JsonObject]:
    """Name, and schema of the arguments."""
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


def _resource(field: str, schema: JsonObject, number: int) -> JsonObject:
    """A schema that may stand in another one: by its `$id` its references are its own.

    Without `$schema`: every version is read as the newest.
    """
    rest = {key: value for key, value in schema.items() if key != "$schema"}
    return rest | {"$id": _resolved(field, f"https://kvgraph.invalid/{number}/", schema.get("$id"))}


def _require_own_names(schemas: list[tuple[str, JsonObject]]) -> None:
    """ServeError for two different schemas of one `$id`: a reference would find either."""
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
    """The parts of a schema that have an `$id`, itself among them, with the whole of it."""
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
    """An `$id` below `base`, without a fragment; `base` where it says nothing."""
    try:
        return urljoin(base, name).partition("#")[0] if isinstance(name, str) else base
    except ValueError as error:
        raise refused(field, "an $id that is a URI", brief(name)) from error


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
