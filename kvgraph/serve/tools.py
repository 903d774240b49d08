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
        shared: JsonObject = {}
        calls = []
        for name in self._forced:
            arguments = dict(self._schemas[name])
            for key in ("$defs", "definitions"):
                for inner, definition in (arguments.pop(key, None) or {}).items():
                    known = shared.setdefault(key, {}).setdefault(inner, definition)
                    if known != definition:
                        expected = f"one definition of {inner!r} in all functions"
                        raise _refused("tools", expected, "two")
            fields = {"name": {"const": name}, "arguments": arguments}
            required = {"required": ["name", "arguments"], "additionalProperties": False}
            calls.append({"type": "object", "properties": fields, **required})
        return {**(calls[0] if len(calls) == 1 else {"anyOf": calls}), **shared}

    def call_in(self, text: str) -> JsonObject | None:
        """The call that a whole text is, as OpenAI's clients read it; None of another text."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = found.get("name") if isinstance(found, dict) else None
        if not isinstance(name, str) or name not in self._schemas:
            return None
        arguments = found.get("arguments", found.get("parameters"))
        if not isinstance(arguments, dict):
            return None
        compact = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
        function = {"name": name, "arguments": compact}
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
    return name, schema or {"type": "object"}


def _refused(param: str, expected: str, got: str) -> ServeError:
    return ServeError(400, f"{param}: expected {expected}, got {got}", param=param)
