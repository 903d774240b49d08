"""The vocabulary that llguidance sees: each token's bytes, and an encoder of forced text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from kvgraph.contract.plain import JsonObject

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from tokenizers import Tokenizer

SPECIAL = b"\xff"
"""Prefix of a special token's bytes, in llguidance."""

AS_GIVEN: dict[str, JsonObject] = {
    "ByteLevel": {"add_prefix_space": False},
    "Metaspace": {"prepend_scheme": "never"},
}
"""Settings with which a pre-tokenizer adds nothing to a text."""

SPACES: JsonObject = {"String": " "}
"""The pattern of a normalizer that spells spaces as the tokens do."""

MOST_COMPARED = 1 << 14
"""Most tokens whose text is compared: about 50 ms."""


class ForcedText(partial[list[int]]):
    """A vocabulary for llguidance that encodes the text which a grammar forces, unchanged.

    A tokenizer may change a text before it encodes it: by a Unicode normal form, a space in front,
    or added tokens, which are not text to a grammar. So this calls a plain tokenizer's encoder. It
    is a partial of a native function, because llguidance calls it during its own work: an interrupt
    in Python code there would be lost, and end the request.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None
    special_token_ids: Sequence[int] = ()
    eos_token_id: int
    tokens: Sequence[bytes]


def forced_text(tokenizer: Tokenizer, own: LLTokenizer) -> ForcedText:
    """The vocabulary with the tokens of `own`, llguidance's reading of `tokenizer`.

    ValueError if `own` gives a token another text than `tokenizer` does.
    """
    forced = ForcedText(type(own)(_plain(tokenizer).to_str()).tokenize_str)
    forced.eos_token_id = own.eos_token
    forced.tokens = [_bytes_of(own, token) for token in range(own.vocab_size)]
    _require_same_text(tokenizer, forced.tokens)
    return forced


def _require_same_text(tokenizer: Tokenizer, spelled: Sequence[bytes]) -> None:
    """Raise ValueError unless the tokens of `spelled` have the text that `tokenizer` gives them
    behind an "a". Tokens with a part of a character are not compared."""
    first = tokenizer.encode("a", add_special_tokens=False).ids
    start = tokenizer.decode(first, skip_special_tokens=False)
    known = tokenizer.get_vocab_size()
    tokens = range(0, known, -(-known // MOST_COMPARED))
    texts = tokenizer.decode_batch([[*first, token] for token in tokens], skip_special_tokens=False)
    for token, text in zip(tokens, texts, strict=True):
        own, text = spelled[token], text.removeprefix(start)
        is_text = own and not own.startswith(SPECIAL) and "\ufffd" not in text
        if is_text and text.encode() != own:
            raise ValueError(f"its decoder makes {text!r} of token {token}, not {own!r}")


def _bytes_of(tokenizer: LLTokenizer, token: int) -> bytes:
    """A token's bytes as llguidance expects them; empty if it has none, where llguidance returns
    the token's number in brackets."""
    spelled = tokenizer.decode_bytes([token])
    if tokenizer.is_special_token(token):
        return SPECIAL + spelled
    return b"" if spelled == f"<[{token}]>".encode() else spelled


def _plain(tokenizer: Tokenizer) -> Tokenizer:
    """A tokenizer with the same model, but no added tokens, that encodes a text unchanged."""
    from tokenizers import Tokenizer, models

    steps = Tokenizer(models.BPE())  # its JSON is small
    steps.normalizer, steps.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    steps.decoder = tokenizer.decoder
    fields: JsonObject = json.loads(steps.to_str())
    kept = [step for step in _steps(fields["normalizer"]) if step.get("pattern") == SPACES]
    splits = [step | AS_GIVEN.get(step["type"], {}) for step in _steps(fields["pre_tokenizer"])]
    fields["normalizer"] = {"type": "Sequence", "normalizers": kept}
    fields["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": splits}
    plain = Tokenizer.from_str(json.dumps(fields))
    plain.model = tokenizer.model
    return plain


def _steps(step: JsonObject | None) -> list[JsonObject]:
    """The steps of a normalizer or pre-tokenizer, in order."""
    if step is None or step["type"] != "Sequence":
        return [] if step is None else [step]
    parts = step.get("normalizers") or step.get("pretokenizers") or ()
    return [each for part in parts for each in _steps(part)]
