"""How single tokens read, with the tokenizers that models have."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvgraph.contract.tokenizer import byte_pieces
from kvgraph.runtime.chat import Prompts
from kvgraph.runtime.logprobs import Logprob, TokenLogprobs
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.text import Alphabet, TextStream
from kvgraph.serve.answers import (
    Spelling,
    chat_logprobs,
    completion_logprobs,
    encoded,
    offsets_of,
)
from kvgraph.serve.service import _decoder

SPACE = "\u2581"
LLAMA_2 = decoders.Sequence(
    [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
)
WORDS = ["the", f"{SPACE}the", f"{SPACE}cat", SPACE, f"{SPACE}{SPACE}", "<0x20>", "<0xE2>", "é"]
THE, _THE, _CAT, *_ = range(len(WORDS))
BOS = len(WORDS)


def spelling(folder: Path, words: list[str], decoder: decoders.Decoder) -> Spelling:
    """Of an artifact with such a tokenizer, and a special token behind its words."""
    vocabulary = {word: token for token, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    prompts = Prompts(folder)
    return Spelling(_decoder(prompts), byte_pieces(prompts.tokenizer))


@pytest.mark.parametrize("decoder", [LLAMA_2, decoders.Metaspace(SPACE)])
def test_the_space_of_a_token_is_a_part_of_it(decoder: decoders.Decoder, tmp_path: Path) -> None:
    """Decoders of SentencePiece take it off the first token of a text."""
    spell = spelling(tmp_path, WORDS, decoder)
    texts = ["the", " the", " cat", " ", "  ", " ", "\N{REPLACEMENT CHARACTER}", "é", "<s>"]
    assert [spell(token) for token in range(BOS + 1)] == texts
    own = [text.encode() for text in texts]
    own[WORDS.index("<0xE2>")] = b"\xe2"
    assert [spell.bytes_of(token) for token in range(BOS + 1)] == own


def test_log_probabilities_are_of_the_text_behind_a_prompt(tmp_path: Path) -> None:
    spell = spelling(tmp_path, WORDS, LLAMA_2)
    stream = TextStream(Alphabet(Prompts(tmp_path).tokenizer), 0)
    stream.begin()
    ids = [_THE, _CAT, THE]
    prompt = stream.step(_CAT)
    tokens = [Token("a", token, stream.step(token), None) for token in ids]
    text = prompt + "".join([token.text for token in tokens])
    other = {_THE: THE, THE: _THE, _CAT: THE}
    scores = [
        TokenLogprobs(Logprob(token, -3.0, 2), (Logprob(other[token], -0.1, 1),)) for token in ids
    ]
    found = completion_logprobs(scores, ids, offsets_of(tokens, len(prompt)), spell)
    assert (text, found["tokens"]) == ("cat the catthe", [" the", " cat", "the"])
    assert found["text_offset"] == [3, 7, 11]
    assert msgspec.json.decode(encoded(found["top_logprobs"])) == [
        {"the": -0.1, " the": -3.0},
        {"the": -0.1, " cat": -3.0},
        {" the": -0.1, "the": -3.0},
    ]
    content = msgspec.json.decode(encoded(chat_logprobs(scores, spell)))["content"]
    assert [one["token"] for one in content] == found["tokens"]
    assert b"".join([bytes(one["bytes"]) for one in content]).decode() == text[len(prompt) :]


def test_tokens_of_letters_for_bytes(tmp_path: Path) -> None:
    """Some begin or end within a character, or do both."""
    parts = [b" a", "é".encode()[:1], b"\xa9\xe2", b"\xe2\x82"]
    letters = ["\u0120a", "\u00c3", "\u00a9\u00e2", "\u00e2\u0124"]
    spell = spelling(tmp_path, [*letters, "<0xE2>", "\u4e00"], decoders.ByteLevel())
    lost = "\N{REPLACEMENT CHARACTER}"
    texts = [" a", lost, lost * 2, lost, "<0xE2>", "\u4e00", "<s>"]
    assert [spell(token) for token in range(7)] == texts
    assert [spell.bytes_of(token) for token in range(4)] == parts


def test_an_artifact_without_a_tokenizer_has_ids(tmp_path: Path) -> None:
    spell = Spelling(_decoder(Prompts(tmp_path)), byte_pieces(None))
    assert (spell(7), spell.bytes_of(7)) == ("token_id:7", b"token_id:7")
