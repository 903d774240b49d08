"""Job: a parsed request, with the data that its answer needs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.serve.answers import Spelling, usage_of
from kvgraph.serve.errors import ServeError, too_long
from kvgraph.serve.generation import Generation
from kvgraph.serve.tools import Tools


def require_choices(most: int, count: int) -> None:
    """Raise ServeError for a request of too many choices."""
    if count > most:
        raise ServeError(400, f"n: expected at most {most} choices, got {count}", param="n")


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer repeats it."""

    text: str = ""
    offsets: Sequence[int] = ()
    """Start of each prompt token in `text`; empty unless log-probabilities are requested."""
    decode: Callable[[list[int]], str] | None = None
    """Decodes token ids; set if the prompt ends inside a character, which the first generated
    tokens may complete."""


@dataclass(slots=True)
class Job:
    """Generates for each of `prompts` with each of `params`."""

    kind: str
    """Beginning of the answer's id."""
    model: str
    prompts: list[list[int]]
    params: list[SamplingParams]
    salt: bytes
    streams: bool
    sends_usage: bool
    spell: Spelling
    logprobs: bool
    echo: list[Echo] | None = None
    """Echo of each prompt, if the answer repeats prompts."""
    drops_output: bool = False
    """Whether the client asked for no output (max_tokens 0), only for the prompt."""
    tools: Tools | None = None
    counts_in_frames: bool = False
    """Whether each frame of a stream has the usage so far."""
    texts: Sequence[Any] = ()
    """The prompts as the client sent them, for the log."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Request id, which the client may set."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return self.kind + self.name

    def num_scores(self, tokens: int) -> int:
        """Number of log-probabilities in an answer of `tokens` tokens."""
        return tokens * (1 + (self.params[0].logprobs or 0)) if self.logprobs else 0

    def head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_so_far(job: Job, generation: Generation) -> dict[str, object]:
    """The `usage` field of a stream's frame; empty unless the client asked for it."""
    if not job.counts_in_frames:
        return {}
    return {"usage": usage_of(generation)}


def require_output_room(
    prompt: Sequence[int],
    wanted: int | None,
    longest: int,
    *,
    prompt_field: str = "prompt",
    limit_field: str = "max_tokens",
) -> int:
    """Number of tokens to generate after `prompt`: `wanted`, or all that fit.

    ServeError with both numbers if they do not fit; its param is `prompt_field` or `limit_field`,
    by the one that is too large.
    """
    if wanted is not None and wanted < 1:
        raise ServeError(400, f"{limit_field}: expected >= 1, got {wanted}", param=limit_field)
    room = longest - len(prompt)
    if room < 1 or (wanted is not None and wanted > room):
        param = prompt_field if room < 1 else limit_field
        asked = f" and {wanted} of output" if wanted is not None else ""
        raise too_long(param, longest, f"{len(prompt)} of prompt{asked}")
    return room if wanted is None else wanted
