"""/v1/chat/completions: converts messages to a job, and its output to the answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial

from msgspec import Raw

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import LONG_TEXT
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.tools import Tools
from kvgraph.serve.answers import (
    DONE,
    built,
    chat_logprobs,
    event,
    failure,
    reason_of,
    text_of,
    usage_of,
)
from kvgraph.serve.generation import Choice, Generation, salt_of
from kvgraph.serve.jobs import (
    Job,
    most_tokens_each,
    require_choices,
    require_output_room,
    usage_so_far,
)
from kvgraph.serve.protocol import ChatRequest
from kvgraph.serve.sampling import refusal, sampling_of
from kvgraph.serve.service import Served, Service
from kvgraph.serve.shapes import Shape, as_serve_errors, refused

OBJECT = "chat.completion"
MOST_TOOLS = 128


async def chat_job(service: Service, given: ChatRequest) -> Job:
    """Build the job. ServeError for messages that the template rejects, or that do not fit."""
    served = service.require_ready()
    given.require_supported()
    require_choices(service.options.max_choices, given.num_each)
    served.admission.require_room([()] * given.num_each)  # before any text is rendered
    tools = tools_of(given)
    shape = _shape(given, tools)
    prompt = await _rendered(served, given, tools, served.facts.longest)
    served.require_known("messages", prompt)
    limit = "max_tokens" if given.max_completion_tokens is None else "max_completion_tokens"
    wanted = given.max_tokens if limit == "max_tokens" else given.max_completion_tokens
    fits = require_output_room(
        prompt, wanted, served.facts.longest, prompt_field="messages", limit_field=limit
    )
    logprobs = (given.top_logprobs or 0) if given.logprobs else None
    if wanted is None:
        fits = min(fits, most_tokens_each(given.num_each, logprobs))
    params = sampling_of(
        given,
        served.facts.vocab_size,
        served.sampling,
        max_tokens=fits,
        logprobs=logprobs,
        prompt_logprobs=None,
        shape=shape,
    )
    return Job(
        "chatcmpl-",
        given.model or service.name,
        [prompt],
        params.each(),
        salt_of(given.cache_salt),
        bool(given.stream),
        bool(given.stream_options and given.stream_options.include_usage),
        served.spell,
        bool(given.logprobs),
        counts_in_frames=given.counts_in_frames,
        texts=given.messages,
        tools=tools,
    )


def tools_of(given: ChatRequest) -> Tools:
    """The functions that the request may call; ServeError if they are invalid."""
    tools = given.tools or []
    if len(tools) > MOST_TOOLS and given.tool_choice != "none":
        raise refused("tools", f"at most {MOST_TOOLS} functions", str(len(tools)))
    field = None if given.schema() is None else given.format_field
    with as_serve_errors():
        return Tools(tools, given.tool_choice, field)


def _shape(given: ChatRequest, tools: Tools) -> Shape | None:
    """The grammar of the output. A forced call has no response format, which is for text only."""
    asked, field = None if tools.forces_call else given.schema_as_read(), given.format_field
    with as_serve_errors():
        if tools.forces_call:
            return Shape("tools", tools.schema(), parts=tools.parts)
        if asked is None or not tools:
            return None if asked is None else Shape(field, asked)
        return Shape(field, tools.schema(asked), parts=((field, asked), *tools.parts))


async def _rendered(
    served: Served, given: ChatRequest, tools: Tools, most: int | None = None
) -> list[int]:
    """Token ids of a chat, rendered in a thread: a template is the artifact's own program. A text
    of more than `most` tokens is refused before it is tokenized."""

    def render() -> tuple[str, list[int]]:
        text = served.prompts.render_chat(
            given.messages,
            tools=given.tools if tools else None,
            add_generation_prompt=given.add_generation_prompt,
            continue_final_message=bool(given.continue_final_message),
            chat_template_kwargs=given.template_variables(),
        )
        is_long = len(text) > LONG_TEXT
        return text, [] if is_long else served.prompts.tokenize(text, special_tokens=False)

    served.require_chats()
    try:
        text, tokens = await asyncio.to_thread(render)
    except (RequestError, ArtifactError) as error:
        refused = refusal(RequestError(served.without_folder(error)))
        refused.param = refused.param or "messages"
        raise refused from error
    if len(text) > LONG_TEXT:
        tokens = await served.tokenize(text, special_tokens=False, about="messages", most=most)
    return tokens


async def chat_tokens(served: Served, given: ChatRequest) -> list[int]:
    """Token ids of a chat's prompt."""
    given.require_supported()
    return await _rendered(served, given, tools_of(given))


