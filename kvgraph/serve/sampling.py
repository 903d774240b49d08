"""Converts a request's sampling fields to SamplingParams."""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec

from kvgraph.contract.plain import JsonObject
from kvgraph.errors import RequestError
from kvgraph.runtime.grammars import KINDS
from kvgraph.runtime.sampling_params import ALIASES, SamplingParams
from kvgraph.runtime.tools import Parts, texts_of
from kvgraph.serve.errors import ServeError, for_client, require_vocabulary
from kvgraph.serve.protocol import REQUEST_FIELDS, Sampled
from kvgraph.serve.shapes import Shape, shape_of_choice


@dataclass(frozen=True, slots=True)
class ShapedParams(SamplingParams):
    """SamplingParams with a grammar from the request's field `origin`, or from several fields.

    `parts`: as in a Shape. `origin` "": the grammar's field has the same name in SamplingParams.
    """

    origin: str = ""
    parts: Parts = ()


def sampling_of(
    request: Sampled,
    vocab_size: int,
    defaults: JsonObject,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None,
    shape: Shape | None = None,
) -> SamplingParams:
    """Build SamplingParams. ServeError for a value out of range, or two fields with a grammar.

    `defaults`: the model's own values of SamplingParams fields. `shape`: the grammar of the
    request's tools or `response_format`.
    """
    given: JsonObject = {
        "temperature": 1.0,  # OpenAI's default
        **defaults,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    for name in COPIED:
        if (value := getattr(request, name)) is not None:
            given[name] = value
    if request.top_k == -1:  # vLLM's value for all tokens
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
        return ShapedParams(**given, origin=shape.origin, parts=texts_of(shape.parts))
    except RequestError as error:
        raise refusal(error, shape.origin if shape else "") from error


def _only_shape(request: Sampled, shape: Shape | None) -> Shape | None:
    """The grammar from fields that SamplingParams lacks. ServeError if two fields give one."""
    fields = (*KINDS, "guided_choice", "structured_outputs")
    given = [name for name in fields if getattr(request, name) is not None]
    if shape is None and request.structured_outputs is not None:
        shape = request.structured_outputs.shape()
        given.remove("structured_outputs")
        same = {
            f"guided_{name}": value
            for name, value in msgspec.structs.asdict(request.structured_outputs).items()
        }
        given = [name for name in given if getattr(request, name) != same.get(name)]
    elif shape is None and request.guided_choice is not None:
        shape = shape_of_choice("guided_choice", request.guided_choice)
        given.remove("guided_choice")
    if shape is not None and given:
        sentence = f"{given[0]}: expected none together with {shape.field}, got one"
        raise ServeError(400, sentence, param=given[0])
    return shape


def refusal(error: Exception, origin: str = "") -> ServeError:
    """The ServeError for a runtime error, with the request's field names, and no engine request id.

    `origin`: field or fields of the grammar, if SamplingParams names it differently.
    """
    said, got, value = for_client(str(error)).partition(", got ")
    for name, own in ALIASES.items():
        said = said.replace(own, name)
    message = said + got + value
    kind, found, rest = message.partition(":")
    if origin and kind in KINDS:
        message = f"{origin}{found}{rest}"
    head = re.split("[:,]| ['\"]", message, maxsplit=1)[0]
    known = head.partition("[")[0] in REQUEST_FIELDS
    return ServeError(400, message, param=head if known else None)


COPIED = (
    "n",
    "temperature",
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
"""Fields with the same name in SamplingParams."""


def _token_id(name: str) -> int:
    if name.isascii() and name.isdigit() and len(name) < 10:
        return int(name)
    raise ServeError(400, f"logit_bias: expected token ids, got {name[:40]!r}", param="logit_bias")
