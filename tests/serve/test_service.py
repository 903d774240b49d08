"""Texts are tokenized, and answers built, where they keep no other request waiting."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from kvgraph.contract.tokenizer import LONG_TEXT, most_characters
from kvgraph.runtime.logprobs import Logprob, TokenLogprobs
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.serve.answers import DONE, MANY
from kvgraph.serve.chats import answer_chat, chat_events
from kvgraph.serve.completions import _echo, _tokenized, answer_completion, completion_events
from kvgraph.serve.errors import ServeError
from kvgraph.serve.generation import Choice
from kvgraph.serve.jobs import Echo, Job
from kvgraph.serve.service import MOST_LONG_TEXTS, Served

LETTERS = pre_tokenizers.ByteLevel.alphabet()


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
    return Served(given, unused, facts, unused, unused, unused, unused, {}, 2)


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


class Answered:
    """A generation of one choice, whose answer has a log-probability more than its tokens."""

    prompt_tokens = cached_tokens = generated_tokens = 0

    def __init__(self, num_tokens: int) -> None:
        unused: Any = None
        one = TokenLogprobs(Logprob(5, -1.0, 1), ())
        tokens = [Token("a", 5, "x", None, logprobs=one)] * num_tokens
        tokens.append(tokens[0]._replace(finish_reason="stop"))
        self.choices = [Choice(0, [5], unused, unused, tokens)]

    async def all_tokens(self) -> list[list[Token]]:
        return [choice.tokens for choice in self.choices]

    async def __aiter__(self) -> AsyncIterator[list[Choice]]:
        yield self.choices


async def _read(events: AsyncIterator[bytes]) -> None:
    assert [frame async for frame in events][-1] == DONE


@pytest.mark.parametrize("make", [answer_completion, answer_chat, completion_events, chat_events])
@pytest.mark.parametrize(("num_tokens", "is_on_loop"), [(2, True), (MANY, False)])
def test_many_log_probabilities_leave_the_loop(
    num_tokens: int, is_on_loop: bool, make: Any
) -> None:
    threads = set()

    def spell(token: int) -> str:
        threads.add(threading.current_thread())
        return "x"

    recording: Any = spell
    recording.bytes_of = lambda token: b"x"
    params = [SamplingParams(logprobs=0)]
    job = Job("a", "a", [[5]], params, b"", False, False, recording, True)
    generation: Any = Answered(num_tokens)
    is_stream = make in (completion_events, chat_events)
    asyncio.run(_read(make(job, generation)) if is_stream else make(job, generation))
    assert threads
    assert (threads == {threading.main_thread()}) == is_on_loop
    assert (threading.main_thread() in threads) == is_on_loop


def tokenizer(splits: Any, normalizer: Any = None, **model: Any) -> Tokenizer:
    """Of tokens of three characters at most."""
    made = Tokenizer(models.BPE({"a": 0, "b": 1, "aab": 2}, [], **model))
    made.pre_tokenizer, made.normalizer = splits, normalizer
    return made


@pytest.mark.parametrize(
    ("splits", "normalizer", "text", "offsets"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=True), None, "ab  b", [0, 0, 0, 1, 2, 3, 4]),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), None, "<s>a\xe9b", [0, 0, 3, 4, 4, 5]),
        (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            normalizers.NFC(),
            "e\u0301b a",
            [0, 0, 0, 2, 3, 4],
        ),
        (pre_tokenizers.ByteLevel(add_prefix_space=False), normalizers.Strip(), " ab", [0, 0, 2]),
    ],
)
def test_offsets_are_of_the_text_that_is_given(
    splits: Any, normalizer: Any, text: str, offsets: list[int]
) -> None:
    """Whatever the tokenizer puts in front, joins or drops; a space belongs to the token behind."""
    made = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    made.pre_tokenizer, made.normalizer, made.decoder = splits, normalizer, decoders.ByteLevel()
    made.add_special_tokens(["<s>"])
    begins = [("<s>", made.token_to_id("<s>"))]
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A", special_tokens=begins),
        ]
    )
    given: Any = SimpleNamespace(tokenizer=made, tokenize=lambda text, **_: made.encode(text).ids)

    async def main() -> Echo:
        one = served(given)
        return await _echo(one, text, await one.tokenize(text), offsets=True)

    assert asyncio.run(main()) == Echo(text, offsets)


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
