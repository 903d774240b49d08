"""Checks of a chat's messages, in OpenAI's form; all raise RequestError."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeAlias, cast

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.values import shown
from kvgraph.errors import RequestError
from kvgraph.runtime.arguments import instance, sequence

Message: TypeAlias = dict[str, object]

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; the first that is given counts. Templates read the first two, as
transformers provides them."""

DEVELOPER = "developer"
"""OpenAI's newer name of the role system. Many templates drop messages of this role."""

NAMES_DEVELOPER = re.compile(rf"""['"]{DEVELOPER}['"]""")
"""Matches a template that names the role developer."""

ASSISTANT = "assistant"

CALLS = ("tool_calls", "function_call", "audio")
"""What an assistant's message may have in place of a text."""

HINTS = {"function_call": "; `tool_calls` is its newer name", "audio": ""}
"""Names of CALLS that are not read, each with a hint."""

MARK = "<kvgraph:the-answer-goes-on-here> "
"""Mark after a message that is continued. A template that trims removes the space at its end."""

ASKS_FOR_NONE = re.compile(
    r"""\bcontent(?:['"][\])])?\s*(?:is\s+(?:not\s+)?none|[=!]=\s*[nN]one)\b"""
)
"""Matches a template that detects tool calls by a content of None."""


def plain_messages(messages: Iterable[Mapping[str, Any]]) -> list[Message]:
    """Copies of the messages as plain JSON values, in the form that templates take.

    Fields that are None and empty lists of tool calls are dropped. Reasoning is stored under the
    names that templates read.
    """
    listed = sequence("messages", "message", messages)
    if not listed:
        raise RequestError("messages: expected one or more, got none")
    return [_message(f"messages[{at}]", message) for at, message in enumerate(listed)]


