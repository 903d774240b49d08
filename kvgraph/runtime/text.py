"""Converts prompts to tokens, and generated tokens to text, in pieces or as a whole."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import BYTE_TOKEN, NAME, encode, read_tokenizer
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.arguments import instance
from kvgraph.runtime.folder import is_listed
from kvgraph.runtime.logprobs import TokenLogprobs
from kvgraph.runtime.sampling import FinishReason, Token
from kvgraph.runtime.stats import RequestStats
from kvgraph.runtime.stopping import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

SEEN_BY_DECODER, MOST_CHARACTER_BYTES = 8, 4
"""Prompt tokens that affect how the first generated ones decode; most bytes of a character."""

INVALID_PREFIX = "Invalid prefix"
"""Start of the decoder's error if the text of its earlier tokens has changed."""

REPLACEMENT = "\ufffd"
"""Character that stands for bytes that do not form a character."""


class TextCodec:
    """The tokenizer of the artifact in `folder`; without one, prompts are token ids.

    `files`: names in its manifest.
    """

    def __init__(self, folder: Path, files: Container[str] | None = None) -> None:
        self.folder = folder
        self._path = folder / NAME
        self.tokenizer: Tokenizer | None = None
        if self._path.is_file() and is_listed(NAME, files):
            self.tokenizer = read_tokenizer(self._path, ArtifactError)

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. ArtifactError without a tokenizer; RequestError unless it is Unicode
        text."""
        instance("prompt", text, str, "text")
        if self.tokenizer is None:
            got = "one that its manifest does not list" if self._path.is_file() else "none"
            raise ArtifactError(
                f"{self._path.parent}: expected {NAME} for a text prompt, got {got}; pass token ids"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: expected text in Unicode, got {error}") from error
        return encode(
            self.tokenizer, text, self._path, ArtifactError, special_tokens=special_tokens
        )

    def stream(
        self, prompt_length: int, stops: StopStrings | None = None, *, is_guided: bool = False
    ) -> TextStream | None:
        """The decoder of the text after a prompt of `prompt_length` tokens; None without tokenizer.

        RequestError if `stops` are given without a tokenizer.
        """
        if self.tokenizer is not None:
            return TextStream(self.tokenizer, prompt_length, stops, is_guided=is_guided)
        if stops is not None:
            raise RequestError(
                f"stop: expected no strings without a tokenizer, and {self._path.parent} has no "
                f"{NAME}; use stop_token_ids"
            )
        return None


class TextStream:
    """Decodes the text of one request, after its prompt of `prompt_length` tokens.

        if stream.decoder is None:
            stream.start(context)
        piece = stream.step(token)

    Text is returned once its bytes are complete. Some decoders strip the space before the first
    word of a text, but a continuation keeps it: so the decoder first gets the prompt's last tokens.
    `is_guided`: the space is kept after a prompt without text too, because the grammar has it.
    `unfinished`: tokens since the decoder's last piece, while they end within a character.
    `told`: text of these tokens that was already returned; the next piece starts with it.
    `pending`: replacement characters at the end of the prompt's text, until the first piece. They
    are removed from that piece, unless it completes them.
    `stops`: the caller passes each piece to them, and shows only what they return.
    """

    __slots__ = (
        "_before",
        "_is_guided",
        "_prompt_length",
        "_seen",
        "decoder",
        "pending",
        "stops",
        "tokenizer",
        "told",
        "unfinished",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_length: int,
        stops: StopStrings | None = None,
        *,
        is_guided: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.pending = self.told = ""
        self.unfinished: list[int] = []
        self._seen: Sequence[int] = ()  # prompt tokens for the decoder, up to a whole character
        self._before = ""  # text of `_seen`
        self._is_guided = is_guided
        self._prompt_length = prompt_length
        self.decoder: DecodeStream | None = None

    def begin(self) -> None:
        """Reset the decoder to the start of a text."""
        from tokenizers.decoders import DecodeStream

        self.decoder = DecodeStream(skip_special_tokens=True)
        self.pending = self.told = self._before = ""
        self.unfinished, self._seen = [], ()

    def start(self, context: TextContext) -> None:
        """Decode the tokens of `context`, so that decoder and `stops` continue after them."""
        self.begin()
        if self.stops is not None:
            self.stops.rewind()
        first, end = self._last_seen(context)
        seen = context.tokens[first:end].tolist()
        if self._is_guided and not self.tokenizer.decode(seen):
            seen = self.tokenizer.encode("a", add_special_tokens=False).ids
        self._read_prompt(seen)
        for count, token in enumerate(context.tokens[self._prompt_length :].tolist(), 1):
            piece = self.step(token)
            if self.stops is not None:
                self.stops.step(piece, count)

    def step(self, token: int) -> str:
        """Text that a token completes; `begin` or `start` must have been called."""
        assert self.decoder is not None
        try:
            piece = self.decoder.step(self.tokenizer, token)
        except Exception as error:
            piece = self.recover(token, error)
        if piece is None:
            return self.begun(token)
        return self.own(piece) if self.unfinished else piece

    def begun(self, token: int) -> str:
        """Text that a token completes if it ends within a character: all characters before it."""
        self.unfinished.append(token)
        text = self.tokenizer.decode([*self._seen, *self.unfinished])
        if text == self._before:  # a special token without text
            self.unfinished.clear()
        if not (text.startswith(self._before) and text.endswith(REPLACEMENT)):
            return ""  # a special token, or bytes that change the text before them
        whole = text[len(self._before) :].rstrip(REPLACEMENT)
        piece = whole.removeprefix(self.told).removeprefix(self.pending)
        if piece:
            self.told, self.pending = whole, ""
        return piece

    def own(self, piece: str) -> str:
        """`piece`, which completes a character, without the text that was returned before and
        without the replacement characters of the prompt."""
        whole = piece.removeprefix(self.told).removeprefix(self.pending)
        self.told = self.pending = ""
        self.unfinished.clear()
        return whole

    def recover(self, token: int, error: Exception) -> str:
        """Text of a token after bytes that never became a character, at which the decoder stops.

        Any other `error` is raised again."""
        from tokenizers.decoders import DecodeStream

        if not str(error).startswith(INVALID_PREFIX):
            raise error
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.decoder.step(self.tokenizer, token)  # the first of a text may lose its space
        lost = self.told + (self.pending or REPLACEMENT)
        return lost + (self.decoder.step(self.tokenizer, token) or "")

    def _last_seen(self, context: TextContext) -> tuple[int, int]:
        """Range of prompt tokens for the decoder: the last ones with text (special tokens have
        none). It does not start within a character: stray bytes (`<0xE6>`) would corrupt the text
        after them."""
        first, end, text = self._prompt_length, self._prompt_length, ""
        while first > 0 and not text:
            first, end = max(0, first - SEEN_BY_DECODER), first
            text = self.tokenizer.decode(context.tokens[first:end].tolist())
        for at in range(first, max(-1, first - MOST_CHARACTER_BYTES), -1):
            token = int(context.tokens[at])
            byte = BYTE_TOKEN.fullmatch(self.tokenizer.id_to_token(token) or "")
            if byte is None or int(byte[1], 16) & 0xC0 != 0x80:
                return at, end
        return first, end

    def _read_prompt(self, seen: Sequence[int]) -> None:
        """Pass prompt tokens to the decoder, and keep their text."""
        for token in seen:
            self.step(token)
        self._seen = seen[: len(seen) - len(self.unfinished)]
        self._before = self.tokenizer.decode(self._seen)
        text = self.tokenizer.decode(seen)
        self.pending = text[len(text.rstrip(REPLACEMENT)) :]

    def rewind(self) -> None:
        """Discard the decoder; `start` decodes the context's tokens again."""
        self.decoder = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: the tokens and text that were generated after the prompt.

    `finish_reason`: "stop" (a stop string, a stop or end token, the end of its grammar), "length"
    (`max_new_tokens`, or the model's longest context) or "error": then `error` is the reason, and
    the other fields hold the output before it. `stop_reason`: the stop string, or the token of
    `stop_token_ids`, that ended the request; else None. `token_ids`: all generated tokens,
    including those of a stop string. `logprobs`: one entry per token. `prompt_logprobs`: one entry
    per prompt token, None for the first. Both are None unless SamplingParams ask for them. `index`:
    number of the completion among the `n` of its prompt.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    queue_seconds: float | None = None
    """Seconds from submission to the step that had its first tokens."""
    first_token_seconds: float | None = None
    """Seconds from submission to the first token."""
    total_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    """Prompt tokens that were computed, divided by the time from the first step to the first token;
    other requests share that time."""
    decode_tokens_per_second: float | None = None
    """Tokens after the first one, divided by the time from the first to the last token."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: str | int | None = None
    index: int = 0
    tool_calls: tuple[JsonObject, ...] = ()
    """For `Engine.chat` with tools: the call that `text` is, in OpenAI's form (`id`, `type`, and
    `function` with `name` and `arguments`, which are JSON text)."""


def completions_of(
    tokens: Mapping[str, Sequence[Token]], stats: Sequence[RequestStats], indices: Sequence[int]
) -> list[Completion]:
    """Completions of ended requests, from all their tokens. `indices`: among those of a prompt."""
    done: list[Completion] = []
    for (request_id, generated), own, index in zip(tokens.items(), stats, indices, strict=True):
        about_prompt = done[-1].prompt_logprobs if index else generated[0].prompt_logprobs
        done.append(completion_of(request_id, generated, own, index, about_prompt))
    return done


def completion_of(
    request_id: str,
    tokens: Sequence[Token],
    stats: RequestStats,
    index: int = 0,
    prompt_logprobs: list[TokenLogprobs | None] | None = None,
) -> Completion:
    """The completion of an ended request, from all its tokens."""
    last = tokens[-1]
    assert last.finish_reason is not None
    generated = [token.token_id for token in tokens if not token.error]
    logprobs = [token.logprobs for token in tokens if token.logprobs is not None]
    return Completion(
        request_id=request_id,
        token_ids=generated,
        text="".join([token.text for token in tokens]),
        finish_reason=last.finish_reason,
        error=last.error,
        prompt_tokens=stats.prompt_tokens,
        cached_tokens=stats.cached_tokens,
        queue_seconds=stats.queue_seconds,
        first_token_seconds=stats.first_token_seconds,
        total_seconds=stats.total_seconds,
        prefill_tokens_per_second=_rate(
            stats.prompt_tokens - stats.cached_tokens, stats.prefill_seconds
        ),
        decode_tokens_per_second=_rate(len(generated) - 1, stats.decode_seconds),
        logprobs=logprobs or None,
        prompt_logprobs=prompt_logprobs,
        stop_reason=last.stop_reason,
        index=index,
    )


def _rate(count: int, seconds: float | None) -> float | None:
    return count / seconds if seconds and count > 0 else None
