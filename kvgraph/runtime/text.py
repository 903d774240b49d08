"""Tokens -> text: an artifact's tokenizer, and the text of a request piece by piece."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.tokenizer import NAME, read_tokenizer
from kvgraph.errors import ArtifactError
from kvgraph.kv.requests import TextContext

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

SEEN_BY_DECODER = 8
"""Tokens of the prompt that decide how the first generated ones read."""


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of an artifact; None where it has none."""
    path = folder / NAME
    return read_tokenizer(path, ArtifactError) if path.is_file() else None


class TextStream:
    """The text of one request behind its prompt of `prompt_length` tokens.

    Text comes only once its bytes are complete. Some decoders strip the space before the first word
    of a text, which a continuation keeps, so this one sees the prompt's last tokens first.
    """

    __slots__ = ("_decoder", "_first", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer, prompt_length: int) -> None:
        self._tokenizer = tokenizer
        self._first = max(0, prompt_length - SEEN_BY_DECODER)
        self._decoder: DecodeStream | None = None

    def piece(self, context: TextContext, token: int) -> str:
        """The text that `token` completes, the next one behind the tokens of `context`."""
        if self._decoder is None:
            self._decoder = self._decoder_behind(context)
        return self._decoder.step(self._tokenizer, token) or ""

    def rewind(self) -> None:
        """Go on behind the tokens that the context has, whatever was decoded."""
        self._decoder = None

    def _decoder_behind(self, context: TextContext) -> DecodeStream:
        from tokenizers.decoders import DecodeStream

        decoder = DecodeStream(skip_special_tokens=True)
        for token in context.tokens[self._first :].tolist():
            decoder.step(self._tokenizer, token)
        return decoder
