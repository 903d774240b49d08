"""Text of byte-fallback tokenizers, as Llama 2, Mistral and Gemma have: `<0xE6>` is a byte."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvgraph.kv.requests import TextContext
from kvgraph.runtime.text import TextStream

WORDS = ["\u2581the", "\u2581a", "b"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {word: 256 + i for i, word in enumerate(WORDS)}
    made = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken("<s>", special=True)])
    return made


THE, A = 256, 257


def text_of(tokenizer: Tokenizer, prompt: list[int], generated: list[int]) -> str:
    """Behind `prompt`; the same where the decoder begins again behind each token."""
    context = TextContext("a", prompt)
    stream = TextStream(tokenizer, len(prompt))
    stream.start(context)
    pieces = [stream.step(token) for token in generated]
    again = []
    for token in generated:
        stream.start(context)
        again.append(stream.step(token))
        context.update(token)
    assert again == pieces
    return "".join(pieces)


@pytest.mark.parametrize("prompt", ["日本", "日本語", "日本語日本語", "สวัสดี", "😀😀😀", "né"])
@pytest.mark.parametrize("generated", ["語", "é", ""])
def test_bytes_of_the_prompt_are_read_from_a_characters_first(
    tokenizer: Tokenizer, prompt: str, generated: str
) -> None:
    before = [A, *prompt.encode()]
    assert text_of(tokenizer, before, [*generated.encode(), THE]) == f"{generated} the"


def test_bytes_that_are_no_character_are_replaced_and_the_text_goes_on(
    tokenizer: Tokenizer,
) -> None:
    """The line break came before; the decoder itself raises at the word behind the lost byte."""
    assert text_of(tokenizer, [A], [0x0A, 0xE6, THE, A]) == "\n\ufffd the a"


def test_a_character_that_the_prompt_began_is_completed(tokenizer: Tokenizer) -> None:
    first, *rest = "語".encode()
    assert text_of(tokenizer, [A, first], [*rest, THE]) == "語 the"


def test_what_the_prompt_left_incomplete_is_not_of_the_completion(tokenizer: Tokenizer) -> None:
    assert text_of(tokenizer, [A, 0xE8, 0xAA], [THE, A]) == " the a"


@pytest.mark.parametrize(
    ("prompt", "generated", "text"),
    [
        ([A, 0x0A, 0xE6], [A], " a"),
        ([A, 0x0A, 0xE6, A, 0xE6], [THE], " the"),
        ([0x0A, 0xE6], [0xE6, A], " a"),
    ],
)
def test_a_lost_byte_that_changes_what_came_before(
    tokenizer: Tokenizer, prompt: list[int], generated: list[int], text: str
) -> None:
    assert text_of(tokenizer, prompt, generated) == text


def test_other_failures_of_a_decoder_are_raised(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, 1)
    stream.start(TextContext("a", [A]))
    with pytest.raises(TypeError):
        stream.step(1 << 40)
