"""Types of request bodies: OpenAI's fields, and vLLM's where OpenAI has none.

Unlisted fields are refused. OpenAI's fields without effect here have type `Ignored`.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, ClassVar, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.values import brief
from kvgraph.runtime.arguments import MOST_BIASES
from kvgraph.runtime.sampling_params import MOST_STOP_IDS, MOST_STOPS
from kvgraph.runtime.schemas import schema_as_read
from kvgraph.serve.errors import ServeError
from kvgraph.serve.shapes import StructuredOutputs, as_serve_errors, refused, schema_of_format

Ignored: TypeAlias = object
Count = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = list[Count]
Prompt = str | list[str | Count | TokenIds]
Stops = str | Annotated[list[str], Meta(max_length=MOST_STOPS)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's
    include_obfuscation: Ignored = None


class Sampled(Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that all requests for generation share."""

    model: str | None = None
    """Any text is accepted, since a server has one model."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    seed: int | None = None
    stop: Stops | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MOST_BIASES)] | None = None
    # vLLM's
    ignore_eos: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: Count | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Annotated[TokenIds, Meta(max_length=MOST_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    priority: Ignored = None
    request_id: Ignored = None
    guided_decoding_backend: Ignored = None
    # vLLM's; only values without effect are accepted
    skip_special_tokens: object = None
    spaces_between_special_tokens: object = None
    add_special_tokens: object = None
    use_beam_search: object = None
    length_penalty: object = None
    truncate_prompt_tokens: None = None
    guided_whitespace_pattern: None = None
    cache_salt: str | None = None
    guided_json: str | JsonObject | bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    guided_choice: list[str] | None = None
    structured_outputs: StructuredOutputs | None = None
    # OpenAI's, without effect here
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None
    prompt_cache_options: Ignored = None
    prediction: Ignored = None
    # OpenAI's, which would change the answer: null alone is taken
    audio: None = None
    functions: None = None
    function_call: None = None
    moderation: None = None
    web_search_options: None = None

    adds_special_tokens: ClassVar[bool] = False
    """Whether prompts get special tokens by default."""

    def require_plain(self) -> None:
        """Raise ServeError for vLLM's fields with values that would change the answer."""
        for name, plain in (*PLAIN, ("add_special_tokens", self.adds_special_tokens)):
            given = getattr(self, name)
            if given is not None and given != plain:
                raise refused(name, json.dumps(plain), brief(given))

    @property
    def num_each(self) -> int:
        return self.n or 1

    @property
    def counts_in_frames(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


PLAIN: tuple[tuple[str, object], ...] = (
    ("skip_special_tokens", True),
    ("spaces_between_special_tokens", True),
    ("use_beam_search", False),
    ("length_penalty", 1.0),
)
"""vLLM's fields, each with the value that has no effect."""


class Formatted(Sampled, forbid_unknown_fields=True, kw_only=True):
    format_field: ClassVar[str] = "response_format"
    """Name of the client's field for `response_format`."""
    response_format: JsonObject | None = None  # in completions an extension of vLLM's

    def schema(self) -> JsonObject | None:
        """The schema of `response_format`; ServeError for an unsupported format."""
        given = self.response_format
        return None if given is None else schema_of_format(self.format_field, given)

    def schema_as_read(self) -> JsonObject | None:
        """The schema of `response_format` as it is read: leniently, as OpenAI's API reads it,
        unless it is strict. ServeError as in `schema`, and if it is too large."""
        if (asked := self.schema()) is None:
            return None
        named = (self.response_format or {}).get("json_schema")
        is_strict = named.get("strict") if isinstance(named, dict) else None
        with as_serve_errors():
            return schema_as_read(self.format_field, asked, is_exact=is_strict is True)


class CompletionRequest(Formatted, forbid_unknown_fields=True, kw_only=True):
    adds_special_tokens: ClassVar[bool] = True
    prompt: Prompt
    max_tokens: Count | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts, each text or token ids. ServeError for a mixture."""
        given = self.prompt
        if isinstance(given, str):
            return [given]
        ids = [one for one in given if isinstance(one, int)]
        if not ids:
            return [one for one in given if not isinstance(one, int)]
        if len(ids) < len(given):
            raise ServeError(
                400, "prompt: expected token ids alone, got other prompts too", param="prompt"
            )
        return [ids]

    def require_supported(self) -> None:
        """Raise ServeError for fields of OpenAI or vLLM that are not supported here."""
        self.require_plain()
        if self.suffix:
            raise ServeError(400, "suffix: expected none, got a text", param="suffix")
        if self.best_of not in (None, self.num_each):
            raise ServeError(
                400, f"best_of: expected n={self.num_each}, got {self.best_of}", param="best_of"
            )
        if not all([self.prompt, *self.prompts]):
            raise ServeError(400, "prompt: expected a prompt, got an empty one", param="prompt")


class ChatRequest(Formatted, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[JsonObject], Meta(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = None
    modalities: list[str] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # OpenAI's, without effect here
    parallel_tool_calls: Ignored = None
    verbosity: Ignored = None

    def template_variables(self) -> JsonObject | None:
        """`chat_template_kwargs`, plus `reasoning_effort` unless they contain it."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        return {"reasoning_effort": self.reasoning_effort} | (self.chat_template_kwargs or {})

    def require_supported(self) -> None:
        """Raise ServeError for fields of OpenAI or vLLM that are not supported here."""
        self.require_plain()
        others = [kind for kind in self.modalities or () if kind != "text"]
        if others:
            sentence = f"modalities: expected text alone, got {brief(others[0])}"
            raise ServeError(400, sentence, param="modalities")
        if self.top_logprobs and not self.logprobs:
            got = "false" if self.logprobs is False else "none"
            sentence = f"top_logprobs: expected logprobs: true next to it, got {got}"
            raise ServeError(400, sentence, param="top_logprobs")


REQUEST_FIELDS = {
    *CompletionRequest.__struct_fields__,
    *ChatRequest.__struct_fields__,
    *[f"structured_outputs.{name}" for name in StructuredOutputs.__struct_fields__],
    "text.format",  # of /v1/responses
}
"""Names of fields that clients send: an error's `param` is one of them."""


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[JsonObject] | None = None
    tool_choice: str | JsonObject | None = None
    chat_template_kwargs: JsonObject | None = None
    reasoning_effort: str | None = None
    return_token_strs: bool | None = None


OF_CHATS = (
    "add_special_tokens",
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""Fields of a TokenizeRequest that a ChatRequest has too."""

OF_BOTH = ("add_special_tokens", "add_generation_prompt")
"""Fields among OF_CHATS that are allowed with a prompt; the others need messages."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    tokens: TokenIds
    model: str | None = None


Body = TypeVar("Body")

NOT_KEPT = "; no response is kept: send its items in `input` (set `store` to false in the client)"

HINTS = {
    "functions": "; `tools` is its newer name",
    "function_call": "; `tool_choice` is its newer name",
    "previous_response_id": NOT_KEPT,
    "conversation": NOT_KEPT,
}
"""Hints in the error messages for some of OpenAI's fields, by field."""


def decoded(body: bytes, kind: type[Body]) -> Body:
    """Decode a body as `kind`; ServeError names the field of a wrong type."""
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as error:
        field = _field(str(error))
        hint = HINTS.get(field or "", "")
        raise ServeError(400, f"body: {error}{hint}", param=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServeError(400, f"body: {_why_not_json(body, str(error))}") from error
    except RecursionError as error:
        raise ServeError(400, "body: expected JSON that nests less deeply") from error


def _decode(body: bytes, kind: type[Body]) -> Body:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if AS_FLOAT in str(error) and (whole := _with_integers(body)) != body:
            return msgspec.json.decode(whole, type=kind)
        raise


AS_FLOAT = "got `float` - at `$."
"""What msgspec says of a number in a field of another type."""


def _with_integers(body: bytes) -> bytes:
    """1.0 as 1, in fields that are numbers or lists of them: some clients have no integers."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, value in fields.items():
        if b'"' not in (text := bytes(value)):
            fields[name] = msgspec.Raw(WHOLE.sub(b"", text))
    return msgspec.json.encode(fields)


WHOLE = re.compile(rb"(?<=[0-9])\.0+(?![0-9eE])")
"""Behind the integer that a number is."""


ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Escape sequences in a body; the group matches half of a surrogate pair."""


MOST_SEARCHED = 1 << 16
"""Most bytes of an invalid body that are searched for bad escapes: about 4 ms."""


def _why_not_json(body: bytes, error: str) -> str:
    """The reason for invalid JSON. The parser only reports "truncated" for an empty body or half
    of a surrogate pair."""
    if not body:
        return "expected JSON, got an empty body"
    if len(body) <= MOST_SEARCHED and any(escape[1] for escape in ESCAPES.finditer(body)):
        return "expected text in Unicode, got half of a surrogate pair"
    return f"expected JSON, got what is none: {error}"


def _field(message: str) -> str | None:
    """The field in msgspec's message "... - at `$.field[0]`", or the unknown field it names."""
    _, found, path = message.partition("at `$.")
    if found:
        return path.rstrip("`").split(".")[0].split("[")[0]
    unknown = UNKNOWN.match(message)
    return unknown and unknown[1]


UNKNOWN = re.compile("Object contains unknown field `(.*)`$")
"""msgspec's message about an unknown field of the body itself."""
