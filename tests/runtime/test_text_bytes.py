"""Text of tokens that end within a character, byte for byte: those of byte-fallback tokenizers, as
Llama 2, Mistral and Gemma have (`<0xE6>` is a byte), and of byte-level ones, whose tokens may also
hold whole characters before it."""

from __future__ import annotations

import codecs
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from kvgraph.contract.tokenizer import byte_letters
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.text import Alphabet, TextStream

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
    stream = TextStream(Alphabet(tokenizer), len(prompt))
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
        ([0x0A, 0xE6], [0xE6, A], "\ufffd a"),
        ([A, 0xE6], [0xE6, 0xE6], "\ufffd\ufffd"),
    ],
)
def test_a_lost_byte_that_changes_what_came_before(
    tokenizer: Tokenizer, prompt: list[int], generated: list[int], text: str
) -> None:
    assert text_of(tokenizer, prompt, generated) == text


def test_a_failure_of_the_tokenizer_is_raised(tokenizer: Tokenizer) -> None:
    stream = TextStream(Alphabet(tokenizer), 1)
    stream.start(TextContext("a", [A]))
    with pytest.raises(OverflowError):
        stream.step(1 << 40)


def test_wrong_bytes_come_at_once_and_also_at_the_end(tokenizer: Tokenizer) -> None:
    stream = TextStream(Alphabet(tokenizer), 1)
    stream.start(TextContext("a", [A]))
    pieces = [stream.step(token) for token in (0xE6, 0xE6, 0x9F, THE, 0xE6)]
    assert pieces == ["", "\ufffd\ufffd", "\ufffd", " the", ""]


def test_a_wrong_byte_at_the_start_of_a_text_is_followed_by_the_space(tokenizer: Tokenizer) -> None:
    ids = [0xE6, THE, A]
    assert text_of(tokenizer, [259], ids) == tokenizer.decode(ids) == "\ufffd the a"


def before_a_word(run: bytes) -> str:
    """What is shown of a run of byte tokens, before a token that is no byte."""
    try:
        return run.decode()
    except UnicodeDecodeError as error:
        return run[: error.start].decode() + "\ufffd" * (len(run) - error.start)


RUNS = st.binary(max_size=5) | st.text("é語😀", max_size=3).map(str.encode)


@given(runs=st.lists(RUNS, max_size=5))
def test_runs_of_bytes_are_whole_or_replaced(tokenizer: Tokenizer, runs: list[bytes]) -> None:
    """The tokenizer replaces each byte of a run with a wrong one; whole characters were shown."""
    ids = [token for run in runs for token in (*run, THE)]
    text = text_of(tokenizer, [A], ids)
    assert text == "".join([before_a_word(run) + " the" for run in runs])
    if all(before_a_word(run) == tokenizer.decode([*run, THE])[:-4] for run in runs):
        assert tokenizer.decode([A, *ids]) == "a" + text


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.decoded = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._tokenizer, name)

    def decode(self, ids: list[int]) -> str:
        self.decoded += len(ids)
        return str(self._tokenizer.decode(ids))


@pytest.mark.parametrize("token", [0xE6, 0x9F, THE, 259, 400])
def test_each_token_is_decoded_few_times(tokenizer: Tokenizer, token: int) -> None:
    """Also tokens that never make a character, special tokens (259) and unknown ones (400)."""
    assert_few_decoded(tokenizer, [A], [token] * 300)


@pytest.mark.parametrize("token", [b"\xe6", b"\xff", b"\x82\xac.\xe2", b"\xef\xbf\xbd"])
def test_each_byte_level_token_is_decoded_few_times(token: bytes) -> None:
    assert_few_decoded(byte_level([b"x", token]), [0], [1] * 300)


