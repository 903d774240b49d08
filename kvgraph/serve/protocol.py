"""The bodies of requests: OpenAI's fields, and vLLM's for what OpenAI has not.

A field that is not listed is refused. Fields that OpenAI has and that change nothing here are
listed as such (`Ignored`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvgraph.contract.plain import JsonObject
from kvgraph.errors import RequestError
from kvgraph.runtime.arguments import MOST_BIASES
from kvgraph.runtime.grammars import KINDS
from kvgraph.runtime.sampling_params import ALIASES, MOST_STOP_IDS, MOST_STOPS, SamplingParams
from kvgraph.serve.errors import ServeError, require_vocabulary, without_id
from kvgraph.serve.shapes import Parts, Shape, StructuredOutputs, shape_of_choice

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
    """What both kinds of completion share."""

    model: str | None = None
    """Any text: a server has one model."""
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

    @property
    def num_each(self) -> int:
        return self.n or 1

    @property
    def counts_in_frames(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
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
            raise ServeError(400, "prompt: expected token ids alone, got text too", param="prompt")
        return [ids]

    def require_supported(self) -> None:
        """ServeError of what is OpenAI's and not here."""
        if self.suffix:
            raise ServeError(400, "suffix: expected none, got a text", param="suffix")
        if self.best_of not in (None, self.num_each):
            raise ServeError(
                400, f"best_of: expected n={self.num_each}, got {self.best_of}", param="best_of"
            )
        if not all([self.prompt, *self.prompts]):
            raise ServeError(400, "prompt: expected a prompt, got an empty one", param="prompt")


class ChatRequest(Sampled, forbid_unknown_fields=True, kw_only=True):
    messages: Annotated[list[JsonObject], Meta(min_length=1, max_length=4096)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: JsonObject | None = None
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

    def schema(self) -> JsonObject | None:
        """What a `response_format` asks for; ServeError for another one than OpenAI's."""
        given = self.response_format
        if given is None or given.get("type") == "text":
            return None
        if given.get("type") == "json_object":
            return {"type": "object"}
        named = given.get("json_schema") if given.get("type") == "json_schema" else None
        schema = named.get("schema") if isinstance(named, dict) else None
        if isinstance(schema, dict):
            return schema or {"type": "object"}
        raise ServeError(
            400,
            "response_format: expected type text, json_object, or json_schema with a schema, "
            f"got {brief(given)}",
            param="response_format",
        )

    def template_variables(self) -> JsonObject | None:
        """`chat_template_kwargs`, with `reasoning_effort` where they do not have it."""
        if self.reasoning_effort is None:
            return self.chat_template_kwargs
        return {"reasoning_effort": self.reasoning_effort} | (self.chat_template_kwargs or {})

    def require_supported(self) -> None:
        """ServeError of what is OpenAI's and not here."""
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
}
"""Names that a client may have sent: an error's `param` is one of them."""


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
    "add_generation_prompt",
    "continue_final_message",
    "tools",
    "tool_choice",
    "chat_template_kwargs",
    "reasoning_effort",
)
"""Fields of a TokenizeRequest that go with messages alone, as a ChatRequest has them."""


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    tokens: TokenIds
    model: str | None = None


Body = TypeVar("Body")

NEWER = {
    "functions": "; `tools` is its newer name",
    "function_call": "; `tool_choice` is its newer name",
}
"""What a refusal of one of OpenAI's old fields says too."""


def decoded(body: bytes, kind: type[Body]) -> Body:
    """The body of a request, whose types are those of `kind`; a ServeError names what is not."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        field = _field(str(error))
        hint = NEWER.get(field or "", "")
        raise ServeError(400, f"body: {error}{hint}", param=field) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServeError(400, f"body: {_why_not_json(body, str(error))}") from error
    except RecursionError as error:
        raise ServeError(400, "body: expected JSON that nests less deeply") from error


ESCAPES = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""Those of a body; the group is half of a surrogate pair."""


MOST_SEARCHED = 1 << 16
"""Bytes of a body that is no JSON: about 4 ms."""