async def answer_chat(job: Job, generation: Generation) -> dict[str, object]:
    """The whole answer. ServeError (500) if a choice failed."""
    all_tokens = await generation.all_tokens()
    count = job.num_scores(sum(map(len, all_tokens)))
    pairs = zip(generation.choices, all_tokens, strict=True)
    choices = [await built(count, partial(_whole, job, *pair)) for pair in pairs]
    return {**job.head(OBJECT), "choices": choices, "usage": usage_of(generation)}


def _whole(job: Job, choice: Choice, tokens: list[Token]) -> dict[str, object]:
    text, reason = text_of(tokens), tokens[-1].finish_reason
    message: dict[str, object] = {"role": "assistant", "content": text}
    call, why = job.tools.read(text, reason) if job.tools else (None, reason)
    if call:
        message |= {"content": None, "tool_calls": [call]}
    return {
        "index": choice.index,
        "message": message,
        "logprobs": _logprobs(job, tokens),
        "finish_reason": why,
    }


def _logprobs(job: Job, tokens: list[Token]) -> dict[str, object] | None:
    if not job.logprobs:
        return None
    return chat_logprobs([token.logprobs for token in tokens], job.spell)


async def chat_events(job: Job, generation: Generation) -> AsyncIterator[bytes]:
    """Frames of a chat: one with the role, then one for each piece; a call is a single frame."""
    head = job.head(f"{OBJECT}.chunk")
    held = {choice.index: "" for choice in generation.choices} if job.tools else {}
    for index in range(len(generation.choices)):
        delta: dict[str, object] = {"role": "assistant", "content": ""}
        piece = _piece(index, delta, None, None)
        yield event({**head, "choices": [piece], **usage_so_far(job, generation)})
    async for fresh in generation:
        count = job.num_scores(sum([len(choice.tokens) for choice in fresh]))
        for choice in fresh:
            tokens = choice.tokens
            error, text = tokens[-1].error, text_of(tokens)
            delta, why = {"content": text} if text else {}, reason_of(tokens)
            if choice.index in held:
                delta, why = held_delta(job, held, choice.index, tokens)
            if delta or why or (job.logprobs and not error):
                logprobs = await built(count, partial(_logprobs, job, tokens))
                is_call = "tool_calls" in delta
                piece = _piece(choice.index, delta, logprobs, None if is_call else why)
                yield event({**head, "choices": [piece], **usage_so_far(job, generation)})
                if is_call:  # OpenAI's client leaves a call open if its first frame ends it
                    piece = _piece(choice.index, {}, None, why)
                    yield event({**head, "choices": [piece], **usage_so_far(job, generation)})
            if error:
                yield failure(generation, error)
    if job.sends_usage:
        yield event({**head, "choices": [], "usage": usage_of(generation)})
    yield DONE


def held_delta(
    job: Job, held: dict[int, str], index: int, tokens: list[Token]
) -> tuple[JsonObject, str | None]:
    """The delta of a text that may be a call, and why it ended.

    The delta is empty until the text is known to be a call, or not to be one."""
    text, reason = held[index] + text_of(tokens), reason_of(tokens)
    assert job.tools is not None
    if tokens[-1].finish_reason is None and job.tools.may_be_call(text):
        held[index] = text
        return {}, None
    del held[index]
    call, why = job.tools.read(text, reason) if reason else (None, None)
    if call:
        return {"tool_calls": [{"index": 0, **call}]}, why
    return {"content": text} if text else {}, why


def _piece(
    index: int, delta: dict[str, object], logprobs: Raw | None, reason: str | None
) -> dict[str, object]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