def assert_few_decoded(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> None:
    counted = Counted(tokenizer)
    stream = TextStream(Alphabet(counted), len(prompt))  # type: ignore[arg-type]
    stream.start(TextContext("a", prompt))
    for token in ids:
        stream.step(token)
    assert counted.decoded <= 4 * len(ids)


# -- byte-level tokens


def byte_level(tokens: list[bytes]) -> Tokenizer:
    """A tokenizer whose token i is `tokens[i]`."""
    letters = {byte: letter for letter, byte in byte_letters().items()}
    spelled = ["".join([letters[byte] for byte in token]) for token in tokens]
    made = Tokenizer(models.WordLevel({token: i for i, token in enumerate(spelled)}, spelled[0]))
    made.decoder = decoders.ByteLevel()
    return made


def cut(data: bytes, places: list[int]) -> list[bytes]:
    at = [0, *sorted({place % (len(data) + 1) for place in places}), len(data)]
    return [data[i:j] for i, j in pairwise(at) if i < j]


@st.composite
def pieces_of_text(draw: st.DrawFn) -> list[bytes]:
    """A text that is cut anywhere, and may end within a character."""
    data = draw(st.text("a né\u20ac\u6f22\U0001f600", min_size=1, max_size=12)).encode()
    data = data[: len(data) - draw(st.integers(0, 3))] or b"a"
    return cut(data, draw(st.lists(st.integers(0, 100), max_size=12)))


@given(
    tokens=pieces_of_text() | st.lists(st.binary(min_size=1, max_size=4), min_size=1, max_size=8),
    prompt=st.sampled_from([b"x", b"x y", b"\n\xe2\x82\xac"]),
)
def test_pieces_are_the_text_but_for_the_incomplete_end(tokens: list[bytes], prompt: bytes) -> None:
    known = [*dict.fromkeys([prompt, *tokens])]
    tokenizer = byte_level(known)
    ids = [known.index(token) for token in tokens]
    whole = tokenizer.decode([0, *ids]).removeprefix(prompt.decode())
    end = incomplete_end(b"".join(tokens))
    assert text_of(tokenizer, [0], ids) == whole[: len(whole) - end]


def incomplete_end(data: bytes) -> int:
    """Replacements for the bytes at the end that more bytes may complete to a character."""
    for count in (3, 2, 1):
        tail = data[-count:]
        if len(data) >= count and not codecs.getincrementaldecoder("utf-8")("replace").decode(tail):
            return len(tail.decode(errors="replace"))
    return 0


@given(tokens=pieces_of_text(), strips=st.booleans())
def test_pieces_where_another_decoder_follows(tokens: list[bytes], strips: bool) -> None:
    """Such a decoder gets whole characters, each with the tokens that it shares with others."""
    known = [*dict.fromkeys([b"x", *tokens])]
    tokenizer = byte_level(known)
    other = decoders.Strip(" ", 1, 0) if strips else decoders.Replace("n", "m")
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), other])
    ids = [known.index(token) for token in tokens]
    while incomplete_end(b"".join(tokens[: len(ids)])):
        del ids[-1]
    assert text_of(tokenizer, [0], ids) == tokenizer.decode([0, *ids]).removeprefix("x")


@given(tokens=pieces_of_text(), first=st.integers(1, 11))
def test_what_a_prompt_begins_is_of_its_completion(tokens: list[bytes], first: int) -> None:
    """The prompt's whole characters are not."""
    tokens = [b"x", *tokens]
    known = [*dict.fromkeys(tokens)]
    ids, first = [known.index(token) for token in tokens], min(first, len(tokens))
    before = b"".join(tokens[:first]).decode(errors="ignore")
    whole = b"".join(tokens).decode(errors="ignore")
    assert text_of(byte_level(known), ids[:first], ids[first:]) == whole.removeprefix(before)


@given(tokens=pieces_of_text())
def test_pieces_of_byte_fallback(tokenizer: Tokenizer, tokens: list[bytes]) -> None:
    data = b"".join(tokens)
    assert text_of(tokenizer, [A], list(data)) == data.decode(errors="ignore")


def test_whole_characters_come_with_their_token() -> None:
    tokenizer = byte_level([b"x", b" \xe2", b"\x82\xac.\xf0", b"\x9f\x98", b"\x80!"])
    stream = TextStream(Alphabet(tokenizer), 1)
    stream.start(TextContext("a", [0]))
    assert [stream.step(token) for token in (1, 2, 3, 4)] == [" ", "\u20ac.", "", "\U0001f600!"]


def test_bytes_that_no_character_ends_do_not_hold_up_the_rest() -> None:
    tokenizer = byte_level([b"x", b" \xe2", b"y\xff", b"z"])
    stream = TextStream(Alphabet(tokenizer), 2)
    stream.start(TextContext("a", [0, 1]))
    assert [stream.step(token) for token in (2, 1, 3, 2)] == ["y\ufffd", " ", "\ufffdz", "y\ufffd"]
