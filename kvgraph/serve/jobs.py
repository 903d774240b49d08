"""Job: a parsed request, with the data that its answer needs."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.runtime.tools import Tools
from kvgraph.serve.answers import Spelling, usage_of
from kvgraph.serve.errors import ServeError, too_long
from kvgraph.serve.generation import Generation

MOST_ENTRIES = 1 << 21
"""Most tokens and log-probabilities of an answer, over all its choices: about 450 MB of
memory."""

MOST_UNREAD_ENTRIES = 400_000
"""The same for the part of a stream that its client has not read."""


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

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * len(self.params)

    def head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def require_answer_room(job: Job) -> None:
    """Raise ServeError for an answer that may have more than MOST_ENTRIES tokens and
    log-probabilities, including those of prompts."""
    params = job.params[0]
    tokens = job.num_choices * params.max_new_tokens
    if params.prompt_logprobs is not None:
        tokens += len(job.params) * sum(map(len, job.prompts))
    if (entries := tokens * _entries(params.logprobs)) > MOST_ENTRIES:
        raise ServeError(
            400,
            f"request: expected at most {MOST_ENTRIES} tokens and log-probabilities in all "
            f"choices, got {entries} in {tokens} tokens; ask for fewer choices, max_tokens or "
            "logprobs",
        )


def _entries(logprobs: int | None) -> int:
    """A token, and its log-probabilities: its own and those of `logprobs` others."""
    return 1 if logprobs is None else 2 + logprobs


def most_tokens_each(count: int, logprobs: int | None) -> int:
    """Most tokens of each of `count` choices in an answer of MOST_ENTRIES."""
    return max(1, MOST_ENTRIES // (count * _entries(logprobs)))


def most_unread(job: Job, most: int) -> int:
    """Unread tokens at which a choice is cancelled: `most`, or an equal share of
    MOST_UNREAD_ENTRIES."""
    entries = job.num_choices * _entries(job.params[0].logprobs)
    return min(most, MOST_UNREAD_ENTRIES // entries) if job.streams else most


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
