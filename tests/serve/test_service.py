"""Texts are tokenized where they keep no other request waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from kvgraph.contract.tokenizer import LONG_TEXT, most_characters
from kvgraph.serve.completions import _tokenized
from kvgraph.serve.errors import ServeError
from kvgraph.serve.service import MOST_LONG_TEXTS, Served


class Tokenizing:
    """A tokenizer of characters; `threads`: where it ran; `most`: how often at a time."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.now = self.most = 0
        self._lock = threading.Lock()

    def tokenize(self, text: str, *, special_tokens: bool) -> list[int]:
        with self._lock:
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.01)
        self.threads.append(threading.current_thread())
        with self._lock:
            self.now -= 1
        return [1] * len(text)


def served(prompts: Tokenizing) -> Served:
    facts: Any = SimpleNamespace(longest=LONG_TEXT + 9, vocab_size=9)
    unused: Any = None
    given: Any = prompts
    return Served(given, unused, facts, unused, unused, unused, unused, 2)


def test_short_texts_that_are_long_together_leave_the_loop() -> None:
    prompts = Tokenizing()
    texts: list[str | list[int]] = ["a" * 100, "b" * LONG_TEXT]

    async def main() -> None:
        await _tokenized(served(prompts), texts[:1], 1, False)
        assert prompts.threads == [threading.main_thread()]
        await _tokenized(served(prompts), texts, 1, False)
        assert threading.main_thread() not in prompts.threads[1:]

    asyncio.run(main())


def test_few_long_texts_at_a_time() -> None:
    prompts = Tokenizing()

    async def main() -> None:
        one = served(prompts)
        await asyncio.gather(*[one.tokenize("a" * (LONG_TEXT + 1)) for _ in range(6)])

    asyncio.run(main())
    assert prompts.most == MOST_LONG_TEXTS


def test_a_text_that_no_context_holds_is_not_tokenized() -> None:
    """Of tokens of two characters at most."""
    prompts = Tokenizing()

    async def main() -> None:
        one, longest = served(prompts), LONG_TEXT + 9
        with pytest.raises(ServeError, match=f"got a text of at least {longest + 1}"):
            await one.tokenize("a" * (2 * longest + 1), most=longest)
        assert not prompts.threads
        await one.tokenize("a" * (2 * longest), most=longest)
        await one.tokenize("a" * (2 * longest + 2))  # none said how long

    asyncio.run(main())
    assert len(prompts.threads) == 2


def tokenizer(splits: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    """Of tokens of three characters at most."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "aab": 2}, [], **model))
    made.pre_tokenizer, made.normalizer = splits, normalizer
    return made


def test_how_much_text_a_token_stands_for() -> None:
    of_bytes = pre_tokenizers.ByteLevel()
    assert most_characters(tokenizer(of_bytes)) == 3
    assert most_characters(tokenizer(of_bytes, normalizers.NFC())) == 12
    assert most_characters(tokenizer(pre_tokenizers.Metaspace(), byte_fallback=True)) == 3


@pytest.mark.parametrize(
    "splits",
    [
        pre_tokenizers.Metaspace(),
        pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel()]),
        pre_tokenizers.Sequence([pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel()]),
    ],
)
def test_text_that_no_token_stands_for(splits: Any) -> None:
    """What a vocabulary has not may be one token, and spaces may be dropped."""
    assert most_characters(tokenizer(splits)) is None
