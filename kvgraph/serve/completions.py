"""/v1/completions: text, or token ids, and what comes behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import LONG_TEXT
from kvgraph.runtime.sampling import Token
from kvgraph.serve.answers import (
    DONE,
    completion_logprobs,
    event,
    failure,
    offsets_of,
    reason_of,
    text_of,
    usage_of,
)
from kvgraph.serve.errors import ServeError, too_long
from kvgraph.serve.generation import Choice, Generation, salt_of
from kvgraph.serve.jobs import Echo, Job, require_output_room, usage_so_far
from kvgraph.serve.protocol import CompletionRequest, sampling_of
from kvgraph.serve.service import Served, Service

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""

OBJECT = "text_completion"


async def completion_job(service: Service, given: CompletionRequest) -> Job:
    """ServeError for what cannot be done, or does not fit."""
    served = service.require_ready()
    given.require_supported()
    count = len(given.prompts) * given.num_each
    if count > service.options.max_choices:
        most = service.options.max_choices
        raise ServeError(400, f"n: expected at most {most} choices, got {count}", param="n")
    served.admission.require_room(count, 0)  # before any text is tokenized
    drops_output = given.max_tokens == 0
    if drops_output and not given.echo:
        raise ServeError(
            400, "max_tokens: expected at least 1 without echo, got 0", param="max_tokens"
        )
    wanted = DEFAULT_MAX_TOKENS if given.max_tokens is None else max(1, given.max_tokens)
    fits = None if given.max_tokens is None else wanted
    prompts = await _tokenized(served, given.prompts, fits, drops_output)
    params = sampling_of(
        given,
        served.facts.vocab_size,
        max_tokens=wanted,
        logprobs=given.logprobs,
        prompt_logprobs=given.logprobs if given.echo else None,
    )
    echo = None
    if given.echo:
        texts = zip(given.prompts, prompts, strict=True)
        echo = [await _echo(served, *pair, offsets=given.logprobs is not None) for pair in texts]
    return Job(
        "cmpl",
        given.model or service.name,
        prompts,
        params.each(),
        salt_of(given.cache_salt),
        bool(given.stream),
        bool(given.stream_options and given.stream_options.include_usage),
        served.spell,
        given.logprobs is not None,
        echo,
        drops_output,
        counts_in_frames=given.counts_in_frames,
        texts=given.prompts,
    )


async def _tokenized(
    served: Served, given: list[str | list[int]], fits: int | None, drops_output: bool
) -> list[list[int]]:
    """Each prompt's tokens; ServeError where no `fits` tokens have room behind one. Of a default,
    None, as many are generated as fit."""
    longest = served.facts.longest
    is_long = sum([len(prompt) for prompt in given if isinstance(prompt, str)]) > LONG_TEXT
    found = []
    for prompt in given:
        tokens = prompt
        if isinstance(tokens, str):
            tokens = await served.tokenize(tokens, most=longest, is_long=is_long)
        if drops_output and len(tokens) == longest:
            got = f"{longest} of prompt, and an echo alone computes one of output too"
            raise too_long("prompt", longest, got)
        require_output_room(tokens, fits, longest)
        served.require_known("prompt", tokens)
        found.append(tokens)
    return found


async def _echo(served: Served, given: str | list[int], tokens: list[int], offsets: bool) -> Echo:
    text = given
    if not isinstance(text, str):
        text = await asyncio.to_thread(
            served.detokenize, tokens, special_tokens=False, about="prompt"
        )
    if not offsets:
        return Echo(text)
    return Echo(text, await asyncio.to_thread(served.offsets_in, text, tokens))


async def answer_completion(job: Job, generation: Generation) -> JsonObject:
    """All choices at once. ServeError (500) where one failed on its own."""
    pairs = zip(generation.choices, await generation.all_tokens(), strict=True)
    choices = [_piece(job, choice, tokens, None) for choice, tokens in pairs]
    return {**job.head(OBJECT), "choices": choices, "usage": _usage(job, generation)}


def _usage(job: Job, generation: Generation) -> JsonObject:
    return usage_of(generation, drops_output=job.drops_output)


async def completion_events(job: Job, generation: Generation) -> AsyncIterator[bytes]:
    """A frame for each piece; several tokens come in one where the reader is slower."""
    head = job.head(OBJECT)
    lengths: dict[int, int] = {}
    async for fresh in generation:
        for choice in fresh:
            error, text = choice.tokens[-1].error, text_of(choice.tokens)
            if error and not text:
                yield failure(generation, error)
                continue
            length = lengths.get(choice.index)
            piece = _piece(job, choice, choice.tokens, length)
            if length is None:
                length = len(piece["text"]) - len(text)
            widths = [token.width for token in choice.tokens] if job.logprobs else ()
            lengths[choice.index] = length + sum(widths)
            if piece["text"] or piece["finish_reason"] or job.logprobs:
                yield event({**head, "choices": [piece], **usage_so_far(job, generation)})
            if error:
                yield failure(generation, error)
    if job.sends_usage:
        yield event({**head, "choices": [], "usage": _usage(job, generation)})
    yield DONE


def _piece(job: Job, choice: Choice, tokens: list[Token], length: int | None) -> JsonObject:
    """What `tokens` add to a choice whose text has `length` characters; None: the first ones."""
    echo = Echo()
    if length is None and job.echo is not None:
        echo = job.echo[choice.index // len(job.params)]
    kept = [] if job.drops_output else tokens
    return {
        "index": choice.index,
        "text": echo.text + text_of(kept),
        "logprobs": _logprobs(job, choice, kept, echo, length),
        "finish_reason": "length" if job.drops_output else reason_of(tokens),
    }


def _logprobs(
    job: Job, choice: Choice, kept: list[Token], echo: Echo, length: int | None
) -> JsonObject | None:
    if not job.logprobs:
        return None
    kept = [token for token in kept if not token.error]
    scores = [token.logprobs for token in kept]
    ids = [token.token_id for token in kept]
    offsets = offsets_of(kept, len(echo.text) + (length or 0))
    if echo.offsets:
        scores = [*(choice.prompt_logprobs or ()), *scores]
        ids, offsets = [*choice.prompt, *ids], [*echo.offsets, *offsets]
    return completion_logprobs(scores, ids, offsets, job.spell)
