"""The size of an answer, which is known before it is generated."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvgraph import Engine, SamplingParams
from kvgraph.serve.chats import chat_job
from kvgraph.serve.errors import ServeError
from kvgraph.serve.facts import facts_of
from kvgraph.serve.jobs import MOST_ENTRIES, Job, most_unread, require_answer_room
from kvgraph.serve.load import Load
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.protocol import ChatRequest
from kvgraph.serve.service import Service


def job_of(
    n: int = 1, prompts: int = 1, length: int = 8, *, streams: bool = False, **params: Any
) -> Job:
    spell: Any = None
    each = [SamplingParams(**params)] * n
    has_scores = "logprobs" in params
    return Job("a", "a", [[5] * length] * prompts, each, b"", streams, False, spell, has_scores)


ECHO = {"max_tokens": 1, "logprobs": 1, "prompt_logprobs": 1}


@pytest.mark.parametrize(
    "job",
    [
        job_of(128, max_tokens=100),
        job_of(128, max_tokens=16_384),
        job_of(max_tokens=32_768, logprobs=20),
        job_of(prompts=64, length=8_000, **ECHO),
        job_of(64, max_tokens=1489, logprobs=20),
    ],
)
def test_what_is_asked_for_in_practice(job: Job) -> None:
    require_answer_room(job)


@pytest.mark.parametrize(
    ("job", "got"),
    [
        (job_of(128, max_tokens=16_385), "2097280 in 2097280 "),
        (job_of(64, max_tokens=2000, logprobs=20), "2816000 in 128000 "),
        (job_of(prompts=100, length=16_000, **ECHO), "4800300 in 1600100 "),
    ],
)
def test_what_would_take_gigabytes(job: Job, got: str) -> None:
    with pytest.raises(ServeError, match=f"expected at most {MOST_ENTRIES} tokens .* got {got}"):
        require_answer_room(job)


@pytest.mark.parametrize(
    ("job", "most"),
    [
        (job_of(streams=True), 4096),
        (job_of(128, streams=True), 3125),
        (job_of(32, streams=True, logprobs=5), 1785),
        (job_of(128, streams=True, logprobs=20), 142),
        (job_of(128, logprobs=20), 4096),
    ],
)
def test_choices_of_a_stream_share_what_may_be_unread(job: Job, most: int) -> None:
    assert most_unread(job, 4096) == most


class Local(Service):
    """A service of an engine of this process."""

    async def load(self) -> None: ...

    async def close(self) -> None: ...

    def hurry(self) -> None: ...


@pytest.mark.parametrize(
    ("fields", "most"), [({}, 2048), ({"n": 128, "logprobs": True, "top_logprobs": 20}, 744)]
)
def test_a_chat_without_max_tokens_is_never_too_large(
    engine: Engine, fields: dict[str, Any], most: int
) -> None:
    """It gets as many tokens as fit, and its choices share what an answer may have."""
    service = Local("tiny", ServeOptions())
    unused: Any = None
    load = Load(engine.stats())
    service.serve(engine, unused, facts_of(engine), lambda: load, unused)
    given = ChatRequest(messages=[{"role": "user", "content": "Hi"}], **fields)
    job = asyncio.run(chat_job(service, given))
    require_answer_room(job)
    assert job.params[0].max_new_tokens == min(most, 2048 - len(job.prompts[0]))
