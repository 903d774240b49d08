"""/v1/completions: converts prompts (text or token ids) to a job, and its output to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import LONG_TEXT
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.text import REPLACEMENT
from kvgraph.serve.answers import (
    DONE,
    built,
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
from kvgraph.serve.jobs import Echo, Job, require_choices, require_output_room, usage_so_far
from kvgraph.serve.protocol import CompletionRequest
from kvgraph.serve.sampling import sampling_of
from kvgraph.serve.service import Served, Service
from kvgraph.serve.shapes import Shape

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of max_tokens."""

OBJECT = "text_completion"


async def completion_job(service: Service, given: CompletionRequest) -> Job:
    """Build the job. ServeError for a request that is unsupported, or does not fit."""
    served = service.require_ready()
    given.require_supported()
    count = len(given.prompts) * given.num_each
    require_choices(service.options.max_choices, count)
    served.admission.require_room([()] * count)  # before any text is tokenized
    drops_output = given.max_tokens == 0
    if drops_output and not given.echo:
        raise ServeError(
            400, "max_tokens: expected at least 1 without echo, got 0", param="max_tokens"
        )
    wanted = DEFAULT_MAX_TOKENS if given.max_tokens is None else max(1, given.max_tokens)
    fits = None if given.max_tokens is None else wanted
    prompts = await _tokenized(served, given.prompts, fits, drops_output)
    schema = given.schema_as_read()
    params = sampling_of(
        given,
        served.facts.vocab_size,
        served.sampling,
        max_tokens=wanted,
        logprobs=given.logprobs,
        prompt_logprobs=given.logprobs if given.echo else None,
        shape=None if schema is None else Shape(given.format_field, schema),
    )
    echo = None
    if given.echo:
        texts = zip(given.prompts, prompts, strict=True)
        echo = [await _echo(served, *pair, offsets=given.logprobs is not None) for pair in texts]
    return Job(
        "cmpl-",
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
    """Token ids of each prompt. ServeError if `fits` tokens do not fit after a prompt.

    `fits` None: max_tokens is the default, so as many are generated as fit."""
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
    text, decode = given, None
    if not isinstance(text, str):
        decode = partial(served.detokenize, special_tokens=False, about="prompt")
        text = await asyncio.to_thread(decode, tokens)
    echo = Echo(text, decode=decode if text.endswith(REPLACEMENT) else None)
    if offsets:
        if decode is None:
            found = await served.offsets_in(text)
        else:
            found = await asyncio.to_thread(served.offsets_of_ids, tokens, text)
        echo = replace(echo, offsets=found)
    return echo


async def answer_completion(job: Job, generation: Generation) -> JsonObject:
    """The whole answer. ServeError (500) if a choice failed."""
    pairs = list(zip(generation.choices, await generation.all_tokens(), strict=True))
    num_prompts = sum([len(choice.prompt) for choice, _ in pairs if job.echo])
    count = job.num_scores(num_prompts + sum([len(tokens) for _, tokens in pairs]))
    choices = []
    for choice, tokens in pairs:
        echo = await _echo_before(job, choice, tokens)
        assert echo is not None
        choices.append(await built(count, partial(_piece, job, choice, tokens, echo)))
    return {**job.head(OBJECT), "choices": choices, "usage": usage_of(generation)}


async def completion_events(job: Job, generation: Generation) -> AsyncIterator[bytes]:
    """A frame for each piece; a slow reader gets several tokens in one frame."""
    head = job.head(OBJECT)
    lengths: dict[int, int] = {}
    held: dict[int, list[Token]] = {}  # tokens that wait for the text of the echo before them
    async for fresh in generation:
        begun = [choice for choice in fresh if job.echo and choice.index not in lengths]
        num_prompts = sum([len(choice.prompt) for choice in begun])
        count = job.num_scores(num_prompts + sum([len(choice.tokens) for choice in fresh]))
        for choice in fresh:
            tokens = held.pop(choice.index, []) + choice.tokens
            error, text = tokens[-1].error, text_of(tokens)
            if error and not text:
                yield failure(generation, error)
                continue
            echo: Echo | None = Echo()
            if choice.index not in lengths:
                echo = await _echo_before(job, choice, tokens)
            if echo is None:
                held[choice.index] = tokens
                continue
            length = lengths.get(choice.index, 0)
            widths = [token.width for token in tokens] if job.logprobs else ()
            lengths[choice.index] = length + len(echo.text) + sum(widths)
            if echo.text or text or reason_of(tokens) or job.logprobs:
                piece = await built(count, partial(_piece, job, choice, tokens, echo, length))
                yield event({**head, "choices": [piece], **usage_so_far(job, generation)})
            if error:
                yield failure(generation, error)
    if job.sends_usage:
        yield event({**head, "choices": [], "usage": usage_of(generation)})
    yield DONE


async def _echo_before(job: Job, choice: Choice, tokens: list[Token]) -> Echo | None:
    """The prompt as the answer repeats it before the first `tokens`.

    They may complete a character that the prompt ends inside; None until one completes it."""
    if job.echo is None:
        return Echo()
    echo = job.echo[choice.index // len(job.params)]
    if echo.decode is None or job.drops_output:
        return echo
    for count, token in enumerate(tokens, 1):
        if token.width:
            ids = [*choice.prompt, *[known.token_id for known in tokens[:count]]]
            whole = await asyncio.to_thread(echo.decode, ids)
            return replace(echo, text=whole[: len(whole) - token.width])
    return echo if tokens[-1].finish_reason else None


def _piece(
    job: Job, choice: Choice, tokens: list[Token], echo: Echo, length: int = 0
) -> JsonObject:
    """The part of an answer for `tokens` of a choice. `length`: characters of its text so far.
    `echo`: put before the first tokens."""
    kept = [] if job.drops_output else tokens
    return {
        "index": choice.index,
        "text": echo.text + text_of(kept),
        "logprobs": _logprobs(job, choice, kept, echo, length),
        "finish_reason": "length" if job.drops_output else reason_of(tokens),
    }


def _logprobs(
    job: Job, choice: Choice, kept: list[Token], echo: Echo, length: int
) -> JsonObject | None:
    if not job.logprobs:
        return None
    kept = [token for token in kept if not token.error]
    scores = [token.logprobs for token in kept]
    ids = [token.token_id for token in kept]
    offsets = offsets_of(kept, length + len(echo.text))
    if echo.offsets:
        scores = [*(choice.prompt_logprobs or ()), *scores]
        ids, offsets = [*choice.prompt, *ids], [*echo.offsets, *offsets]
    return completion_logprobs(scores, ids, offsets, job.spell)
