"""Panics of llguidance, which are no Exceptions: the request at which it panics gets an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime import guide
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.guide import Guide

pytest.importorskip("llguidance", reason="structured output needs the extra `guide`")

A = SamplingParams(guided_regex="a[bc]{3}", max_new_tokens=6)
B = SamplingParams(guided_regex="d[ef]{3}", max_new_tokens=6)


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.fixture
def engine(compiled: Callable[..., Path]) -> Iterator[Engine]:
    with Engine(compiled("tiny-llama"), num_threads=1, num_pages=64) as made:
        yield made


def panics_after(kind: str, first: int) -> Callable[..., Any]:
    """The guide's method `kind`, which panics where the text begins with token `first`."""
    call = getattr(Guide, kind)

    def method(self: Guide, *given: Any) -> Any:
        text = self._context.tokens[self._prompt_length :]
        if text[:1].tolist() == [first]:
            raise PanicException("index out of bounds")
        return call(self, *given)

    return method


@pytest.mark.parametrize("kind", ["set_mask", "advance"])
def test_the_others_of_its_step_go_on(
    engine: Engine, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = engine.generate(["The", "The"], [A, B])
    first = wanted[0].token_ids[0]
    assert wanted[1].token_ids[0] != first
    monkeypatch.setattr(Guide, kind, panics_after(kind, first))
    bad, good = engine.generate(["The", "The"], [A, B])
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert bad.error.endswith(
        "expected a grammar that can be followed, got one at which llguidance panicked (index out "
        "of bounds)"
    )
    assert good.token_ids == wanted[1].token_ids
    assert not engine.busy
    monkeypatch.undo()
    assert engine.generate(["The"], [A])[0].text[:1] == "a"


def test_a_grammar_at_which_it_panics_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panics(*_: Any) -> Any:
        raise PanicException("index out of bounds")

    async def task() -> None:
        async with AsyncEngine(engine) as shared:
            assert (await shared.generate("The", A)).text[:1] == "a"
            monkeypatch.setattr(guide, "_matcher", panics)
            with pytest.raises(RequestError, match=r"^guided_regex: .*refuses \(index out of b"):
                await shared.generate("The", B)
            assert (await shared.generate("The", A)).text[:1] == "a"

    asyncio.run(asyncio.wait_for(task(), 60))


def test_a_step_that_panics_is_tried_again(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice, then its requests end, and the engine goes on."""
    run, fails = engine.session.run, [False, True, False, True, True]

    def panics(*given: Any, **named: Any) -> Any:
        if fails and fails.pop(0):
            raise PanicException("index out of bounds")
        return run(*given, **named)

    async def task() -> None:
        async with AsyncEngine(engine) as shared:
            monkeypatch.setattr(engine.session, "run", panics)
            params = SamplingParams(max_new_tokens=2)
            assert (await shared.generate("The", params)).finish_reason == "length"
            failed = await shared.generate("The", params)
            assert failed.error is not None
            assert failed.error.endswith("twice: PanicException: index out of bounds")
            assert (await shared.generate("The", params)).finish_reason == "length"

    asyncio.run(asyncio.wait_for(task(), 60))
