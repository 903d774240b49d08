"""Text: of a prompt to tokens, of a request piece by piece, of a finished request as a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.tokenizer import BYTE_TOKEN, NAME, encode, read_tokenizer
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.arguments import instance
from kvgraph.runtime.logprobs import TokenLogprobs
from kvgraph.runtime.sampling import FinishReason, Token
from kvgraph.runtime.stats import RequestStats
from kvgraph.runtime.stopping import StopStrings

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

SEEN_BY_DECODER, MOST_CHARACTER_BYTES = 8, 4
"""Tokens of the prompt that decide how the first generated ones read; bytes of one character."""

INVALID_PREFIX = "Invalid prefix"
"""How the message of a decoder begins whose earlier text is no longer that of its tokens."""

REPLACEMENT = "\ufffd"
"""What a text has for bytes that are no character."""


class TextCodec:
    """The tokenizer of the artifact in `folder`; without one, prompts are token ids."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / NAME
        self.tokenizer: Tokenizer | None = None
        if self._path.is_file():
            self.tokenizer = read_tokenizer(self._path, ArtifactError)

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids. ArtifactError without a tokenizer; RequestError: no text, or not Unicode."""
        instance("prompt", text, str, "text")
        if self.tokenizer is None:
            raise ArtifactError(
                f"{self._path.parent}: expected {NAME} for a text prompt, got none; pass token ids"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: expected text in Unicode, got {error}") from error
        return encode(
            self.tokenizer, text, self._path, ArtifactError, special_tokens=special_tokens
        )

    def stream(self, prompt_length: int, stops: StopStrings | None = None) -> TextStream | None:
        """The text behind a prompt of so many tokens; None without a tokenizer.

        RequestError where `stops` need one.
        """
        if self.tokenizer is not None:
            return TextStream(self.tokenizer, prompt_length, stops)
        if stops is not None:
            raise RequestError(
                f"stop: expected no strings without a tokenizer, and {self._path.parent} has no "
                f"{NAME}; use stop_token_ids"
            )
        return None


class TextStream:
    """The text of one request behind its prompt of `prompt_length` tokens.

        if stream.decoder is None:
            stream.start(context)
        piece = stream.step(token)

    Text comes only once its bytes are complete. Some decoders strip the space before the first word
    of a text, which a continuation keeps, so this one sees the prompt's last tokens first.
    `unfinished`: the tokens since the decoder's last piece, while they end within a character;
    `told`: what they gave before that, which the next piece begins with.
    `pending`: what the prompt alone ends with of bytes that are no character, while no piece came;
    it is no part of the first piece, unless that completes it.
    `stops` are given each piece by the caller, who hands over what they give.
    """

    __slots__ = (
        "_before",
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
        self, tokenizer: Tokenizer, prompt_length: int, stops: StopStrings | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.stops = stops
        self.pending = self.told = ""
        self.unfinished: list[int] = []
        self._seen: Sequence[int] = ()  # tokens of the prompt that end with a character
        self._before = ""  # their text
        self._prompt_length = prompt_length
        self.decoder: DecodeStream | None = None

    def begin(self) -> None:
        """The decoder is at the first token of a text."""
        from tokenizers.decoders import DecodeStream

        self.decoder = DecodeStream(skip_special_tokens=True)
        self.pending = self.told = self._before = ""
        self.unfinished, self._seen = [], ()

    def start(self, context: TextContext) -> None:
        """The decoder goes on behind the tokens of `context`; `stops` are there too."""
        self.begin()
        if self.stops is not None:
            self.stops.rewind()
        first, end = self._last_seen(context)
        self._read_prompt(context.tokens[first:end].tolist())
        for count, token in enumerate(context.tokens[self._prompt_length :].tolist(), 1):
            piece = self.step(token)
            if self.stops is not None:
                self.stops.step(piece, count)

    def step(self, token: int) -> str:
        """The piece that a token completes, once there is a decoder."""
        assert self.decoder is not None
        try:
            piece = self.decoder.step(self.tokenizer, token)
        except Exception as error:
            piece = self.recover(token, error)
        if piece is None:
            return self.begun(token)
        return self.own(piece) if self.unfinished else piece

    def begun(self, token: int) -> str:
        """What a token gives that ends within a character: what comes before that."""
        self.unfinished.append(token)
        text = self.tokenizer.decode([*self._seen, *self.unfinished])
        if text == self._before:  # a special token
            self.unfinished.clear()
        if not (text.startswith(self._before) and text.endswith(REPLACEMENT)):
            return ""  # that, or bytes that spoil those before them
        whole = text[len(self._before) :].rstrip(REPLACEMENT)
        piece = whole.removeprefix(self.told).removeprefix(self.pending)
        if piece:
            self.told, self.pending = whole, ""
        return piece

    def own(self, piece: str) -> str:
        """The piece that completes a character, without what was told of it before, and what the
        prompt alone ends with."""
        whole = piece.removeprefix(self.told).removeprefix(self.pending)
        self.told = self.pending = ""
        self.unfinished.clear()
        return whole

    def recover(self, token: int, error: Exception) -> str:
        """The piece of a token behind bytes that never became a character, which the decoder does
        not go on from; else `error` is raised."""
        from tokenizers.decoders import DecodeStream

        if not str(error).startswith(INVALID_PREFIX):
            raise error
        self.decoder = DecodeStream(skip_special_tokens=True)
        self.decoder.step(self.tokenizer, token)  # the first of a text may lose its space
        lost = self.told + (self.pending or REPLACEMENT)
        return lost + (self.decoder.step(self.tokenizer, token) or "")

    def _last_seen(self, context: TextContext) -> tuple[int, int]:
        """The prompt's tokens that the decoder sees: the last ones that have a text, as special
        ones have none. They do not begin within a character, since bytes (`<0xE6>`) that are none
        spoil all those behind them."""
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
        """Its tokens from the first that the decoder sees."""
        for token in seen:
            self.step(token)
        self._seen = seen[: len(seen) - len(self.unfinished)]
        self._before = self.tokenizer.decode(self._seen)
        text = self.tokenizer.decode(seen)
        self.pending = text[len(text.rstrip(REPLACEMENT)) :]

    def rewind(self) -> None:
        """Go on behind the tokens that the context has, whatever was decoded."""
        self.decoder = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: what was generated behind the prompt.

    `finish_reason` is "stop" (a stop string, a stop or end token, the end of its grammar), "length"
    (`max_new_tokens`, or the model's longest context) or "error": then `error` says why, and the
    rest is what came before it. `stop_reason` is the stop string, or the token of `stop_token_ids`,
    that ended it; else None. `token_ids` are all that were generated, those of a stop string too.
    `logprobs`: of each token; `prompt_logprobs`: of each token of the prompt, None of the first.
    Both None where SamplingParams do not ask. `index`: which of the prompt's `n` completions it is.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt that came from the prefix cache."""
    queue_seconds: float | None = None
    """From its submission to the step that had its first tokens."""
    first_token_seconds: float | None = None
    """From its submission to its first token."""
    total_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    """Tokens of the prompt that were computed, by the time from its first step to its first token;
    other requests share that time."""
    decode_tokens_per_second: float | None = None
    """Tokens behind the first one, by the time from the first one to the last."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    stop_reason: str | int | None = None
    index: int = 0


def completions_of(
    tokens: Mapping[str, Sequence[Token]], stats: Sequence[RequestStats], indices: Sequence[int]
) -> list[Completion]:
    """Of requests that have ended, whose tokens are all of theirs, in the order of `indices`."""
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
    """All tokens of a request that has ended."""
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
