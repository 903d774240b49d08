"""/v1/completions: text, or token ids, and what comes behind."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from kvgraph.runtime.sampling import Token
from kvgraph.serve.answers import DONE, completion_logprobs, event, text_of, usage_of
from kvgraph.serve.errors import ServeError
from kvgraph.serve.generation import Choice, Generation, salt_of
from kvgraph.serve.jobs import Job, each_seeded, require_output_room
from kvgraph.serve.protocol import CompletionRequest, sampling_of
from kvgraph.serve.service import Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

OBJECT = "text_completion"


async def completion_job(service: Service, given: CompletionRequest) -> Job:
    """ServeError for what cannot be done, or does not fit."""
    served = service.require_ready()
    given.require_supported()
    count = len(given.prompts) * given.num_each
    if count > service.options.max_choices:
        raise ServeError(
            400, f"n: expected at most {service.options.max_choices} choices, got {count}"
        )
    served.admission.require_room(count, 0)  # before any text is tokenized
    prompts = [
        await served.tokenize(prompt) if isinstance(prompt, str) else prompt
        for prompt in given.prompts
    ]
    drops_output = given.max_tokens == 0
    if drops_output and not given.echo:
        raise ServeError(400, "max_tokens: expected at least 1 without echo, got 0")
    wanted = DEFAULT_MAX_TOKENS if given.max_tokens is None else max(1, given.max_tokens)
    for prompt in prompts:
        fits = 1 if drops_output else wanted
        room = require_output_room(
            prompt, None if given.max_tokens is None else fits, served.longest
        )
        wanted = min(wanted, room)
    params = sampling_of(
        given,
        max_tokens=wanted,
        logprobs=given.logprobs,
        prompt_logprobs=given.logprobs if given.echo else None,
    )
    texts = None
    if given.echo:
        texts = [
            prompt if isinstance(prompt, str) else served.detokenize(prompt)
            for prompt in given.prompts
        ]
    return Job(
        "cmpl",
        given.model or service.name,
        prompts,
        each_seeded(params, given.num_each),
        salt_of(given.cache_salt),
        bool(given.stream),
        bool(given.stream_options and given.stream_options.include_usage),
        served.spell,
        given.logprobs is not None,
        texts,
        drops_output,
        given.prompts,
    )


async def answer_completion(job: Job, generation: Generation) -> dict[str, Any]:
    """All choices at once. ServeError (500) where one failed on its own."""
    generated: dict[int, list[Token]] = {choice.index: [] for choice in generation.choices}
    async for fresh in generation:
        for choice in fresh:
            generated[choice.index] += choice.tokens
    choices = [_whole(job, choice, generated[choice.index]) for choice in generation.choices]
    return {**job.head(OBJECT), "choices": choices, "usage": usage_of(generation)}


def _whole(job: Job, choice: Choice, tokens: list[Token]) -> dict[str, Any]:
    if tokens[-1].error:
        raise ServeError(500, tokens[-1].error)
    reason = tokens[-1].finish_reason
    echo = "" if job.echo is None else job.echo[choice.index // len(job.params)]
    kept = [] if job.drops_output else tokens
    return {
        "index": choice.index,
        "text": echo + text_of(kept),
        "logprobs": _logprobs(job, choice, tokens, kept, echo),
        "finish_reason": "length" if job.drops_output else reason,
    }


def _logprobs(
    job: Job, choice: Choice, tokens: list[Token], kept: list[Token], echo: str
) -> dict[str, Any] | None:
    if not job.logprobs:
        return None
    scores = [token.logprobs for token in kept]
    ids = [token.token_id for token in kept]
    if job.echo is None:
        return completion_logprobs(scores, ids, job.spell, len(echo))
    return completion_logprobs(
        [*(tokens[0].prompt_logprobs or ()), *scores], [*choice.prompt, *ids], job.spell
    )


async def completion_events(job: Job, generation: Generation) -> AsyncIterator[bytes]:
    """A frame for each piece; several tokens come in one where the reader is slower."""
    head = job.head(OBJECT)
    begun: set[int] = set()
    lengths: dict[int, int] = {}
    async for fresh in generation:
        for choice in fresh:
            tokens = choice.tokens
            if error := tokens[-1].error:
                yield event({"error": {"message": error, "type": "server_error", "code": 500}})
                continue
            is_first = choice.index not in begun
            begun.add(choice.index)
            echo = ""
            if job.echo is not None and is_first:
                echo = job.echo[choice.index // len(job.params)]
            kept = [] if job.drops_output else tokens
            text = echo + text_of(kept)
            reason = tokens[-1].finish_reason
            if not (text or reason or job.logprobs):
                continue
            logprobs = None
            if job.logprobs:
                start = lengths.get(choice.index, 0)
                if is_first:
                    logprobs = _logprobs(job, choice, tokens, kept, "")
                else:
                    logprobs = completion_logprobs(
                        [token.logprobs for token in kept],
                        [token.token_id for token in kept],
                        job.spell,
                        start,
                    )
                lengths[choice.index] = start + len(text)
            piece = {"index": choice.index, "text": text, "logprobs": logprobs}
            yield event({**head, "choices": [{**piece, "finish_reason": reason}]})
    if job.sends_usage:
        yield event({**head, "choices": [], "usage": usage_of(generation)})
    yield DONE
