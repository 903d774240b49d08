"""/v1/responses: converts items to a job, and its output to a message or a call of a tool.

The events of a stream are those of OpenAI's reference; each is one frame, and the last one has the
whole response.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from functools import partial

from msgspec import Raw

from kvgraph.contract.plain import JsonObject
from kvgraph.runtime.logprobs import TokenLogprobs
from kvgraph.serve.answers import built, chat_logprobs, encoded, reason_of, text_of
from kvgraph.serve.chats import chat_job, held_delta
from kvgraph.serve.errors import ServeError, for_client
from kvgraph.serve.generation import Generation
from kvgraph.serve.items import Chat, ResponseRequest
from kvgraph.serve.jobs import Job
from kvgraph.serve.service import Service

Scores = list[TokenLogprobs | None]

DONE, CUT, RUNS = "completed", "incomplete", "in_progress"
"""Statuses of a response and its items."""

EMPTY = Raw(b"[]")


async def response_job(service: Service, given: ResponseRequest) -> Job:
    """Build the job. ServeError for items that the template rejects, or that do not fit."""
    chat = Chat(given)
    try:
        job = await chat_job(service, chat.request)
    except ServeError as error:
        raise chat.renamed(error) from error
    job.kind = "resp_"
    return job


async def answer_response(given: ResponseRequest, job: Job, generation: Generation) -> JsonObject:
    """The whole response. ServeError (500) if the generation failed."""
    (tokens,) = await generation.all_tokens()
    text, reason = text_of(tokens), tokens[-1].finish_reason
    call, why = job.tools.read(text, reason) if job.tools else (None, reason)
    if call:
        item = _call_item(call, _status(why))
    else:
        scores = await _scored(job, [token.logprobs for token in tokens])
        item = _message(_id("msg"), _status(why), _part(text, scores))
    return _response(given, job, _status(why), [item], generation)


async def response_events(
    given: ResponseRequest, job: Job, generation: Generation
) -> AsyncIterator[bytes]:
    """Frames of a response: a call is one item; text is sent as it is generated."""
    event = _Events()
    for name in ("created", RUNS):
        yield event(f"response.{name}", response=_response(given, job, RUNS, []))
    message = _StreamedMessage(job, event)
    held = {0: ""} if job.tools else {}
    async for (choice,) in generation:
        tokens, error = choice.tokens, choice.tokens[-1].error
        text, why = text_of(tokens), reason_of(tokens)
        delta: JsonObject = {"content": text} if text else {}
        if choice.index in held:
            delta, why = held_delta(job, held, choice.index, tokens)
        message.scores += [token.logprobs for token in tokens]
        if content := delta.get("content"):
            async for frame in message.grow(content):
                yield frame
        if error:
            failed = _response(given, job, "failed", message.items(CUT), generation)
            code = "invalid_prompt" if generation.status_of(error) == 400 else "server_error"
            failed["error"] = {"code": code, "message": for_client(error)}
            yield event("response.failed", response=failed)
        elif why:
            status = _status(why)
            if calls := delta.get("tool_calls"):
                items = [_call_item(calls[0], status)]
                for frame in _call_events(event, items[0]):
                    yield frame
            else:
                async for frame in message.end(status):
                    yield frame
                items = message.items(status)
            whole = _response(given, job, status, items, generation)
            yield event(f"response.{status}", response=whole)


class _Events:
    """Builds frames with consecutive sequence numbers."""

    def __init__(self) -> None:
        self._count = 0

    def __call__(self, kind: str, **fields: object) -> bytes:
        body = encoded({"type": kind, "sequence_number": self._count, **fields})
        self._count += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


class _StreamedMessage:
    """The message item of a text answer, sent as it grows."""

    def __init__(self, job: Job, event: _Events) -> None:
        self._job, self._event = job, event
        self._id = _id("msg")
        self._at = {"output_index": 0, "content_index": 0, "item_id": self._id}
        self._texts: list[str] = []
        self._has_begun = False
        self.scores: Scores = []
        """Log-probabilities of the tokens so far."""
        self._sent = 0
        self._all = EMPTY

    async def grow(self, text: str) -> AsyncIterator[bytes]:
        for frame in self._begin():
            yield frame
        self._texts.append(text)
        fresh, self._sent = self.scores[self._sent :], len(self.scores)
        logprobs = await _scored(self._job, fresh)
        yield self._event("response.output_text.delta", **self._at, delta=text, logprobs=logprobs)

    async def end(self, status: str) -> AsyncIterator[bytes]:
        for frame in self._begin():
            yield frame
        self._all = await _scored(self._job, self.scores)
        (item,) = self.items(status)
        (part,) = item["content"]
        yield self._event(
            "response.output_text.done", **self._at, text=part["text"], logprobs=part["logprobs"]
        )
        yield self._event("response.content_part.done", **self._at, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)

    def items(self, status: str) -> list[JsonObject]:
        """The message as a list of one item; empty before the text has begun."""
        if not self._has_begun:
            return []
        return [_message(self._id, status, _part("".join(self._texts), self._all))]

    def _begin(self) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        item = _message(self._id, RUNS)
        return [
            self._event("response.output_item.added", output_index=0, item=item),
            self._event("response.content_part.added", **self._at, part=_part("", EMPTY)),
        ]


def _call_events(event: _Events, item: JsonObject) -> list[bytes]:
    at = {"output_index": 0, "item_id": item["id"]}
    begun = item | {"arguments": "", "status": RUNS}
    text, kind = item["arguments"], "response.function_call_arguments"
    return [
        event("response.output_item.added", output_index=0, item=begun),
        event(f"{kind}.delta", **at, delta=text),
        event(f"{kind}.done", **at, name=item["name"], arguments=text),
        event("response.output_item.done", output_index=0, item=item),
    ]


async def _scored(job: Job, scores: Scores) -> Raw:
    """Log-probabilities of tokens as JSON; an empty list unless the client asked for them."""
    if not job.logprobs:
        return EMPTY
    count = job.num_scores(len(scores))
    return await built(count, partial(_content_of, scores, job))


def _content_of(scores: Scores, job: Job) -> object:
    return chat_logprobs(scores, job.spell)["content"]


def _message(name: str, status: str, *parts: JsonObject) -> JsonObject:
    fields = {"type": "message", "id": name, "status": status, "role": "assistant"}
    return {**fields, "content": list(parts)}


def _part(text: str, logprobs: Raw) -> JsonObject:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _call_item(call: JsonObject, status: str) -> JsonObject:
    fields = {"type": "function_call", "id": _id("fc"), "call_id": call["id"], "status": status}
    return {**fields, **call["function"]}


def _status(reason: str | None) -> str:
    return CUT if reason == "length" else DONE


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _response(
    given: ResponseRequest,
    job: Job,
    status: str,
    output: list[JsonObject],
    generation: Generation | None = None,
) -> JsonObject:
    """The response object. `generation`: given if it has ended, for the usage."""
    sampling = job.params[0]
    return {
        "id": job.id,
        "object": "response",
        "created_at": job.created,
        "completed_at": int(time.time()) if status == DONE else None,
        "status": status,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == CUT else None,
        "model": job.model,
        "output": output,
        "usage": None if generation is None else _usage(generation),
        "background": False,
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "max_tool_calls": given.max_tool_calls,
        "metadata": given.metadata or {},
        "parallel_tool_calls": False,  # an answer has at most one call
        "previous_response_id": None,
        "prompt_cache_key": given.prompt_cache_key,
        "reasoning": {"effort": given.effort, "summary": None},
        "safety_identifier": given.safety_identifier,
        "store": False,
        "temperature": sampling.temperature,
        "text": {"format": given.format()},
        "tool_choice": given.tool_choice or "auto",
        "tools": given.tools or [],
        "top_logprobs": given.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": given.user,
    }


def _usage(generation: Generation) -> JsonObject:
    prompt, generated = generation.prompt_tokens, generation.generated_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": generation.cached_tokens,
            "cache_write_tokens": 0,
        },
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + generated,
    }
