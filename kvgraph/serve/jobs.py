"""A request that is understood: what is to be generated, and what the answer says with it."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.serve.answers import Spelling
from kvgraph.serve.errors import ServeError
from kvgraph.serve.tools import Tools


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as the answer repeats it."""

    text: str = ""
    offsets: Sequence[int] = ()
    """Where each token of the prompt begins in `text`, where log-probabilities are asked for."""


@dataclass(slots=True)
class Job:
    """`prompts`, each generated for with each of `params`."""

    kind: str
    """Prefix of the answer's id."""
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
    texts: Sequence[Any] = ()
    """What was given, for the log."""
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.kind}-{uuid.uuid4().hex}"

    def head(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}


def require_output_room(prompt: Sequence[int], wanted: int | None, longest: int) -> int:
    """Tokens to generate behind `prompt`: `wanted`, or all that fit. ServeError with both numbers
    where they never do."""
    room = longest - len(prompt)
    if room < 1 or (wanted is not None and wanted > room):
        asked = f" and {wanted} of output" if wanted is not None else ""
        raise ServeError(
            400,
            f"prompt: expected at most {longest} tokens with the output (this server's longest "
            f"context), got {len(prompt)} of prompt{asked}",
            param="prompt" if room < 1 else "max_tokens",
        )
    return room if wanted is None else wanted