def plain_tools(tools: Iterable[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Copies of functions' JSON schemas as plain JSON values."""
    listed = sequence("tools", "tool", tools)
    return [plain_object(f"tools[{at}]", tool) for at, tool in enumerate(listed)]


def plain_object(name: str, value: Mapping[str, Any]) -> dict[str, object]:
    """A copy of a mapping as plain JSON values, so that templates reach no object of the caller."""
    instance(name, value, Mapping, "names and values")
    for key in value:
        instance(f"{name}: names", key, str, "text")
    try:
        copy: dict[str, object] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{name}: expected values of JSON, got another ({error})") from error
    return copy


def with_mark(messages: list[Message]) -> list[Message]:
    """The messages, with a mark after the text of the last one, which the answer continues."""
    *others, last = messages
    content: object = _last_text(messages) + MARK
    if isinstance(parts := last.get("content"), list):
        content = [*parts[:-1], parts[-1] | {"text": content}]
    return [*others, last | {"content": content}]


def up_to_mark(text: str, messages: list[Message]) -> str:
    """The rendered text up to the end of the last message, without the mark of `with_mark`.

    RequestError if the template does not show all of that message. As in transformers."""
    shown, found, rest = text.rpartition(MARK.strip())
    if not found or _last_text(messages).strip() not in shown:
        raise RequestError(
            "continue_final_message: expected a template that shows all of the last message, got "
            "one that does not"
        )
    is_trimmed = not rest.startswith(MARK[len(MARK.strip()) :])
    return shown.rstrip() if is_trimmed else shown


def _last_text(messages: list[Message]) -> str:
    """The text at the end of the last message; of its last part if it has parts."""
    content = messages[-1].get("content")
    if isinstance(content, list) and content:
        content = content[-1].get("text")
    if not isinstance(content, str):
        raise RequestError(
            f"continue_final_message: expected a last message with text, got {shown(content)}"
        )
    return content


def with_content(messages: list[Message], content: str | None) -> list[Message]:
    """The messages, with `content` set in those without one (tool calls alone)."""
    return [
        message if message.get("content") is not None else {**message, "content": content}
        for message in messages
    ]


def as_parts(messages: list[Message], role: object = None) -> list[Message]:
    """The messages with each text as a list of one part, for templates that take only lists.

    `role`: change messages of this role only.
    """
    return [
        message | {"content": [{"type": "text", "text": content}]}
        if isinstance(content := message.get("content"), str) and role in (None, message["role"])
        else message
        for message in messages
    ]


def joined_text(messages: list[Message], others: Collection[object] = ()) -> list[Message]:
    """The messages with their text parts joined by newlines, for templates that take only text.

    `others`: roles whose messages stay as they are.
    """
    return [
        message | {"content": "\n".join(part["text"] for part in content)}
        if isinstance(content := message.get("content"), list) and message["role"] not in others
        else message
        for message in messages
    ]


def with_arguments(messages: list[Message], taken: Callable[[object], object]) -> list[Message]:
    """The messages, with `taken` applied to the arguments of each tool call."""

    def changed(call: JsonObject) -> JsonObject:
        function = call["function"]
        if "arguments" not in function:
            return call
        return call | {"function": function | {"arguments": taken(function["arguments"])}}

    return [
        message | {"tool_calls": [changed(call) for call in calls]}
        if isinstance(calls := message.get("tool_calls"), list)
        else message
        for message in messages
    ]


def as_object(arguments: object) -> object:
    """Arguments as an object, which templates write as JSON. OpenAI's are the text of one.

    Other text stays: of a call that was cut, and of values that a template cannot write again, such
    as half of a surrogate pair or a number that no float holds.
    """
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            read = json.loads(arguments or "{}")
            json.dumps(read, ensure_ascii=False, allow_nan=False).encode()
            return read if isinstance(read, dict) else arguments
    return arguments


def as_json(arguments: object) -> object:
    """Arguments as JSON text, for templates that join them to other text."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps(arguments, ensure_ascii=False)


def developers_as_system(messages: list[Message]) -> list[Message]:
    """The messages with role system for developer, for templates without role developer."""
    return [
        message | {"role": "system"} if message["role"] == DEVELOPER else message
        for message in messages
    ]


def _message(where: str, given: Mapping[str, Any]) -> Message:
    fields = plain_object(where, given).items()
    message = {name: value for name, value in fields if value is not None}
    instance(f"{where}.role", message.get("role"), str, "text")
    if message["role"] == ASSISTANT:
        _read_refusals(message)
    content = message.get("content")
    if isinstance(content, list):
        for at, part in enumerate(content):
            _require_text(f"{where}.content[{at}]", part)
    elif content is not None or not message.get("tool_calls"):
        if content is None:
            _require_none(where, message)
        instance(f"{where}.content", content, str, "text or a list of text parts")
    if message.get("tool_calls") == []:  # templates ask whether there is a list
        del message["tool_calls"]
    if "tool_calls" in message:
        _require_calls(f"{where}.tool_calls", message["tool_calls"])
    return _with_reasoning(message)


def _read_refusals(message: Message) -> None:
    """What an assistant refused with becomes its text, which may be empty."""
    content = message.get("content")
    if isinstance(content, list):
        message["content"] = [
            {"type": "text", "text": part["refusal"]}
            if isinstance(part, dict) and part.get("type") == "refusal" and "refusal" in part
            else part
            for part in content
        ]
    elif content is None and not any(message.get(name) for name in CALLS):
        message["content"] = message.get("refusal", "")


def _require_none(where: str, message: Message) -> None:
    """Raise RequestError for what a message without a text has in its place, if it is not read."""
    for name, hint in HINTS.items():
        if given := message.get(name):
            raise RequestError(
                f"{where}.{name}: expected text or tool_calls instead, got {shown(given)}{hint}"
            )


def _with_reasoning(message: Message) -> Message:
    given = [message[name] for name in REASONING if name in message]
    return {"thinking": given[0]} | message | {"reasoning_content": given[0]} if given else message


def _require_text(where: str, part: object) -> None:
    if not isinstance(part, dict):
        raise RequestError(f"{where}: expected a part with type and text, got {shown(part)}")
    if part.get("type") != "text":
        raise RequestError(f"{where}.type: expected 'text', got {shown(part.get('type'))}")
    instance(f"{where}.text", part.get("text"), str, "text")


def _require_calls(where: str, calls: object) -> None:
    instance(where, calls, list, "a list of tool calls")
    for at, call in enumerate(cast(list[object], calls)):
        if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
            raise RequestError(f"{where}[{at}]: expected a call of a function, got {shown(call)}")
