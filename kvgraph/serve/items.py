"""The body of /v1/responses: items, converted to a chat.

The server stores nothing between requests, so references to stored objects are refused.
"""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal

from msgspec import Meta, Struct

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.values import brief
from kvgraph.serve.errors import ServeError
from kvgraph.serve.protocol import NOT_KEPT, ChatRequest, Count, Ignored, Sampled
from kvgraph.serve.shapes import refused

LOGPROBS = "message.output_text.logprobs"
"""Value of `include` for log-probabilities; other values request items that never occur here."""

TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""Types of text parts, each with the field that has the text."""


class TextConfig(Struct, forbid_unknown_fields=True):
    format: JsonObject | None = None
    verbosity: Ignored = None


class Reasoning(Struct, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None
    mode: Ignored = None


class ResponseRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    input: str | Annotated[list[JsonObject], Meta(min_length=1, max_length=4096)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    include: list[str] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    background: bool | None = None
    truncation: Literal["disabled"] | None = None
    # OpenAI's fields that have no effect here
    access_programs: Ignored = None
    background_options: Ignored = None
    image: Ignored = None
    max_tool_calls: Ignored = None
    parallel_tool_calls: Ignored = None
    # OpenAI's fields that would change the answer: only null is accepted
    context_management: None = None
    conversation: None = None
    previous_response_id: None = None
    prompt: None = None

    @property
    def effort(self) -> str | None:
        return None if self.reasoning is None else self.reasoning.effort

    def format(self) -> JsonObject:
        return (self.text and self.text.format) or {"type": "text"}

    def has_logprobs(self) -> bool:
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())


class ResponseChat(ChatRequest, forbid_unknown_fields=True, kw_only=True):
    format_field: ClassVar[str] = "text.format"


class Chat:
    """Converts a request to a chat. ServeError for OpenAI's features that are not supported."""

    def __init__(self, given: ResponseRequest) -> None:
        if given.num_each > 1:
            raise refused("n", "1", str(given.n))
        if given.background:
            raise refused("background", "false", "true")
        self._messages: list[JsonObject] = []
        self._origins: list[str] = []
        """The request field that each message comes from."""
        if given.instructions is not None:
            self._add("instructions", "system", given.instructions)
        if isinstance(given.input, str):
            self._add("input", "user", given.input)
        else:
            for at, item in enumerate(given.input):
                self._read(f"input[{at}]", item)
        if not self._messages:
            raise refused("input", "a message", "none")
        shared: JsonObject = {name: getattr(given, name) for name in Sampled.__struct_fields__}
        self.request = ResponseChat(
            **shared,
            messages=self._messages,
            max_completion_tokens=given.max_output_tokens,
            logprobs=given.has_logprobs(),
            top_logprobs=given.top_logprobs,
            response_format=_format_of_chat(given.format()),
            tools=None if given.tools is None else [_tool_of_chat(tool) for tool in given.tools],
            tool_choice=_choice_of_chat(given.tool_choice),
            chat_template_kwargs=given.chat_template_kwargs,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=given.continue_final_message,
            reasoning_effort=given.effort,
        )

    def renamed(self, error: ServeError) -> ServeError:
        """Rename the chat's fields in `error` to those of the request; return `error`."""
        error.message = self._own_name(error.message)
        error.args = (error.message,)
        error.param = error.param and self._own_name(error.param)
        return error

    def _own_name(self, text: str) -> str:
        text = re.sub(r"^max_completion_tokens\b", "max_output_tokens", text)
        found = re.match(r"messages(?:\[(\d+)\])?", text)
        if found is None:
            return text
        own = "input" if found[1] is None else self._origins[int(found[1])]
        return own + text[found.end() :]

    def _add(self, origin: str, role: str, content: object, **fields: object) -> None:
        self._messages.append({"role": role, "content": content, **fields})
        self._origins.append(origin)

    def _read(self, origin: str, item: JsonObject) -> None:
        names_one = "id" in item and not {"role", "content"} & item.keys()
        kind = item.get("type") or ("item_reference" if names_one else "message")
        if kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise refused(f"{origin}.role", f"one of {', '.join(ROLES)}", brief(role))
            self._add(origin, role, _content(f"{origin}.content", item.get("content")))
        elif kind == "function_call":
            self._add_call(origin, item)
        elif kind == "function_call_output":
            content = _content(f"{origin}.output", item.get("output"))
            self._add(origin, "tool", content, tool_call_id=_text(origin, item, "call_id"))
        elif kind != "reasoning":  # dropped: it is specific to the model that wrote it
            expected = "message, function_call, function_call_output or reasoning"
            hint = NOT_KEPT if kind == "item_reference" else ""
            raise refused(f"{origin}.type", expected, brief(kind) + hint)

    def _add_call(self, origin: str, item: JsonObject) -> None:
        """Add a call to the assistant message before it, as chats require."""
        function = {name: _text(origin, item, name) for name in ("name", "arguments")}
        call = {"id": _text(origin, item, "call_id"), "type": "function", "function": function}
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._add(origin, "assistant", None)
        self._messages[-1].setdefault("tool_calls", []).append(call)


ROLES = ("user", "assistant", "system", "developer")


def _content(where: str, given: object) -> str | list[JsonObject]:
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise refused(where, "text or a list of parts", brief(given))
    return [_part(f"{where}[{at}]", part) for at, part in enumerate(given)]


def _part(where: str, given: object) -> JsonObject:
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(given, dict) or not isinstance(kind, str) or kind not in TEXTS:
        raise refused(f"{where}.type", "input_text or output_text", brief(kind or given))
    return {"type": "text", "text": _text(where, given, TEXTS[kind])}


def _text(where: str, of: JsonObject, name: str) -> str:
    given = of.get(name)
    if not isinstance(given, str):
        raise refused(f"{where}.{name}", "text", brief(given))
    return given


def _format_of_chat(given: JsonObject) -> JsonObject:
    """Convert a text format; one without a schema stays unchanged, and is refused later."""
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        return given
    return {"type": "json_schema", "json_schema": _but_type(given)}


def _tool_of_chat(given: JsonObject) -> JsonObject:
    if given.get("type") != "function":
        raise refused("tools", "functions", brief(given.get("type")))
    return {"type": "function", "function": _but_type(given)}


def _choice_of_chat(given: str | JsonObject | None) -> str | JsonObject | None:
    """Convert a tool choice; an invalid one stays unchanged, and is refused later."""
    if not isinstance(given, dict):
        return given
    if given.get("type") == "allowed_tools" and isinstance(given.get("tools"), list):
        tools = [_tool_of_chat(t) if isinstance(t, dict) else t for t in given["tools"]]
        return {"type": "allowed_tools", "allowed_tools": _but_type(given) | {"tools": tools}}
    if given.get("type") == "function":
        return {"type": "function", "function": _but_type(given)}
    return given


def _but_type(given: JsonObject) -> JsonObject:
    return {name: value for name, value in given.items() if name != "type"}
