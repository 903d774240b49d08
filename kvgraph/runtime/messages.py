"""Checks of a chat's messages, in OpenAI's form; all raise RequestError."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, cast

from kvgraph.contract.sizes import said
from kvgraph.errors import RequestError
from kvgraph.runtime.arguments import instance, sequence

Message: TypeAlias = dict[str, object]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first that is given counts. Templates read the first two. As
in transformers."""

DEVELOPER = "developer"
"""OpenAI's newer role for what others call system. Many templates drop messages of it."""

NAMES_DEVELOPER = re.compile(rf"""['"]{DEVELOPER}['"]""")
"""In a template that has the role."""

MARK = "<kvgraph:the-answer-goes-on-here> "
"""Behind a message that is continued. The space at its end is lost where a template trims."""

ASKS_FOR_NONE = re.compile(
    r"""\bcontent(?:['"][\])])?\s*(?:is\s+(?:not\s+)?none|[=!]=\s*[nN]one)\b"""
)
"""In a template that tells a call of tools by its content."""


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages, of plain JSON values, as templates take them.

    Fields that are None and an empty list of tool calls are left out, reasoning is there under the
    names that templates read, and arguments of tool calls are objects: templates write them as
    JSON.
    """
    listed = sequence("messages", "message", messages)
    if not listed:
        raise RequestError("messages: expected one or more, got none")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(listed)]


def plain_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Copies of JSON schemas of functions, of plain JSON values."""
    listed = sequence("tools", "tool", tools)
    return [plain_object(f"tools[{at}]", tool) for at, tool in enumerate(listed)]


def plain_object(name: str, value: Mapping[str, Any]) -> dict[str, object]:
    """A copy of a mapping, of plain JSON values: a template reaches no method of a caller's."""
    instance(name, value, Mapping, "names and values")
    for key in value:
        instance(f"{name}: names", key, str, "text")
    try:
        copy: dict[str, object] = json.loads(json.dumps(dict(value)))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name}: expected values of JSON, got another ({error})") from error
    return copy


def with_mark(messages: list[Message]) -> list[Message]:
    """The messages, with a mark behind the text of the last one, which an answer continues."""
    *others, last = messages
    content: object = _last_text(messages) + MARK
    if isinstance(parts := last.get("content"), list):
        content = [*parts[:-1], parts[-1] | {"text": content}]
    return [*others, last | {"content": content}]


def up_to_mark(text: str, messages: list[Message]) -> str:
    """A chat's text up to the end of its last message, as it was before `with_mark`. RequestError
    where its template does not show all of that message. As in transformers."""
    shown, found, rest = text.rpartition(MARK.strip())
    if not found or _last_text(messages).strip() not in shown:
        raise RequestError(
            "continue_final_message: expected a template that shows all of the last message, got "
            "one that does not"
        )
    is_trimmed = not rest.startswith(MARK[len(MARK.strip()) :])
    return shown.rstrip() if is_trimmed else shown


def _last_text(messages: list[Message]) -> str:
    """The text that the last message ends with."""
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        content = content[-1].get("text")
    if not isinstance(content, str):
        raise RequestError(
            f"continue_final_message: expected a last message with text, got {said(content)}"
        )
    return content


def with_content(messages: list[Message], content: str | None) -> list[Message]:
    """The messages, of which those without a content (tool calls alone) have this one."""
    return [
        message if message.get("content") is not None else {**message, "content": content}
        for message in messages
    ]


def as_parts(messages: list[Message]) -> list[Message]:
    """The messages with a list of one part for each text, for templates that take lists alone."""
    return [
        message | {"content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str)
        else message
        for message in messages
    ]


def joined_text(messages: list[Message]) -> list[Message]:
    """The messages with their parts joined, a line for each, for templates that take text alone."""
    return [
        message | {"content": "\n".join(part["text"] for part in content)}
        if isinstance(content := message.get("content"), list)
        else message
        for message in messages
    ]


def developers_as_system(messages: list[Message]) -> list[Message]:
    """The messages for a template that has no role developer."""
    return [
        message | {"role": "system"} if message["role"] == DEVELOPER else message
        for message in messages
    ]


def _message(where: str, given: Mapping[str, Any]) -> Message:
    fields = plain_object(where, given).items()
    message = {name: value for name, value in fields if value is not None}
    instance(f"{where}.role", message.get("role"), str, "text")
    content = message.get("content")
    if isinstance(content, list):
        for at, part in enumerate(content):
            _require_text(f"{where}.content[{at}]", part)
    elif content is not None or not message.get("tool_calls"):
        instance(f"{where}.content", content, str, "text or a list of text parts")
    if message.get("tool_calls") == []:  # templates ask whether there is a list
        del message["tool_calls"]
    if "tool_calls" in message:
        _read_arguments(f"{where}.tool_calls", message["tool_calls"])
    return _with_reasoning(message)


def _with_reasoning(message: Message) -> Message:
    given = [message[name] for name in REASONING if name in message]
    return {"thinking": given[0]} | message | {"reasoning_content": given[0]} if given else message


def _require_text(where: str, part: object) -> None:
    if not isinstance(part, dict):
        raise RequestError(f"{where}: expected a part with type and text, got {said(part)}")
    if part.get("type") != "text":
        raise RequestError(f"{where}.type: expected 'text', got {said(part.get('type'))}")
    instance(f"{where}.text", part.get("text"), str, "text")


def _read_arguments(where: str, calls: object) -> None:
    """Arguments that are JSON text, as OpenAI's are, become the object in it. Other text stays what
    it is: a call may have been cut."""
    instance(where, calls, list, "a list of tool calls")
    for at, call in enumerate(cast(list[object], calls)):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{where}[{at}]: expected a call of a function, got {said(call)}")
        if not isinstance(arguments := function.get("arguments"), str):
            continue
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments or "{}")
            function["arguments"] = read if isinstance(read, dict) else arguments
