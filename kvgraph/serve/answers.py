"""Builds answers as OpenAI's clients read them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

import msgspec
from msgspec import Raw

from kvgraph.contract.threads import executor, threads_needed
from kvgraph.runtime.logprobs import Logprob, TokenLogprobs
from kvgraph.runtime.sampling import Token
from kvgraph.serve.errors import error_body, for_client
from kvgraph.serve.generation import Generation

DONE = b"data: [DONE]\n\n"

MANY = 8192
"""Log-probabilities from which on an answer is not built on the event loop: about 5 ms."""

BUILDING = executor(1, "kvgraph-answers")
"""One thread only: Python's lock would let no second one run, and the event loop would wait."""

encoded = msgspec.json.Encoder().encode


async def built(count: int, build: Callable[[], object]) -> Raw:
    """The result of `build` as JSON. `count`: log-probabilities of the whole answer; a large answer
    is built in a thread, so that the event loop does not wait."""
    if count < MANY:
        return Raw(encoded(build()))
    loop = asyncio.get_running_loop()
    with threads_needed():
        building = loop.run_in_executor(BUILDING, lambda: Raw(encoded(build())))
    return await building


def event(body: object) -> bytes:
    """`body` as one server-sent event."""
    return b"data: " + encoded(body) + b"\n\n"


def failure(generation: Generation, why: str) -> bytes:
    """The event of a choice that failed with error `why`."""
    return b"data: " + error_body(generation.status_of(why), for_client(why)) + b"\n\n"


def usage_of(generation: Generation) -> dict[str, object]:
    prompt, generated = generation.prompt_tokens, generation.generated_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


def text_of(tokens: Iterable[Token]) -> str:
    return "".join([token.text for token in tokens])


def reason_of(tokens: Sequence[Token]) -> str | None:
    """Why a choice ended; None if it has not, or failed: then another event reports the error."""
    last = tokens[-1]
    return None if last.error else last.finish_reason


class Spelling:
    """Text and bytes of single tokens within a text.

    `decode`: the text of token ids. `piece`: a token's bytes if it may be a part of a character."""

    def __init__(
        self, decode: Callable[[list[int]], str], piece: Callable[[int], bytes | None]
    ) -> None:
        self._decode = decode
        self._piece = piece
        self._known: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    def __call__(self, token: int) -> str:
        text = self._known.get(token)
        if text is None:
            own = self._piece(token)
            text = self._second(token) if own is None else own.decode(errors="replace")
            self._known[token] = text
        return text

    def _second(self, token: int) -> str:
        """The text of a token after itself: some decoders strip the space at a text's start."""
        first, both = self._decode([token]), self._decode([token, token])
        return (both[len(first) :] if both.startswith(first) else "") or first

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token; those of all tokens, joined, are the bytes of the text."""
        found = self._bytes.get(token)
        if found is None:
            own = self._piece(token)
            found = self._bytes[token] = self(token).encode() if own is None else own
        return found


def offsets_of(tokens: Iterable[Token], start: int) -> list[int]:
    """Start of each token, in characters, in a text with `start` characters before them."""
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += token.width
    return offsets


def completion_logprobs(
    scores: Sequence[TokenLogprobs | None],
    ids: Sequence[int],
    offsets: list[int],
    spell: Spelling,
) -> dict[str, object]:
    """The `logprobs` of /v1/completions. `offsets`: where each token starts in the answered text.

    Each token's scores are encoded one by one: a single encoding would hold Python's lock too long.
    """
    return {
        "tokens": [spell(token) for token in ids],
        "token_logprobs": [None if one is None else one.chosen.logprob for one in scores],
        "top_logprobs": [None if one is None else Raw(encoded(_top(one, spell))) for one in scores],
        "text_offset": offsets,
    }


def _top(scores: TokenLogprobs, spell: Spelling) -> dict[str, float]:
    """The likeliest tokens and the chosen one; of two with the same text, the first."""
    top: dict[str, float] = {}
    for one in (*scores.top, scores.chosen):
        top.setdefault(spell(one.token_id), one.logprob)
    return top


def chat_logprobs(scores: Sequence[TokenLogprobs | None], spell: Spelling) -> dict[str, object]:
    """The `logprobs` of /v1/chat/completions; each token's scores are encoded one by one."""
    return {"content": [Raw(encoded(_scored(one, spell))) for one in scores if one is not None]}


def _scored(one: TokenLogprobs, spell: Spelling) -> dict[str, object]:
    return {**_spelled(one.chosen, spell), "top_logprobs": [_spelled(t, spell) for t in one.top]}


def _spelled(one: Logprob, spell: Spelling) -> dict[str, object]:
    text = spell(one.token_id)
    own = list(spell.bytes_of(one.token_id))
    return {"token": text, "logprob": one.logprob, "bytes": own}
