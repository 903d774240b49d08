"""What is queued and open does not depend on who reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime.sampling import Token
from kvgraph.runtime.stats import RequestStats
from kvgraph.runtime.token_stream import TokenStream
from kvgraph.serve.errors import ServeError
from kvgraph.serve.facts import facts_of
from kvgraph.serve.generation import Generation
from kvgraph.serve.load import Admission, Load
from kvgraph.serve.metrics import Metrics
from kvgraph.serve.options import ServeOptions


class Scripted:
    """A runner whose streams a test feeds."""

    is_closed = False

    def __init__(self) -> None:
        self.streams: list[TokenStream] = []

    async def submit(self, prompt: Sequence[int], *_: object, news: Any, **__: object) -> Any:
        if self.is_closed:
            raise RequestError("AsyncEngine.submit: expected a running engine")
        name = str(len(self.streams))
        stats = RequestStats(prompt_tokens=len(prompt))
        self.streams.append(TokenStream(name, stats, lambda stream: None, None, news))
        return self.streams[-1]


Parts = tuple[Scripted, Admission, Generation]


@pytest.fixture
def parts(engine: Engine) -> Parts:
    facts, stats, runner = facts_of(engine), engine.stats(), Scripted()
    admission = Admission(facts, ServeOptions(), lambda: Load(stats))
    metrics = Metrics("kvgraph:", "tiny", facts, lambda: stats)
    return runner, admission, Generation(runner, admission, metrics)


def counts(admission: Admission) -> tuple[int, int, int]:
    return admission.num_open, admission.num_queued, admission.queued_tokens


@pytest.mark.parametrize("reads", [True, False])
def test_a_reader_that_is_slow_keeps_nobody_out(parts: Parts, reads: bool) -> None:
    runner, admission, generation = parts

    async def main() -> None:
        await generation.start([[5, 6, 7]], [SamplingParams()] * 2, b"", 100)
        assert counts(admission) == (2, 2, 6)
        first, second = runner.streams
        first.give([Token("0", 5, "a", None)])
        assert counts(admission) == (2, 1, 3)
        first.give([Token("0", 5, "a", "length")])
        assert counts(admission) == (1, 1, 3)
        if reads:
            (choice,) = await anext(generation)
            assert len(choice.tokens) == 2
            assert counts(admission) == (1, 1, 3)
        second.give([Token("1", 5, "a", "stop")])
        assert counts(admission) == (0, 0, 0)
        generation.close()
        assert counts(admission) == (0, 0, 0)

    asyncio.run(main())


def test_who_leaves_is_counted_once(parts: Parts) -> None:
    runner, admission, generation = parts

    async def main() -> None:
        await generation.start([[5, 6, 7]], [SamplingParams()] * 2, b"", 100)
        runner.streams[0].give([Token("0", 5, "a", None)])
        generation.close()
        generation.close()
        assert counts(admission) == (0, 0, 0)

    asyncio.run(main())


def test_an_engine_that_has_ended_says_so(parts: Parts) -> None:
    runner, admission, generation = parts

    async def main() -> None:
        runner.is_closed = True
        with pytest.raises(ServeError, match="the server ends") as refused:
            await generation.start([[5]], [SamplingParams()], b"", 100)
        assert refused.value.status == 503
        assert counts(admission) == (0, 0, 0)

    asyncio.run(main())
