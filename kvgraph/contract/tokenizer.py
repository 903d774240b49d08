"""tokenizer.json: read and used so that what the library makes of a bad one is an error of ours.

The library raises bare Exceptions, and where its own code fails a PanicException, which is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.files import open_regular
from kvgraph.errors import KVGraphError
from kvgraph.handlers import let_pass

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "tokenizer.json"

BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")

LONG_TEXT = 16_384
"""Characters above which a text is tokenized without Python's lock: more than about 5 ms."""


def read_tokenizer(path: Path, refusal: type[KVGraphError]) -> Tokenizer:
    """The tokenizer in a file, which cuts and pads no text; `refusal` where it is damaged."""
    from tokenizers import Tokenizer

    expected = "expected a tokenizer, got a damaged one"
    with _refusing(path, refusal, expected), open_regular(path) as file:
        tokenizer = Tokenizer.from_str(file.read().decode())
    tokenizer.no_truncation()  # a file may have those of its training
    tokenizer.no_padding()
    return tokenizer


def encode(
    tokenizer: Tokenizer,
    text: str,
    path: Path,
    refusal: type[KVGraphError],
    *,
    special_tokens: bool,
) -> list[int]:
    """Token ids; `refusal` where the tokenizer, which was read from `path`, fails at it."""
    with _refusing(path, refusal, "expected a tokenizer that encodes the text, got one that fails"):
        if len(text) > LONG_TEXT:  # `encode` keeps Python's lock, so that other threads would wait
            found = tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
            return list(found[0].ids)
        return list(tokenizer.encode(text, add_special_tokens=special_tokens).ids)


def most_characters(tokenizer: Tokenizer) -> int | None:
    """Of a text that one token stands for; None where that has no bound: text that a vocabulary has
    not may be one token, and a pre-tokenizer may drop spaces.

    A normalizer may write several characters as one: a Hangul syllable has up to three.
    """
    splits = repr(tokenizer.pre_tokenizer)
    has_bytes = "ByteLevel" in splits or getattr(tokenizer.model, "byte_fallback", False)
    if not has_bytes or any(word in splits for word in ("Whitespace", "Bert", "Removed")):
        return None
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return longest if tokenizer.normalizer is None else 4 * longest


def byte_pieces(tokenizer: Tokenizer | None) -> Callable[[int], bytes | None]:
    """Token -> its bytes, of a token that may be a part of a character; None of others.

    Two kinds of vocabulary have such: letters for bytes (GPT-2's byte-level BPE), and `<0xE2>`
    (SentencePiece's byte fallback).
    """
    if tokenizer is None:
        return lambda token: None
    letters = _byte_letters() if "ByteLevel" in repr(tokenizer.decoder) else {}
    special = {i for i, known in tokenizer.get_added_tokens_decoder().items() if known.special}

    def piece(token: int) -> bytes | None:
        spelled = None if token in special else tokenizer.id_to_token(token)
        if spelled is None:
            return None
        if letters:
            known = all(letter in letters for letter in spelled)
            return bytes([letters[letter] for letter in spelled]) if known else None
        fallback = BYTE_TOKEN.fullmatch(spelled)
        return bytes([int(fallback[1], 16)]) if fallback else None

    return piece


def _byte_letters() -> dict[str, int]:
    """Letter -> byte, of byte-level BPE: bytes that print as themselves in Latin-1, and from U+0100
    on the others in order (Radford et al. 2019, `bytes_to_unicode`)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust failed on its own account: no Exception, and no interrupt."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _refusing(path: Path, refusal: type[KVGraphError], expected: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        let_pass(error)
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise refusal(f"{path}: {expected} ({why})") from error
