"""SamplingParams: how a request's tokens are chosen. All fields are checked here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, fields
from inspect import Parameter, Signature, signature
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from kvgraph.contract.generation import NUMBERS, require_in_range
from kvgraph.errors import RequestError
from kvgraph.ops.native import MOST_LOGPROBS
from kvgraph.runtime.arguments import (
    biases,
    flag,
    instance,
    integer,
    integers,
    optional_integer,
    require_fields,
    texts,
)
from kvgraph.runtime.grammars import KINDS, Grammar, grammar_of

MOST_STOPS = 16
MOST_STOP_CHARACTERS = 4096
MOST_STOP_IDS = 1024
MOST_COMPLETIONS = 128
LEAST_SEED = -(1 << 63)

ALIASES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}
"""vLLM's and OpenAI's names for fields of SamplingParams."""


class ByEitherName(type):
    """Metaclass of dataclasses whose constructor takes ALIASES too.

    The aliases are not fields, since `dataclasses.replace` would pass back the old values that it
    reads from them. `replace` passes every field by name; if a call gives all fields and an alias,
    the alias wins.
    """

    if not TYPE_CHECKING:  # checkers read the fields

        def __call__(cls, *values: object, **given: object) -> SamplingParams:
            is_replaced = given.keys() >= {each.name for each in fields(cls)}
            require_fields(cls, values, given, {} if is_replaced else ALIASES)
            for alias, name in ALIASES.items():
                if (value := given.pop(alias, None)) is not None:
                    given[name] = value
            return super().__call__(*values, **given)

        @property
        def __signature__(cls) -> Signature:
            _, *own = signature(cls.__init__).parameters.values()
            kind, annotation = Parameter.KEYWORD_ONLY, "int | None"
            more = [Parameter(name, kind, default=None, annotation=annotation) for name in ALIASES]
            return Signature([*own, *more])


@dataclass(frozen=True, slots=True)
class SamplingParams(metaclass=ByEitherName):
    """Parameters that decide how one request's tokens are chosen, and when it ends.

    `temperature` 0 is greedy (`min_p`, `top_k`, `top_p`, `seed` then have no effect). `min_p` keeps
    the tokens of at least that share of the likeliest one's probability; `top_k` 0 keeps all;
    `top_p` keeps the smallest set of likeliest tokens whose probabilities reach it. With a `seed` a
    request's tokens do not depend on its batch; on a CPU its numbers do not either, bit for bit
    (but for bfloat16 weights on AMX, and for linear layers that are not packed).

    Generation stops after `max_new_tokens`, at a token of `stop_token_ids` (at most 1024), at the
    model's own end tokens unless `ignore_eos`, or at a string of `stop` (one, or at most 16, with
    at most 4096 characters together). The text ends before that string, or after it with
    `include_stop_str_in_output`; text that may become a stop string is held back. The stop string
    that is complete first counts. No stop or end token comes before `min_new_tokens` other tokens,
    and no stop string counts before `min_new_tokens` tokens.
    `max_tokens` and `min_tokens` are aliases of the two limits; a call gives one of the names.
    `dataclasses.replace` takes either name too, and the alias if both are given.

    `logit_bias` (token id -> number in [-100, 100], at most 1024) is added to the logits.
    `repetition_penalty` divides the logits above 0 of tokens of prompt and output, and multiplies
    the others. `frequency_penalty` is subtracted from a token's logit once per occurrence in the
    output, `presence_penalty` once in all. The order is vLLM's: banned tokens, bias, penalties;
    temperature, min-p, top-k, top-p.

    `logprobs` asks for the log-probability and rank of each token, and for that many of the
    likeliest ones (0 to 20); `prompt_logprobs` asks the same about the prompt's tokens. Both are of
    the model's own distribution, before all of the above. A request with `prompt_logprobs` computes
    its whole prompt, in chunks of at most 128 tokens; it takes no pages of the prefix cache, and
    leaves none there.

    `n` (1 to 128): completions of each prompt that `Engine.generate` returns; they share the pages
    of the prompt. With a `seed`, completion i has seed + i.

    `guided_json` (a JSON schema, as a dict or text; True or {} for any object), `guided_regex` or
    `guided_grammar` (Lark or GBNF) constrain the text; at most one is given. JSON has no free
    whitespace. The request ends with "stop" as soon as nothing can follow; before that, end tokens
    are allowed exactly where the text is complete. A text cut by `max_new_tokens` or a stop string
    is incomplete. If only an end is possible, it comes even before `min_new_tokens` other tokens.

    RequestError names a field of another type, or out of its range; TypeError an unknown one.
    """

    max_new_tokens: int = 64
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_new_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    guided_json: Mapping[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_grammar: str | None = None
    if TYPE_CHECKING:  # checkers read the constructor's parameters
        max_tokens: int | None = None
        min_tokens: int | None = None
    else:
        max_tokens: ClassVar[property] = property(attrgetter("max_new_tokens"))
        min_tokens: ClassVar[property] = property(attrgetter("min_new_tokens"))

    def __post_init__(self) -> None:
        own: dict[str, object] = {
            "max_new_tokens": integer("max_new_tokens", self.max_new_tokens, 1),
            "min_new_tokens": integer("min_new_tokens", self.min_new_tokens, 0),
            "top_k": integer("top_k", self.top_k, 0),
            "n": integer("n", self.n, 1, MOST_COMPLETIONS),
            "seed": optional_integer("seed", self.seed, LEAST_SEED),
            "stop_token_ids": integers("stop_token_ids", self.stop_token_ids, 0, MOST_STOP_IDS),
            "stop": texts("stop", self.stop, MOST_STOPS, MOST_STOP_CHARACTERS),
            "include_stop_str_in_output": flag(
                "include_stop_str_in_output", self.include_stop_str_in_output
            ),
            "ignore_eos": flag("ignore_eos", self.ignore_eos),
            "logit_bias": biases("logit_bias", self.logit_bias),
            "logprobs": optional_integer("logprobs", self.logprobs, 0, MOST_LOGPROBS),
            "prompt_logprobs": optional_integer(
                "prompt_logprobs", self.prompt_logprobs, 0, MOST_LOGPROBS
            ),
        }
        if grammar := grammar_of({kind: getattr(self, kind) for kind in KINDS}):
            own[grammar.kind] = grammar.text
        for name in NUMBERS:
            own[name] = require_in_range(name, getattr(self, name))
        for name, value in own.items():
            object.__setattr__(self, name, value)
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens: expected at most max_new_tokens={self.max_new_tokens}, "
                f"got {self.min_new_tokens}"
            )

    def each(self) -> list[SamplingParams]:
        """One SamplingParams per completion; completion i gets seed + i."""
        one = self._with(n=1)
        if self.seed is None:
            return [one] * self.n
        return [one._with(seed=self.seed + i) for i in range(self.n)]

    def _with(self, **given: object) -> SamplingParams:
        """A copy with valid fields `given`; no field is checked again, as grammars take long."""
        made = copy(self)
        for name, value in given.items():
            object.__setattr__(made, name, value)
        return made

    def clamped_to(self, room: int) -> SamplingParams:
        """A copy with at most `room` new tokens; `self` if it asks for fewer, or if `room` < 1."""
        return self._with(max_new_tokens=room) if 0 < room < self.max_new_tokens else self

    @property
    def grammar(self) -> Grammar | None:
        """The grammar that the text must match, if one of the `guided_` fields is given."""
        for kind in KINDS:
            if (text := getattr(self, kind)) is not None:
                return Grammar(kind, text)
        return None


def require_single(sampling: SamplingParams) -> None:
    """Raise RequestError unless `sampling` is SamplingParams of one completion."""
    instance("sampling", sampling, SamplingParams, "SamplingParams")
    if sampling.n > 1:
        raise RequestError(
            f"n: expected 1 of a single request, got {sampling.n}; use Engine.generate, or one "
            "request for each of `SamplingParams.each()`"
        )
