"""Stop strings: the text ends at the first that is complete, wherever tokens begin and end."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvgraph
from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.stopping import StopStrings, borders
from tests.runtime.scripted import assert_empty, greedy, scripted
from tests.runtime.test_text import Metaspace

BOS, EOS = 0, 1

# -- the text alone


def by_definition(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Where the first stop string that is complete begins; and that string."""
    ends = [(end, -len(stop), stop) for stop in stops for end in range(len(text) + 1)
            if text[:end].endswith(stop)]  # fmt: skip
    if not ends:
        return None
    end, _, stop = min(ends)
    return end - len(stop), stop


@given(
    pieces=st.lists(st.text("aab€", max_size=4), max_size=12),
    stops=st.lists(st.text("aab€", min_size=1, max_size=5), min_size=1, max_size=4),
    includes=st.booleans(),
)
def test_pieces_end_as_the_whole_text_does(
    pieces: list[str], stops: list[str], includes: bool
) -> None:
    """And what is handed over early is never more than what may be."""
    matcher, given, stop = StopStrings(stops, includes=includes), "", None
    for i, piece in enumerate(pieces):
        said, stop = matcher.step(piece, i + 1, ends=i == len(pieces) - 1)
        given += said
        if stop is not None:
            break
        whole = "".join(pieces[: i + 1])
        longest = max(
            n for s in stops for n in range(len(s)) if whole.endswith(s[:n]) and n <= len(whole)
        )
        assert len(given) == len(whole) - (longest if i < len(pieces) - 1 else 0)
    wanted = by_definition("".join(pieces), stops)
    if wanted is None:
        assert (given, stop) == ("".join(pieces), None)
    else:
        at, name = wanted
        assert stop == name
        assert given == "".join(pieces)[: at + len(name) if includes else at]


@pytest.mark.parametrize("size", range(1, 8))
def test_borders_of_every_short_text(size: int) -> None:
    for text in map("".join, product("ab", repeat=size)):
        ends = [text[:n] for n in range(size + 1)]
        assert borders(text) == tuple(
            max([k for k in range(len(end)) if end.endswith(text[:k])], default=0) for end in ends
        )


def test_none_counts_before_the_least_tokens() -> None:
    """One that began before then does, also inside one that did not count."""
    matcher = StopStrings(["ab"], least=3)
    said = [matcher.step(piece, i + 1) for i, piece in enumerate(["xab", "ya", "bz"])]
    assert said == [("xab", None), ("y", None), ("", "ab")]
    matcher = StopStrings(["aa"], least=3)
    assert [matcher.step("a", i + 1)[1] for i in range(3)] == [None, None, "aa"]


# -- in an engine


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


TEXT = "The cats, né€漢😀 and the hat. End"


def saying(artifact: Artifact, text: str = TEXT) -> tuple[Engine, int]:
    """An engine whose requests that begin with [BOS] say `text`; and of how many tokens it is."""
    engine = scripted(artifact, [BOS])
    engine.session.script = engine.tokenize(text)  # type: ignore[attr-defined]
    return engine, len(engine.session.script) - 1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("cat", "The ", "cat"),
        (["hat", "cats, n"], "The ", "cats, n"),
        (["€漢", "zzz"], "The cats, né", "€漢"),
        ("😀", "The cats, né€漢", "😀"),
        (("the hat. X", "t. E"), "The cats, né€漢😀 and the ha", "t. E"),
        ("The", "", "The"),
        (TEXT, "", TEXT),
    ],
)
def test_text_ends_before_a_stop_string(
    artifact: Artifact, stop: Any, text: str, reason: str
) -> None:
    engine, count = saying(artifact)
    done = engine.generate([[BOS]], greedy(count, stop=stop))[0]
    assert (done.text, done.finish_reason, done.stop_reason) == (text, "stop", reason)
    behind = engine.generate([[BOS]], greedy(count, stop=stop, include_stop_str_in_output=True))[0]
    assert behind.text == text + reason
    assert done.token_ids == behind.token_ids == engine.session.script[1:][: len(done.token_ids)]  # type: ignore[attr-defined]
    assert reason in engine._text.tokenizer.decode(done.token_ids)
    assert "".join(engine.stream([BOS], greedy(count, stop=stop))) == text
    assert_empty(engine)


