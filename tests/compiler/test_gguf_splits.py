"""GGUF files: byte-level tokenizers split a text into words as the file names it."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models

from kvgraph.compiler.frontends.gguf_splits import CASED, SPLITS, splitter

TEXT = "I'LL pay 1234 元です!?\n\n  x_y"
WORDS = {
    "gpt-2": "I|'|LL| pay| 1234| 元です|!?|\n\n | x|_|y",
    "starcoder": "I|'|LL| pay| |1|2|3|4| 元です|!?|\n\n | x|_|y",
    "stablelm2": "I|'LL| pay| |1|2|3|4| 元です|!?\n\n| | x|_y",
    "bailingmoe": "I|'LL| pay| |1|2|3|4| 元です|!?\n\n| | x|_y",
    "seed-coder": "I|'LL| pay| |1|2|3|4| 元です|!?|\n\n| | x|_y",
    "glm4": "I|'LL| pay| |123|4| 元です|!?\n\n| | x|_y",
    "deepseek-v3": "I|'LL| pay| |123|4| |元です|!?\n\n| | x|_y",
    "deepseek-llm": "I|'|LL| pay| |1234| |元です|!?|\n|\n| | x|_|y",
    "deepseek-coder": "I|'|LL| pay| |1|2|3|4| |元です|!?|\n|\n| | x|_|y",
}


def words(patterns: tuple[str, ...], text: str) -> list[str]:
    data = json.loads(Tokenizer(models.BPE()).to_str()) | {"pre_tokenizer": splitter(patterns)}
    found = Tokenizer.from_str(json.dumps(data)).pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in found]


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    assert words(tuple(SPLITS[name]), TEXT) == WORDS[name].split("|")


@pytest.mark.parametrize("name", SPLITS)
def test_each_name_splits_as_one_of_them(name: str) -> None:
    """Without losing a character."""
    found = words(tuple(SPLITS[name]), TEXT)
    assert "|".join(found) in WORDS.values()
    assert "".join(found) == TEXT


@pytest.mark.parametrize(
    ("letter", "is_cased"),
    [*((each, True) for each in "ÀßЖΩ"), *((each, False) for each in "元აՙ\U0001d400")],
)
def test_letters_with_two_cases(letter: str, is_cased: bool) -> None:
    """DeepSeek's list has no mathematical letters, and none of Georgian's small ones."""
    assert len(words((f"{CASED}+",), f"b{letter}")) == (1 if is_cased else 2)
