"""Renders messages with the chat templates of an artifact."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kvgraph.contract.files import read_fields, read_text
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.values import shown
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.runtime.arguments import flag, instance
from kvgraph.runtime.folder import is_listed
from kvgraph.runtime.messages import (
    ASKS_FOR_NONE,
    NAMES_DEVELOPER,
    Message,
    as_json,
    as_object,
    as_parts,
    developers_as_system,
    joined_text,
    plain_messages,
    plain_object,
    plain_tools,
    up_to_mark,
    with_arguments,
    with_content,
    with_mark,
)

if TYPE_CHECKING:
    from kvgraph.runtime.templates import Jinja

Messages: TypeAlias = Sequence[Mapping[str, Any]]

TEMPLATE = "chat_template.jinja"
MORE_TEMPLATES = "additional_chat_templates"
CONFIG = "tokenizer_config.json"
SPECIAL_TOKENS = "special_tokens_map.json"

PROBE = "a probe"
"""Message content that shows which forms of messages a template accepts."""

ARGUMENT = "kvgraph:an-argument"
"""Name of an argument of a call that shows whether a template takes an object or text."""

KEPT_FORMS = 64
"""Most entries of the cache of forms, by template and kinds of messages."""

Rendered: TypeAlias = Callable[[list[Message]], str | None]
"""Renders messages; None if the template fails."""

Form: TypeAlias = Callable[[list[Message]], list[Message]]
"""Converts messages to the form that a template renders."""


class ChatTemplates:
    """The chat templates in the artifact's `folder`, read on construction.

    `files`: names in its manifest. ArtifactError for a file that is not text, or not JSON.
    """

    def __init__(self, folder: Path, files: Container[str] | None = None) -> None:
        self._folder = folder
        paths = [folder / TEMPLATE, *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
        self._files = {
            "default" if path == paths[0] else path.stem: read_text(path, ArtifactError)
            for path in paths
            if path.exists() and is_listed(path.relative_to(folder).as_posix(), files)
        }
        self._config = self._fields(CONFIG, files)
        self._tokens = self._special_tokens(files)
        self._forms: dict[tuple[str, frozenset[object]], Form] = {}

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a chat.

        `tools`: JSON schemas of functions.
        `add_generation_prompt`: whether the text ends where an answer begins. None: the opposite
        of `continue_final_message`, which ends the text with the last message.
        `chat_template`: a template, or the name of one of the artifact's.
        `chat_template_kwargs`: more variables of the template, such as `documents`.
        The parts of a message's content are joined if the template takes only text for its role.
        Text becomes one part if the template takes only lists of parts. Arguments of tool calls
        are objects, or JSON text if the template joins them to other text. Role developer becomes
        system if the template does not name developer.
        RequestError: an invalid message, or a template that rejects the messages or fails on them.
        ArtifactError: no template, or a damaged one.
        """
        chat = plain_messages(messages)
        if tools is not None:
            tools = plain_tools(tools)
        more = {} if chat_template_kwargs is None else chat_template_kwargs
        own = plain_object("chat_template_kwargs", more)
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in own:
                raise RequestError(f"chat_template_kwargs: expected no {name!r}, got one")
        variables = {"documents": None} | self._tokens | own
        variables["tools"] = tools
        continues = flag("continue_final_message", continue_final_message)
        if add_generation_prompt is None:
            add_generation_prompt = not continues
        variables["add_generation_prompt"] = flag("add_generation_prompt", add_generation_prompt)
        if continues and add_generation_prompt:
            raise RequestError(
                "continue_final_message: expected no add_generation_prompt next to it, got both"
            )
        source = self._source(chat_template, tools is not None)
        if not NAMES_DEVELOPER.search(source):
            chat = developers_as_system(chat)
        if ASKS_FOR_NONE.search(source):
            chat = with_content(chat, None)
        taken = with_mark(chat) if continues else chat
        try:
            text = self._rendered(source, variables, taken)
        except ValueError as error:
            raise RequestError(f"messages: the chat template refused them: {error}") from error
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"messages: expected text in Unicode, got {error}") from error
        return up_to_mark(text, chat) if continues else text

    def _rendered(self, source: str, variables: Mapping[str, object], chat: list[Message]) -> str:
        """Render `chat`. ValueError if the template fails, also with "" for missing contents of
        tool calls: some templates concatenate every content."""
        taken = self._form(source, variables, chat)(chat)
        try:
            return self._jinja.render(source, {**variables, "messages": taken})
        except ValueError:
            filled = with_content(chat, "")
            if filled == chat:
                raise
        return self._rendered(source, variables, filled)

    def _source(self, given: str | None, has_tools: bool) -> str:
        """The source of the requested template, checked to compile."""
        if given is None:
            given = "tool_use" if has_tools and "tool_use" in self._sources else "default"
            if given not in self._sources:
                raise ArtifactError(
                    f"{self._folder}: expected a chat template in {TEMPLATE} or {CONFIG}, got "
                    f"{self._names}; pass chat_template, or add {TEMPLATE} to the model folder "
                    "and compile again"
                )
        instance("chat_template", given, str, "text or None")
        source = self._sources.get(given)
        if source is None and "{" not in given:  # a template has at least one variable
            raise RequestError(
                f"chat_template: expected a template, or the name of one of the artifact's "
                f"({self._names}), got {shown(given)}"
            )
        try:
            self._jinja.compile(given if source is None else source)
        except ValueError as error:
            failed = f"expected a template in Jinja, got one that does not parse ({error})"
            if source is None:
                raise RequestError(f"chat_template: {failed}") from error
            raise ArtifactError(f"{self._folder}: chat template {given!r}: {failed}") from error
        return given if source is None else source

    def _form(self, source: str, variables: Mapping[str, object], chat: list[Message]) -> Form:
        """The form in which the template takes `chat`, by probing it with test messages.

        Forms are cached by the kinds of messages. Uncached: messages with parts, as their form may
        depend on the variables, and templates that show no message."""
        if any(isinstance(each.get("content"), list) for each in chat):
            return self._probed_form(source, variables, chat)[0]
        asked = [(each["role"], "tool_calls" in each, bool(each.get("content"))) for each in chat]
        kinds = source, frozenset(asked)
        if (form := self._forms.get(kinds)) is None:
            form, is_certain = self._probed_form(source, variables, chat)
            if is_certain:
                if len(self._forms) >= KEPT_FORMS:
                    self._forms.clear()
                self._forms[kinds] = form
        return form

    def _probed_form(
        self, source: str, variables: Mapping[str, object], chat: list[Message]
    ) -> tuple[Form, bool]:
        """The form that the template takes, and whether the probe was conclusive. Probes have the
        same roles as `chat`, since a template may require some roles."""

        def rendered(messages: list[Message]) -> str | None:
            try:
                return self._jinja.render(source, {**variables, "messages": messages})
            except ValueError:
                return None

        probes = [each | {"content": PROBE} if each.get("content") else each for each in chat]
        as_taken, is_sure = self._probed_arguments(rendered, probes)
        probes = as_taken(probes)
        form, shows_text = self._probed_content(rendered, chat, probes)
        return lambda given: form(as_taken(given)), is_sure and shows_text

    def _probed_arguments(self, rendered: Rendered, probes: list[Message]) -> tuple[Form, bool]:
        """The form of tool calls that the template takes: with arguments as objects, or as text if
        it fails for objects or writes them as Python does."""

        def shown(taken: Callable[[object], object]) -> str | None:
            marked = with_arguments(probes, lambda _: taken({ARGUMENT: ""}))
            text = rendered(marked)
            return rendered(as_parts(marked)) if text is None else text

        objects = partial(with_arguments, taken=as_object)
        if all("tool_calls" not in each for each in probes):
            return objects, True
        text = shown(as_object)
        if text is not None and f"{{{ARGUMENT!r}" not in text:
            return objects, ARGUMENT in text
        text = shown(as_json)
        is_taken = text is not None and ARGUMENT in text
        return partial(with_arguments, taken=as_json) if is_taken else objects, is_taken

    def _probed_content(
        self, rendered: Rendered, chat: list[Message], probes: list[Message]
    ) -> tuple[Form, bool]:
        """The form of contents that the template takes."""
        text, parts = rendered(probes), rendered(as_parts(probes))
        shows_text, shows_parts = PROBE in (text or ""), PROBE in (parts or "")
        if shows_parts and not shows_text:
            return as_parts, True
        if text is not None and text == parts:
            return list, shows_text  # unchanged
        lists = {each["role"] for each in chat if isinstance(each.get("content"), list)}
        taken = [role for role in lists if text and rendered(as_parts(probes, role)) == text]
        return partial(joined_text, others=taken), shows_text

    @property
    def has_any(self) -> bool:
        return bool(self._sources)

    @property
    def _names(self) -> str:
        return ", ".join(self._sources) or "none"

    @cached_property
    def _jinja(self) -> Jinja:
        from kvgraph.runtime.templates import Jinja  # not needed for prompts of text

        return Jinja()

    @cached_property
    def _sources(self) -> dict[str, str]:
        """Template by name. Template files take precedence over those in the tokenizer's config."""
        given = self._config.get("chat_template")
        if self._files or given is None:
            return self._files
        try:
            sources = (
                {"default": given}
                if isinstance(given, str)
                else {entry["name"]: entry["template"] for entry in given}
            )
            if all(isinstance(text, str) for item in sources.items() for text in item):
                return sources
        except (TypeError, KeyError):
            pass  # the error below says it
        raise ArtifactError(
            f"{self._folder / CONFIG}: chat_template: expected text, or templates with names, got "
            f"{shown(given)}"
        )

    def _fields(self, name: str, files: Container[str] | None) -> JsonObject:
        return read_fields(self._folder / name, ArtifactError) if is_listed(name, files) else {}

    def _special_tokens(self, files: Container[str] | None) -> dict[str, str]:
        """Special tokens by name, from the same files as transformers takes them."""
        fields = self._config
        if "added_tokens_decoder" not in fields:
            fields = fields | self._fields(SPECIAL_TOKENS, files)
        extra = fields.get("extra_special_tokens")
        named = {name: token for name, token in fields.items() if name.endswith("_token")}
        contents = {
            name: token.get("content") if isinstance(token, dict) else token
            for name, token in (named | (extra if isinstance(extra, dict) else {})).items()
        }
        return {name: token for name, token in contents.items() if isinstance(token, str)}
