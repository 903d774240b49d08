"""Text of an engine: it continues the prompt, and comes in whole characters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine
from kvgraph.runtime.artifact import Artifact
from tests.runtime.scripted import assert_empty, greedy, scripted

PROMPTS = (
    "The import statement",
    "A class",
    "If the condition is true, the following suite is executed; otherwise",
    "def",
    "A function call always assigns values to all parameters mentioned in the parameter list, "
    "either from positional arguments, from keyword arguments, or from default values.",
    "An exception",
)
BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture(scope="module")
def roomy(artifact: Artifact) -> Engine:
    """One pool for all tests that only ask for tokens."""
    return Engine(artifact, num_pages=800)


def test_stream_gives_the_text_of_generate(roomy: Engine) -> None:
    completions = roomy.generate(PROMPTS, greedy(32))
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        pieces = list(roomy.stream(prompt, greedy(32)))
        assert len(pieces) > 8
        assert all(pieces)
        assert "".join(pieces) == completion.text
    assert_empty(roomy)


def test_text_continues_the_prompt(roomy: Engine) -> None:
    """A completion's text is what the tokenizer makes of prompt and output together."""
    for prompt, done in zip(PROMPTS, roomy.generate(PROMPTS, greedy(16)), strict=True):
        tokens = roomy.tokenize(prompt) + done.token_ids
        assert roomy._text.tokenizer.decode(tokens) == prompt + done.text


def test_text_and_token_ids_are_the_same_prompt(roomy: Engine) -> None:
    tokens = roomy.tokenize(PROMPTS[0])
    assert tokens[0] == BOS
    of_text, of_list, of_array = roomy.generate([PROMPTS[0], tokens, np.array(tokens)], greedy())
    assert of_text.token_ids == of_list.token_ids == of_array.token_ids


CHARACTERS = "né€漢😀 ok"


def test_pieces_hold_whole_characters(artifact: Artifact, roomy: Engine) -> None:
    """The tokenizer splits these characters into 2, 3 and 4 tokens of one byte each."""
    script = roomy.tokenize(CHARACTERS)
    assert len(script) >= 2 * len(CHARACTERS)
    engine = scripted(artifact, script)
    pieces = list(engine.stream([BOS], greedy(len(script) - 1)))
    assert "".join(pieces) == CHARACTERS
    assert all(piece in CHARACTERS for piece in pieces)
    assert "😀" in pieces


@pytest.mark.parametrize("missing", [1, 2, 3])
def test_a_character_cut_off_by_the_end_is_left_out(
    artifact: Artifact, roomy: Engine, missing: int
) -> None:
    script = roomy.tokenize("ok 😀")
    engine = scripted(artifact, script)
    params = greedy(len(script) - 1 - missing)
    assert "".join(engine.stream([BOS], params)) == "ok "
    completion = engine.generate([[BOS]], params)[0]
    assert completion.text == "ok "
    assert completion.token_ids == script[1 : len(script) - missing]


def test_a_character_that_the_prompt_began_is_completed(artifact: Artifact, roomy: Engine) -> None:
    script = roomy.tokenize("x€ y")
    engine = scripted(artifact, script)
    for end in (3, 4):  # [<s>, x, first byte of three], then one more
        assert "".join(engine.stream(script[:end], greedy(len(script) - end))) == "€ y"


class Metaspace:
    """A tokenizer as Llama 2 and Mistral have it: "▁" is a space, the first one is stripped."""

    VOCABULARY = ("<s>", "</s>", "▁The", "▁cat", "s", "▁", "▁sat")

    def __new__(cls) -> Any:
        from tokenizers import Tokenizer, decoders, models

        vocabulary = {token: i for i, token in enumerate(cls.VOCABULARY)}
        tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<s>"))
        tokenizer.add_special_tokens(["<s>", "</s>"])
        steps = [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer


def test_the_space_before_the_first_word_is_kept(artifact: Artifact) -> None:
    script = [0, 2, 3, 4, 6]  # The cats sat
    engine = scripted(artifact, script)
    engine._text.tokenizer = Metaspace()
    assert list(engine.stream(script[:2], greedy(3))) == [" cat", "s", " sat"]
    assert list(engine.stream(script[:1], greedy(4))) == ["The", " cat", "s", " sat"]


@pytest.mark.parametrize("specials", [7, 8, 30])
def test_special_tokens_do_not_begin_a_text(artifact: Artifact, specials: int) -> None:
    script = [0, 2, *[0] * specials, 3, 4]
    engine = scripted(artifact, script)
    engine._text.tokenizer = Metaspace()
    assert list(engine.stream(script[:-2], greedy(2))) == [" cat", "s"]
