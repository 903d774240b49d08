"""Converts prompts to tokens, and generated tokens to text, in pieces or as a whole."""

from __future__ import annotations

import codecs
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import BYTE_TOKEN, NAME, byte_letters, encode, read_tokenizer
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

SEEN_BY_DECODER, MOST_CHARACTER_BYTES = 8, 4
"""Prompt tokens that affect how the first generated ones decode; most bytes of a character."""

UTF8 = codecs.getincrementaldecoder("utf-8")

JOINED = re.compile(r"(Sequence\(decoders=\[)?ByteLevel\([^()]*\)(\]\))?")
"""A decoder that only joins the bytes of its tokens, as the tokenizers library prints it."""

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
        self._alphabet: Alphabet | None = None
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
            if self._alphabet is None:
                self._alphabet = Alphabet(self.tokenizer)
            return TextStream(self._alphabet, prompt_length, stops, is_guided=is_guided)
        if stops is not None:
            raise RequestError(
                f"stop: expected no strings without a tokenizer, and {self._path.parent} has no "
                f"{NAME}; use stop_token_ids"
            )
        return None


class Alphabet:
    """How the tokens of `tokenizer` spell bytes.

    - `letters`: byte of each letter, where a token is bytes in letters (byte-level BPE, as Llama 3
      and Qwen have it); else empty
    - `is_joined`: text is nothing but these bytes; no other decoder changes it
    - `has_bytes`: tokens such as `<0xE6>` are one byte (byte fallback, as Llama 2 and Gemma have)
    - `special`: tokens without text
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        decoder = repr(tokenizer.decoder)
        self.letters = byte_letters() if "ByteLevel" in decoder else {}
        self.is_joined = JOINED.fullmatch(decoder) is not None
        self.has_bytes = "ByteFallback" in decoder
        known = tokenizer.get_added_tokens_decoder()
        self.special = frozenset([token for token, added in known.items() if added.special])


class TextStream:
    """Decodes the text of one request, after its prompt of `prompt_length` tokens.

        if not stream.is_begun:
            stream.start(context)
        piece = stream.step(token)

    A character is returned with the token that completes it. Bytes that can no longer become a
    character are replaced, as the tokenizer's `decode` does, with the token that shows it. So all
    pieces are the decoded text, with two exceptions. Bytes of a character that the last token
    leaves incomplete are left out, since a replacement would say that they were wrong. And where a
    tokenizer has tokens for single bytes, `decode` also replaces the whole characters before a
    wrong byte, back to the last token that is no byte: these were returned before.

    Some decoders strip the space before the first word of a text, but a continuation keeps it: so
    the stream first reads the prompt's last tokens. `is_guided`: the space is kept after a prompt
    without text too, because the grammar has it. Replacements of what the prompt left incomplete
    belong to no piece.
    `stops`: the caller passes each piece to them, and shows only what they return.
    """

    __slots__ = (
        "_alphabet",
        "_begun",
        "_is_guided",
        "_is_lost",
        "_last",
        "_last_text",
        "_pending",
        "_prompt_length",
        "_utf8",
        "is_begun",
        "stops",
    )

    def __init__(
        self,
        alphabet: Alphabet,
        prompt_length: int,
        stops: StopStrings | None = None,
        *,
        is_guided: bool = False,
    ) -> None:
        self.stops = stops
        self.is_begun = False
        self._alphabet = alphabet
        self._is_guided = is_guided
        self._prompt_length = prompt_length

    def begin(self) -> None:
        """Start at the beginning of a text."""
        self.is_begun = True
        self._utf8 = UTF8("replace" if self._alphabet.letters else "strict")
        self._begun: list[int] = []  # tokens whose text is not known yet
        self._pending = 0  # replacements that belong to the prompt, if its character is lost
        self._is_lost = False  # a byte before was wrong, and only bytes came after it
        self._last: list[int] = []  # tokens of the last piece, and their text
        self._last_text = ""

    def start(self, context: TextContext) -> None:
        """Decode the tokens of `context`, so that the stream and `stops` continue after them."""
        self.begin()
        if self.stops is not None:
            self.stops.rewind()
        first, end = self._last_seen(context)
        seen = context.tokens[first:end].tolist()
        tokenizer = self._alphabet.tokenizer
        if self._is_guided and not tokenizer.decode(seen):
            seen = tokenizer.encode("a", add_special_tokens=False).ids
        for token in seen:
            self.step(token)
        self._pending = len(self._begun) or bool(self._utf8.getstate()[0])
        for count, token in enumerate(context.tokens[self._prompt_length :].tolist(), 1):
            piece = self.step(token)
            if self.stops is not None:
                self.stops.step(piece, count)

    def rewind(self) -> None:
        """Forget the text; `start` decodes the context's tokens again."""
        self.is_begun = False

    def step(self, token: int) -> str:
        """Text that a token completes; `begin` or `start` must have been called."""
        alphabet = self._alphabet
        spelled = None if token in alphabet.special else alphabet.tokenizer.id_to_token(token)
        if spelled is None:
            return ""
        if alphabet.letters:
            return self._of_letters(token, spelled)
        if alphabet.has_bytes and (byte := BYTE_TOKEN.fullmatch(spelled)) is not None:
            return self._of_byte(token, int(byte[1], 16))
        lost = self._lose() if self._begun else ""
        self._is_lost = False
        return lost + self._decoded([token])

    def _of_letters(self, token: int, spelled: str) -> str:
        letters = self._alphabet.letters
        try:
            data = bytes([letters[letter] for letter in spelled])
        except KeyError:
            data = spelled.encode()
        before = self._utf8.getstate()[0] if self._pending else b""
        text = self._utf8.decode(data)
        if not self._alphabet.is_joined:
            self._begun.append(token)
            if self._utf8.getstate()[0]:
                return ""
            tokens, self._begun = self._begun, []
            text = self._decoded(tokens)
        if self._pending and text:
            self._pending = 0
            if text[0] == REPLACEMENT and not (before + data).startswith(REPLACEMENT.encode()):
                return text[1:]
        return text

    def _of_byte(self, token: int, byte: int) -> str:
        if self._is_lost:
            return REPLACEMENT
        self._begun.append(token)
        try:
            if not self._utf8.decode(bytes([byte])):
                return ""
        except UnicodeDecodeError:
            self._is_lost = True
            return self._lose()
        tokens, self._begun, self._pending = self._begun, [], 0
        return self._decoded(tokens)

    def _lose(self) -> str:
        """Replacements of the single bytes that have become no character."""
        lost = REPLACEMENT * (len(self._begun) - self._pending)
        self._last, self._last_text = self._begun[:1], REPLACEMENT  # what follows begins no text
        self._utf8.reset()
        self._begun, self._pending = [], 0
        return lost

    def _decoded(self, tokens: list[int]) -> str:
        """Text of `tokens` after those before."""
        decode = self._alphabet.tokenizer.decode
        text = decode([*self._last, *tokens])[len(self._last_text) :]
        self._last, self._last_text = tokens, decode(tokens)
        return text

    def _last_seen(self, context: TextContext) -> tuple[int, int]:
        """Range of prompt tokens to read first: the last ones with text (special tokens have
        none). It does not start within a character: stray bytes (`<0xE6>`) would corrupt the text
        after them."""
        first, end, text = self._prompt_length, self._prompt_length, ""
        tokenizer = self._alphabet.tokenizer
        while first > 0 and not text:
            first, end = max(0, first - SEEN_BY_DECODER), first
            text = tokenizer.decode(context.tokens[first:end].tolist())
        for at in range(first, max(-1, first - MOST_CHARACTER_BYTES), -1):
            byte = BYTE_TOKEN.fullmatch(tokenizer.id_to_token(int(context.tokens[at])) or "")
            if byte is None or int(byte[1], 16) & 0xC0 != 0x80:
                return at, end
        return first, end


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
