"""Tokens that a step has generated and no call has handed over yet: whose they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph import Engine, RequestError
from tests.runtime.scripted import assert_empty, greedy

PROMPTS = ("The import statement", "A class", "An exception")


@pytest.fixture(scope="module")
def engine(compiled: Callable[..., Path]) -> Engine:
    return Engine(kvgraph.load(compiled("tiny-llama")), num_pages=200)


@pytest.mark.parametrize("count", [3, 24], ids=["has ended", "runs"])
def test_cancel_drops_what_another_call_generated(engine: Engine, count: int) -> None:
    wanted = engine.generate(PROMPTS[:1], greedy(count))[0]
    for _ in range(2):  # its id is free afterwards
        engine.submit(PROMPTS[0], greedy(count), request_id="mine")
        engine.generate(PROMPTS[1:2], greedy(6))
        engine.cancel("mine")
        assert not engine.busy
        assert engine.step() == []
        with pytest.raises(RequestError, match="cancel of 'mine': expected an open request"):
            engine.cancel("mine")
    engine.submit(PROMPTS[0], greedy(count), request_id="mine")
    tokens = []
    while engine.busy:
        tokens += engine.step()
    assert [token.token_id for token in tokens] == wanted.token_ids
    assert_empty(engine)


def test_cancel_leaves_what_is_held_of_others(engine: Engine) -> None:
    wanted = engine.generate(PROMPTS[:2], greedy(4))
    for at in (0, 1):
        engine.submit(PROMPTS[at], greedy(4), request_id=str(at))
    engine.generate(PROMPTS[2:], greedy(6))
    engine.cancel("0")
    tokens = engine.step()
    assert {token.request_id for token in tokens} == {"1"}
    assert [token.token_id for token in tokens] == wanted[1].token_ids
    assert_empty(engine)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_step_leaves_a_stream_its_tokens(engine: Engine, pieces: int) -> None:
    """However many steps run meanwhile; they end, though the stream is open."""
    wanted = engine.generate(PROMPTS[:2], greedy(10))
    stream = engine.stream(PROMPTS[0], greedy(10))
    text = "".join([next(stream) for _ in range(pieces)])
    engine.submit(PROMPTS[1], greedy(10), request_id="mine")
    tokens = engine.step()
    while engine.busy:
        tokens += engine.step()
    assert {token.request_id for token in tokens} == {"mine"}
    assert [token.token_id for token in tokens] == wanted[1].token_ids
    assert engine.step() == []
    assert text + "".join(stream) == wanted[0].text
    assert_empty(engine)


def test_the_id_of_an_open_stream_is_in_use(engine: Engine) -> None:
    """Also once its last piece was read: the tokens of another request would be for the stream."""
    stream = engine.stream(PROMPTS[0], greedy(3))
    pieces = [next(stream)]
    (name,) = engine._open
    while engine.busy:
        assert engine.step() == []
    with pytest.raises(RequestError, match="expected a new id, got one in use"):
        engine.submit(PROMPTS[1], greedy(3), request_id=name)
    while engine._is_open(name):
        pieces.append(next(stream))
    with pytest.raises(RequestError, match="expected a new id, got one in use"):
        engine.submit(PROMPTS[1], greedy(3), request_id=name)
    pieces += stream
    assert "".join(pieces) == engine.generate(PROMPTS[:1], greedy(3))[0].text
    engine.submit(PROMPTS[1], greedy(1), request_id=name)
    assert [token.request_id for token in engine.step()] == [name]
    assert_empty(engine)


def test_a_stream_that_is_left_keeps_no_tokens(engine: Engine) -> None:
    stream = engine.stream(PROMPTS[0], greedy(10))
    next(stream)
    while engine.busy:
        assert engine.step() == []
    stream.close()
    assert_empty(engine)
