"""A request that is understood: what is to be generated, and what the answer says with it."""

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


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer repeats it."""

    text: str = ""
    offsets: Sequence[int] = ()
    """Where each token of the prompt begins in `text`, where log-probabilities are asked for."""
    decode: Callable[[list[int]], str] | None = None
    """The text of token ids, where those of the prompt end inside a character: what is generated
    may begin with all of it."""


@dataclass(slots=True)
class Job:
    """`prompts`, each generated for with each of `params`."""

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
    """Of each prompt, where the answer repeats it."""
    drops_output: bool = False
    """Whether only the prompt was asked for."""
    tools: Tools | None = None
    counts_in_frames: bool = False
    """Whether each frame of a stream tells the usage so far."""
    texts: Sequence[Any] = ()
    """What was given, for the log."""
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Of the request, which may be the client's own."""
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        return self.kind + self.name

    def num_scores(self, tokens: int) -> int:
        """Log-probabilities that the answer has of so many tokens."""
        return tokens * (1 + (self.params[0].logprobs or 0)) if self.logprobs else 0

    def head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def usage_so_far(job: Job, generation: Generation) -> dict[str, object]:
    """What a frame of a stream carries too, where it is asked for."""
    if not job.counts_in_frames:
        return {}
    return {"usage": usage_of(generation, drops_output=job.drops_output)}


def require_output_room(
    prompt: Sequence[int],
    wanted: int | None,
    longest: int,
    *,
    prompt_field: str = "prompt",
    limit_field: str = "max_tokens",
) -> int:
    """Tokens to generate behind `prompt`: `wanted`, or all that fit.

    ServeError with both numbers where they never do, about the one of `prompt_field` and
    `limit_field` that is too much.
    """
    if wanted is not None and wanted < 1:
        raise ServeError(400, f"{limit_field}: expected >= 1, got {wanted}", param=limit_field)
    room = longest - len(prompt)
    if room < 1 or (wanted is not None and wanted > room):
        param = prompt_field if room < 1 else limit_field
        asked = f" and {wanted} of output" if wanted is not None else ""
        raise too_long(param, longest, f"{len(prompt)} of prompt{asked}")
    return room if wanted is None else wanted