def test_what_was_held_back_comes_at_the_end(artifact: Artifact) -> None:
    """By length, by an end token, and by a stop token."""
    engine, count = saying(artifact)
    held = "hat. End, and more"
    done = engine.generate([[BOS]], greedy(count, stop=held))[0]
    assert (done.text, done.finish_reason, done.stop_reason) == (TEXT, "length", None)
    pieces = list(engine.stream([BOS], greedy(count, stop=held)))
    assert "".join(pieces) == TEXT
    assert pieces[-1] == "hat. End"
    engine.session.script += [EOS]  # type: ignore[attr-defined]
    ended = engine.generate([[BOS]], SamplingParams(max_new_tokens=count + 1, stop=held))[0]
    assert (ended.text, ended.finish_reason, ended.stop_reason) == (TEXT, "stop", None)
    stops = greedy(count + 1, stop=held, stop_token_ids=(EOS,))
    stopped = engine.generate([[BOS]], stops)[0]
    assert (stopped.text, stopped.finish_reason, stopped.stop_reason) == (TEXT, "stop", EOS)


def test_the_last_token_may_complete_it(artifact: Artifact) -> None:
    engine, count = saying(artifact)
    done = engine.generate([[BOS]], greedy(count, stop="End"))[0]
    assert (done.text, done.finish_reason) == (TEXT[:-3], "stop")


def test_one_in_a_token_that_ends_within_a_character(artifact: Artifact) -> None:
    """The token that begins the character ends the text, whether another follows or not."""
    engine = scripted(artifact, [BOS])
    vocabulary = engine._text.tokenizer.get_vocab()  # type: ignore[union-attr]
    begun = vocabulary["\u0120\u00e2\u0122"]  # a space, and two of three bytes
    engine.session.script = [BOS, begun, begun]  # type: ignore[attr-defined]
    for count in (1, 2):
        done = engine.generate([[BOS]], greedy(count))[0]
        assert (done.text, done.finish_reason) == ([" ", " \ufffd "][count - 1], "length")
        done = engine.generate([[BOS]], greedy(count, stop=" "))[0]
        assert (done.text, done.finish_reason, done.stop_reason) == ("", "stop", " ")
        assert done.token_ids == [begun]


def test_stop_strings_wait_for_the_least_length(artifact: Artifact) -> None:
    engine, count = saying(artifact, "na na na na na na")
    plain = engine.generate([[BOS]], greedy(count, stop="na"))[0]
    late = engine.generate([[BOS]], greedy(count, stop="na", min_new_tokens=count - 1))[0]
    assert plain.text == ""
    assert len(late.token_ids) >= count - 1
    assert late.text.startswith("na na na")


def test_a_decoder_of_metaspaces(artifact: Artifact) -> None:
    engine = scripted(artifact, [0, 2, 3, 4, 6])  # The cats sat
    engine._text.tokenizer = Metaspace()
    done = engine.generate([[0, 2]], greedy(3, stop=["s sa", "cat sat"]))[0]
    assert (done.text, done.stop_reason) == (" cat", "s sa")


def test_stop_strings_need_a_tokenizer(artifact: Artifact) -> None:
    engine = Engine(artifact, num_pages=8)
    engine._text.tokenizer = None
    with pytest.raises(RequestError, match=r"^stop: expected no strings without a tokenizer, and "):
        engine.submit([5], greedy(2, stop="a"))
    assert not engine.busy


def test_one_row_stops_and_the_others_go_on(artifact: Artifact) -> None:
    engine, count = saying(artifact)
    sampling = [greedy(count), greedy(count, stop=","), greedy(count, stop="never")]
    whole, cut, held = engine.generate([[BOS]] * 3, sampling)
    assert (whole.text, cut.text, held.text) == (TEXT, "The cats", TEXT)
    assert len(cut.token_ids) < len(whole.token_ids) == len(held.token_ids)
