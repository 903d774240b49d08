"""Texts are tokenized where they keep no other request waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

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
        self._text = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"ab": 0}))
        self._text.tokenizer.normalizer = None

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
    return Served(given, unused, facts, unused, unused, unused, unused)


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
            await one.tokenize("a" * (2 * longest + 2), most=longest)
        assert not prompts.threads
        await one.tokenize("a" * (2 * longest + 1), most=longest)
        await one.tokenize("a" * (2 * longest + 2))  # none said how long

    asyncio.run(main())
    assert len(prompts.threads) == 2


def test_a_normalizer_may_lose_characters() -> None:
    tokenizer: Any = Tokenizing()._text.tokenizer
    assert most_characters(tokenizer) == 2
    tokenizer.normalizer = "NFC"
    assert most_characters(tokenizer) == 8
