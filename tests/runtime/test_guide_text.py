"""Guided text is as its grammar has it, whatever the tokenizer makes of a text before it encodes
it, and whatever the prompt is."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers

import kvgraph
from kvgraph import Engine, SamplingParams, TextContext
from kvgraph.contract.manifest import ModelInfo
from kvgraph.runtime.edits import LogitEdits
from kvgraph.runtime.guide import Guides, set_masks
from tests.support.artifacts import TINY_LLAMA

pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

END = 1

NAMED = SamplingParams(
    guided_json={
        "type": "object",
        "properties": {"the name": {"enum": [1, 2]}},
        "required": ["the name"],
        "additionalProperties": False,
    }
)


def regex(text: str) -> SamplingParams:
    return SamplingParams(guided_regex=text)


def adds(*tokens: str) -> Callable[[Tokenizer], None]:
    """Tokens that are not special; the last takes the spaces around it."""

    def change(tokenizer: Tokenizer) -> None:
        flags = [{"lstrip": token == tokens[-1], "rstrip": token == tokens[-1]} for token in tokens]
        tokenizer.add_tokens([AddedToken(t, **f) for t, f in zip(tokens, flags, strict=True)])

    return change


def normalizes(*steps: normalizers.Normalizer) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        tokenizer.normalizer = normalizers.Sequence(list(steps))

    return change


def puts_a_space_in_front(tokenizer: Tokenizer) -> None:
    parts = [pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> kvgraph.Artifact:
    return kvgraph.load(compiled("tiny-llama"))


def text_under(params: SamplingParams, tokenizer: Tokenizer, model: ModelInfo, seed: int) -> str:
    """Of tokens that are drawn at random, and those that they force."""
    context, random, grammar = TextContext("a", [5]), Random(seed), params.grammar
    assert grammar is not None
    edits = LogitEdits(params, context)
    guide = Guides(model, Path(), tokenizer).guide(grammar, params, context, {END}, edits)
    generated: list[int] = []
    is_done = False
    while not is_done:
        set_masks([guide])
        assert edits.mask is not None
        assert not guide.error
        allowed = np.flatnonzero(np.unpackbits(edits.mask.view(np.uint8), bitorder="little"))
        if (token := int(random.choice(allowed.tolist()))) == END:
            break
        forced, is_done = guide.advance(token)
        generated += [token, *forced]
        for each in (token, *forced):
            context.update(each)
    return str(tokenizer.decode(generated))


@pytest.mark.parametrize(
    ("change", "params", "shape"),
    [
        (adds("<b>"), regex("<b>[a-z]{3}</b>"), "<b>[a-z]{3}</b>"),
        (adds("<b>"), regex("(yes|no) <b>[a-z]{3}"), "(yes|no) <b>[a-z]{3}"),
        (adds("one", "two"), regex("one  two  one[a-z]"), "one  two  one[a-z]"),
        (adds("<b>"), SamplingParams(guided_grammar='start: <b> /[a-z]/ "</s>"'), "<b>[a-z]</s>"),
        (normalizes(normalizers.NFC()), regex("10 k\u2126[ab]"), "10 k\u2126[ab]"),
        (normalizes(normalizers.NFC()), regex("[ab] re\u0301sume\u0301[ab]"), "[ab] re\u0301s.*"),
        (normalizes(normalizers.Lowercase()), regex("(A|B)CD[E-G]"), "[AB]CD[E-G]"),
        (normalizes(normalizers.Replace("x", "y")), regex("a box[ab]"), "a box[ab]"),
        (puts_a_space_in_front, regex("the [ab]"), "the [ab]"),
        (puts_a_space_in_front, NAMED, r'\{"the name":[12]\}'),
    ],
)
def test_text_that_the_tokenizer_would_change_is_forced_as_it_is_written(
    artifact: kvgraph.Artifact,
    change: Callable[[Tokenizer], None],
    params: SamplingParams,
    shape: str,
) -> None:
    tokenizer = Tokenizer.from_file(str(TINY_LLAMA / "tokenizer.json"))
    change(tokenizer)
    model = replace(artifact.manifest.model, vocab_size=tokenizer.get_vocab_size() + 2)
    for seed in range(4):
        text = text_under(params, tokenizer, model, seed)
        assert re.fullmatch(shape, text), text


@pytest.mark.parametrize(
    ("steps", "spelled"),
    [
        ([decoders.ByteFallback(), decoders.Metaspace()], "\u2581"),
        ([decoders.ByteFallback(), decoders.ByteLevel()], "\u0120"),
        ([decoders.ByteLevel(), decoders.Replace("x", "y")], "\u0120"),
        ([decoders.Metaspace(), decoders.ByteFallback(), decoders.Fuse()], "\u2581"),
        ([decoders.Replace(Regex("\u2581"), " "), decoders.ByteFallback()], "\u2581"),
    ],
)
def test_a_tokenizer_that_llguidance_misreads_is_refused(
    artifact: kvgraph.Artifact, steps: list[decoders.Decoder], spelled: str
) -> None:
    """Its text would not be as the grammar has it."""
    text = (TINY_LLAMA / "tokenizer.json").read_text()
    tokenizer = Tokenizer.from_str(text.replace("\u0120", spelled))
    tokenizer.decoder = decoders.Sequence(steps)
    with pytest.raises(kvgraph.UnsupportedError, match=r"guided_regex: .* takes, .*its decoder ma"):
        text_under(regex("[a-z]"), tokenizer, artifact.manifest.model, 0)


def test_a_first_space_stays_behind_a_prompt_without_text(
    artifact: kvgraph.Artifact,
) -> None:
    """As the decoder of Llama 2's tokenizer strips it from a whole text."""
    with Engine(artifact, num_pages=64, num_threads=1) as engine:
        assert engine._text.tokenizer is not None
        stripping = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
        engine._text.tokenizer.decoder = stripping
        for prompt in ([0], [0, 0], "The"):
            params = SamplingParams(guided_regex=" [a-z]{3}x", temperature=1, seed=1)
            done = engine.generate([prompt], params)[0]
            assert re.fullmatch(" [a-z]{3}x", done.text), done.text
