"""The bodies of requests: OpenAI's fields, and vLLM's for what OpenAI has not.

A field that is not listed is refused. Fields that OpenAI has and that change nothing here are
listed as such (`Ignored`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, NamedTuple, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from kvgraph.contract.plain import JsonObject
from kvgraph.errors import RequestError
from kvgraph.runtime.grammars import KINDS
from kvgraph.runtime.sampling_params import ALIASES, SamplingParams
from kvgraph.serve.errors import ServeError

Ignored: TypeAlias = object
Count = Annotated[int, Meta(ge=0, lt=2**31)]
TokenIds = list[Count]
Prompt = str | list[str | Count | TokenIds]
Stops = str | Annotated[list[str], Meta(max_length=16)]


class StreamOptions(Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Ignored = None


class Sampled(Struct, forbid_unknown_fields=True, kw_only=True):
    """What both kinds of completion share."""

    model: str = ""
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
    logit_bias: dict[str, float] | None = None
    # vLLM's
    ignore_eos: bool | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: Count | None = None
    repetition_penalty: float | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    cache_salt: str | None = None
    guided_json: str | JsonObject | bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    # OpenAI's, without effect here
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    @property
    def num_each(self) -> int:
        return self.n or 1


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
    add_generation_prompt: bool | None = None
    # OpenAI's, without effect here
    parallel_tool_calls: Ignored = None
    modalities: Ignored = None
    reasoning_effort: Ignored = None
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
            return schema
        raise ServeError(
            400,
            "response_format: expected type text, json_object, or json_schema with a schema, "
            f"got {brief(given)}",
            param="response_format",
        )


REQUEST_FIELDS = {*CompletionRequest.__struct_fields__, *ChatRequest.__struct_fields__}
"""Names that a client may have sent: an error's `param` is one of them."""


class TokenizeRequest(Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[JsonObject] | None = None
    model: str = ""
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: Ignored = None


class DetokenizeRequest(Struct, forbid_unknown_fields=True):
    tokens: TokenIds
    model: str = ""


Body = TypeVar("Body")


def decoded(body: bytes, kind: type[Body]) -> Body:
    """The body of a request, whose types are those of `kind`; a ServeError names what is not."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ServeError(400, f"body: {error}", param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ServeError(400, f"body: expected JSON, got what is none: {error}") from error
    except RecursionError as error:
        raise ServeError(400, "body: expected JSON that nests less deeply") from error


class Shape(NamedTuple):
    """What a text must be, and the field of the request that says so."""

    field: str
    schema: JsonObject


@dataclass(frozen=True, slots=True)
class ShapedParams(SamplingParams):
    """SamplingParams whose `guided_json` is what field `origin` of a request says."""

    origin: str = "guided_json"


def sampling_of(
    request: Sampled,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    shape: Shape | None = None,
) -> SamplingParams:
    """ServeError where a value is out of its range, or `shape` and a `guided_*` field are given."""
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
        given["logit_bias"] = {_token_id(name): by for name, by in request.logit_bias.items()}
    origin = "guided_json"
    if shape is not None:
        for name in KINDS:
            if name in given:
                sentence = f"{name}: expected none together with {shape.field}, got one"
                raise ServeError(400, sentence, param=name)
        origin, given["guided_json"] = shape
    try:
        return ShapedParams(**given, origin=origin)
    except RequestError as error:
        raise refusal(error, origin) from error


def refusal(error: Exception, origin: str = "guided_json") -> ServeError:
    """What the runtime refuses, under the names of the request's own fields.

    `origin`: the field that `guided_json` is of.
    """
    message = str(error)
    for name, own in ALIASES.items():
        message = message.replace(own, name)
    if message.startswith("guided_json:"):
        message = message.replace("guided_json", origin, 1)
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
