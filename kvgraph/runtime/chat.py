"""Chats: messages in OpenAI's form become a prompt, and its answer may be calls of tools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from kvgraph.contract.files import read_fields
from kvgraph.contract.generation import GENERATION, suggested
from kvgraph.contract.manifest import read_manifest
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import NAME as TOKENIZER
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.runtime.chat_templates import TEMPLATE, ChatTemplates, Messages
from kvgraph.runtime.folder import is_listed
from kvgraph.runtime.grammars import KINDS
from kvgraph.runtime.guide import NOT_TAKEN
from kvgraph.runtime.messages import plain_object, plain_tools
from kvgraph.runtime.sampling_params import SamplingParams, require_single
from kvgraph.runtime.text import Completion, TextCodec
from kvgraph.runtime.tools import Tools, refused_part, texts_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ChatFields(TypedDict, total=False):
    """Keywords of `ChatTemplates.render`, without the messages."""

    tools: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool | None
    continue_final_message: bool
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None


class Prompts:
    """Converts text, and messages in OpenAI's form, to token ids by an artifact's folder.

    It needs no session. `files`: names in the manifest; others are not read. Keywords for messages
    are the fields of `ChatFields`.
    """

    def __init__(self, folder: Path, files: Container[str] | None = None) -> None:
        self._text = TextCodec(folder, files)
        self._templates = ChatTemplates(folder, files)
        self.folder = folder
        self._has_generation = is_listed(GENERATION, files)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the `tokenizers` package; None if the artifact has none."""
        return self._text.tokenizer

    @property
    def missing_chat_file(self) -> str | None:
        """A file that chats need and the artifact lacks; None if it has all."""
        if self._text.tokenizer is None:
            return TOKENIZER
        return None if self._templates.has_any else TEMPLATE

    def default_sampling_params(self) -> SamplingParams:
        """Sampling parameters of the model's generation_config.json, else greedy sampling.

        `dataclasses.replace(params, max_new_tokens=100)` adds a limit. ArtifactError for a damaged
        file, and for a value that no request can have.
        """
        return self.suggested_params({})

    def suggested_params(self, given: JsonObject) -> SamplingParams:
        """Return `default_sampling_params()`, with `given` fields in place of the file's."""
        return self._suggested(given)[1]

    def suggested_fields(self) -> JsonObject:
        """Fields of generation_config.json, by the names of SamplingParams.

        ArtifactError as in `default_sampling_params`.
        """
        return self._suggested({})[0]

    def _suggested(self, given: JsonObject) -> tuple[JsonObject, SamplingParams]:
        path = self.folder / GENERATION
        fields = suggested(read_fields(path, ArtifactError) if self._has_generation else {})
        try:
            return fields, SamplingParams(**fields | given)
        except RequestError as error:
            raise ArtifactError(f"{path}: {error}") from error

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt. `special_tokens`: add those that the tokenizer adds to a text."""
        return self._text.tokenize(text, special_tokens=special_tokens)

    def apply_chat_template(self, messages: Messages, **fields: Unpack[ChatFields]) -> list[int]:
        """Token ids of a chat, rendered by the artifact's template.

        Special tokens that the template or a message contains are recognized; none is added.
        `tools`: JSON schemas of functions.
        `add_generation_prompt`: whether the text ends where an answer begins (default: True).
        `continue_final_message`: whether the text ends with the last message's text, which the
        answer continues. There is no generation prompt then.
        `chat_template`: a template, or the name of one of the artifact's.
        `chat_template_kwargs`: more variables of the template.
        RequestError: an invalid message, or a template that rejects the messages or fails on them.
        ArtifactError: no template, or a damaged one.
        """
        return self._text.tokenize(self.render_chat(messages, **fields), special_tokens=False)

    def render_chat(self, messages: Messages, **fields: Unpack[ChatFields]) -> str:
        """The text of a chat; keywords and errors are those of `apply_chat_template`."""
        return self._templates.render(messages, **fields)


def prompts_of(folder: Path) -> Prompts:
    """`Prompts` by an artifact that is not loaded."""
    return Prompts(folder, read_manifest(folder).files)


class Chats(Prompts, ABC):
    """Methods of an engine that take messages: dicts with role and content, in OpenAI's form."""

    @abstractmethod
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]: ...

    def chat(
        self,
        messages: Messages,
        sampling: SamplingParams | None = None,
        *,
        tool_choice: str | Mapping[str, Any] | None = None,
        **fields: Unpack[ChatFields],
    ) -> Completion:
        """Generate the answer to a chat; for its pieces, `stream(apply_chat_template(messages))`.

        `tool_choice`: in OpenAI's form. "required", or one function, guides the text to be a call
        of one of `tools`, with arguments that fit its schema. "auto" leaves the text free. "none"
        shows the model no tools. None: as "auto", and `tools` may have any form that the template
        takes. If the text is a call, `tool_calls` of the completion has it.
        The other keywords and errors are those of `apply_chat_template`; errors of `submit` are
        possible too. With a `tool_choice`, RequestError for tools that are not functions of
        different names, and for a choice that no tool fits; with a forced call also for a grammar
        in `sampling`, and for a schema that is above the limits or that llguidance rejects.
        """
        if sampling is not None:
            require_single(sampling)
        if (given := fields.get("tools")) is not None:
            fields["tools"] = given = plain_tools(given)
        tools = _tools_of(given or [], tool_choice)
        if tool_choice == "none":
            fields["tools"] = None
        prompt = self.apply_chat_template(messages, **fields)
        if not tools.forces_call:
            done = self.generate([prompt], sampling)[0]
        else:
            done = self._called(prompt, sampling or SamplingParams(), tools)
        call, _ = tools.read(done.text, done.finish_reason)
        return replace(done, tool_calls=(call,)) if call else done

    def _called(self, prompt: list[int], sampling: SamplingParams, tools: Tools) -> Completion:
        """Generate a text that is guided to be a call."""
        if given := [name for name in KINDS if getattr(sampling, name) is not None]:
            raise RequestError(
                f"{given[0]}: expected none next to a tool_choice that forces a call, got one"
            )
        parts = texts_of(tools.parts)
        try:
            return self.generate([prompt], replace(sampling, guided_json=tools.schema()))[0]
        except RequestError as error:
            found = refused_part(parts) if NOT_TAKEN in str(error) else None
            place, reason = found or ("tools", error)
            _, field, said = str(reason).rpartition("guided_json: ")
            if not field:
                raise
            raise RequestError(f"{place}: {said}") from error


def _tools_of(given: list[JsonObject], choice: str | Mapping[str, Any] | None) -> Tools:
    """The functions of a chat, which may lack the object around them that has their type.

    Without a choice, tools that cannot be called are only shown to the model.
    """
    if isinstance(choice, Mapping):
        choice = plain_object("tool_choice", choice)
    functions = [
        {"type": "function", "function": tool} if _is_bare_function(tool) else tool
        for tool in given
    ]
    try:
        return Tools(functions, choice)
    except RequestError:
        if choice is not None:
            raise
        return Tools([])


def _is_bare_function(tool: JsonObject) -> bool:
    is_function = tool.get("type", "function") == "function"
    return is_function and "function" not in tool and isinstance(tool.get("name"), str)
