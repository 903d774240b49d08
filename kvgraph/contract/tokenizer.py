"""Read and use tokenizer.json; failures of the tokenizers library become errors of kvgraph.

The library raises bare Exceptions and, if its own code fails, a PanicException, which is not a
subclass of Exception.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.files import open_regular
from kvgraph.errors import KVGraphError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "tokenizer.json"

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")

LONG_TEXT = 16_384
"""Characters above which a text is tokenized without Python's lock: more than about 5 ms."""


def read_tokenizer(path: Path, refusal: type[KVGraphError]) -> Tokenizer:
    """Read a tokenizer, without truncation and padding; raise `refusal` if the file is damaged."""
    from tokenizers import Tokenizer

    expected = "expected a tokenizer, got a damaged one"
    with _refusing(path, refusal, expected), open_regular(path) as file:
        tokenizer = Tokenizer.from_str(file.read().decode())
    tokenizer.no_truncation()  # a file may keep the settings of the training
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
    """Token ids of `text`; `refusal` if the tokenizer, which was read from `path`, fails."""
    with _refusing(path, refusal, "expected a tokenizer that encodes the text, got one that fails"):
        if len(text) > LONG_TEXT:  # `encode` keeps Python's lock, so that other threads would wait
            found = tokenizer.encode_batch_fast([text], add_special_tokens=special_tokens)
            return list(found[0].ids)
        return list(tokenizer.encode(text, add_special_tokens=special_tokens).ids)


def most_characters(tokenizer: Tokenizer) -> int | None:
    """Most characters of text that one token can stand for; None if there is no bound.

    There is none if text outside the vocabulary may become one token, or if a pre-tokenizer may
    drop spaces. A normalizer may write several characters as one: a Hangul syllable has up to
    three.
    """
    splits = repr(tokenizer.pre_tokenizer)
    has_bytes = "ByteLevel" in splits or getattr(tokenizer.model, "byte_fallback", False)
    if not has_bytes or any(word in splits for word in ("Whitespace", "Bert", "Removed")):
        return None
    longest = max(map(len, tokenizer.get_vocab()), default=1)
    return longest if tokenizer.normalizer is None else 4 * longest


def byte_pieces(tokenizer: Tokenizer | None) -> Callable[[int], bytes | None]:
    """Return a function from a token to its bytes, None for a token of which they are not known.

    Two kinds of vocabulary spell bytes: letters for bytes (GPT-2's byte-level BPE: bytes of all but
    special tokens), and `<0xE2>` (SentencePiece's byte fallback: bytes of such tokens only).
    """
    if tokenizer is None:
        return lambda token: None
    letters = byte_letters() if "ByteLevel" in repr(tokenizer.decoder) else {}
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


def byte_letters() -> dict[str, int]:
    """Byte of each letter of byte-level BPE: bytes that are printable in Latin-1 keep their letter;
    the others follow in order from U+0100 (Radford et al. 2019, `bytes_to_unicode`)."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): b for i, b in enumerate(others)}


def is_panic(error: BaseException) -> bool:
    """Whether `error` is a panic of a Rust library: neither an Exception nor an interrupt."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _refusing(path: Path, refusal: type[KVGraphError], expected: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        reraise_if_signalled(error)
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise refusal(f"{path}: {expected} ({why})") from error
