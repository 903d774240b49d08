"""A tokenizer as it is read, and bytes of tokens, of the two kinds of vocabulary that have parts of
characters."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE

from kvgraph.contract.tokenizer import byte_pieces, encode, read_tokenizer
from kvgraph.errors import ModelError


def of(vocabulary: list[str], decoder: decoders.Decoder) -> Tokenizer:
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(BPE(ids, [], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def test_no_text_is_cut_or_padded(tmp_path: Path) -> None:
    """A file may have the limits of its training, which transformers does not use either."""
    saved = of(["a", "b"], decoders.ByteLevel())
    saved.enable_truncation(2)
    saved.enable_padding(length=8, pad_id=1)
    path = tmp_path / "tokenizer.json"
    saved.save(str(path))
    tokenizer = read_tokenizer(path, ModelError)
    for count in (1, 5, 20_000):  # the last one goes another way
        assert encode(tokenizer, "a" * count, path, ModelError, special_tokens=True) == [0] * count


def test_letters_stand_for_bytes() -> None:
    piece = byte_pieces(of(["\u0120a", "\u00f0\u0141", "\u4e00"], decoders.ByteLevel()))
    assert [piece(token) for token in range(5)] == [b" a", b"\xf0\x9f", None, None, None]


def test_letters_that_spell_a_byte_are_text_among_letters() -> None:
    assert byte_pieces(of(["<0xE2>"], decoders.ByteLevel()))(0) == b"<0xE2>"


def test_tokens_stand_for_bytes() -> None:
    fallback = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    piece = byte_pieces(of(["\u2581a", "<0xE2>", "\u00e9"], fallback))
    assert [piece(token) for token in range(4)] == [None, b"\xe2", None, None]


def test_without_a_tokenizer_there_are_none() -> None:
    assert byte_pieces(None)(7) is None