def _why_not_json(body: bytes, error: str) -> str:
    """The parser says of an empty body, and of half a pair, that the data were truncated."""
    if not body:
        return "expected JSON, got an empty body"
    if len(body) <= MOST_SEARCHED and any(escape[1] for escape in ESCAPES.finditer(body)):
        return "expected text in Unicode, got half of a surrogate pair"
    return f"expected JSON, got what is none: {error}"


@dataclass(frozen=True, slots=True)
class ShapedParams(SamplingParams):
    """SamplingParams whose grammar is what field `origin` of a request says, or several fields.

    `parts`: as of a Shape. Without an `origin` the grammar is under its own name.
    """

    origin: str = ""
    parts: Parts = ()


def sampling_of(
    request: Sampled,
    vocab_size: int,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    shape: Shape | None = None,
) -> SamplingParams:
    """ServeError where a value is out of its range, or two fields say what the text must be.

    `shape`: what a field of chats alone says.
    """
    given: JsonObject = {
        "max_tokens": max_tokens,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    for name in COPIED:
        if (value := getattr(request, name)) is not None:
            given[name] = value
    if request.top_k == -1:  # vLLM's word for all
        given["top_k"] = 0
    if request.logit_bias is not None:
        biases = {_token_id(name): by for name, by in request.logit_bias.items()}
        require_vocabulary("logit_bias", max(biases, default=0), vocab_size)
        given["logit_bias"] = biases
    shape = _only_shape(request, shape)
    try:
        if shape is None:
            return ShapedParams(**given)
        given[shape.kind] = shape.value
        return ShapedParams(**given, origin=shape.origin, parts=shape.checked_parts())
    except RequestError as error:
        raise refusal(error, shape.origin if shape else "") from error


def _only_shape(request: Sampled, shape: Shape | None) -> Shape | None:
    """What is not under a name that SamplingParams has. ServeError for two fields that say it."""
    fields = (*KINDS, "guided_choice", "structured_outputs")
    given = [name for name in fields if getattr(request, name) is not None]
    if shape is None and request.structured_outputs is not None:
        shape = request.structured_outputs.shape()
        given.remove("structured_outputs")
    elif shape is None and request.guided_choice is not None:
        shape = shape_of_choice("guided_choice", request.guided_choice)
        given.remove("guided_choice")
    if shape is not None and given:
        sentence = f"{given[0]}: expected none together with {shape.field}, got one"
        raise ServeError(400, sentence, param=given[0])
    return shape


def refusal(error: Exception, origin: str = "") -> ServeError:
    """What the runtime refuses, under the names of the request's own fields, without the engine's
    id of it.

    `origin`: the field, or fields, that the grammar is of, unless it has a name of SamplingParams.
    """
    message = without_id(str(error))
    for name, own in ALIASES.items():
        message = message.replace(own, name)
    kind, found, rest = message.partition(":")
    if origin and kind in KINDS:
        message = f"{origin}{found}{rest}"
    head = re.split("[:,]", message, maxsplit=1)[0]
    known = head.partition("[")[0] in REQUEST_FIELDS
    return ServeError(400, message, param=head if known else None)


def brief(value: object) -> str:
    """The beginning of a value that is refused, on one line, however deep it is."""
    try:
        return repr(value)[:100]
    except RecursionError:
        return f"a {type(value).__name__} that nests deeply"


COPIED = (
    "n",
    "top_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
    "top_k",
    "min_p",
    "min_tokens",
    "repetition_penalty",
    "stop_token_ids",
    "include_stop_str_in_output",
    "guided_json",
    "guided_regex",
    "guided_grammar",
)
"""Fields that SamplingParams has too, under the same name."""


def _token_id(name: str) -> int:
    if name.isascii() and name.isdigit() and len(name) < 10:
        return int(name)
    raise ServeError(400, f"logit_bias: expected token ids, got {name[:40]!r}", param="logit_bias")


def _field(message: str) -> str | None:
    """The field of msgspec's "... - at `$.field[0]`"."""
    _, found, path = message.partition("at `$.")
    return path.rstrip("`").split(".")[0].split("[")[0] if found else None
