"""What is queued and open does not depend on who reads."""

from __future__ import annotations

import asyncio
import gc
import json
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.runtime.logprobs import Logprob, TokenLogprobs
from kvgraph.runtime.sampling import NO_TOKEN, Token
from kvgraph.runtime.stats import RequestStats
from kvgraph.runtime.token_stream import ENDED, TokenStream, failed
from kvgraph.serve.answers import Spelling, failure
from kvgraph.serve.chats import chat_events
from kvgraph.serve.completions import completion_events
from kvgraph.serve.errors import ServeError
from kvgraph.serve.facts import facts_of
from kvgraph.serve.generation import Generation
from kvgraph.serve.jobs import Echo, Job
from kvgraph.serve.load import Admission, Load
from kvgraph.serve.metrics import Metrics
from kvgraph.serve.options import ServeOptions


class Scripted:
    """A runner whose streams a test feeds; `told`: what it was given with each prompt."""

    is_closed = False

    def __init__(self) -> None:
        self.streams: list[TokenStream] = []
        self.told: list[dict[str, object]] = []

    async def submit(self, prompt: Sequence[int], *_: object, news: Any, **more: object) -> Any:
        if self.is_closed:
            raise RequestError("AsyncEngine.submit: expected a running engine")
        name = str(len(self.streams))
        stats = RequestStats(prompt_tokens=len(prompt))
        self.told.append(more)
        self.streams.append(TokenStream(name, stats, lambda stream: None, None, news))
        return self.streams[-1]


Parts = tuple[Scripted, Admission, Generation]
Events = Callable[[Job, Generation], AsyncIterator[bytes]]


def generation_of(engine: Engine, runner: Scripted) -> tuple[Admission, Generation]:
    facts, stats = facts_of(engine), engine.stats()
    admission = Admission(facts, ServeOptions(), lambda: Load(stats))
    metrics = Metrics("kvgraph:", "tiny", facts, lambda: stats)
    return admission, Generation(runner, admission, metrics)


@pytest.fixture
def parts(engine: Engine) -> Parts:
    runner = Scripted()
    return runner, *generation_of(engine, runner)


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


def test_a_runner_is_told_the_salt_and_how_much_may_be_unread(parts: Parts) -> None:
    runner, _, generation = parts
    asyncio.run(generation.start([[5, 6, 7]], [SamplingParams()] * 2, b"salt", 100))
    assert runner.told == [{"cache_salt": b"salt", "most_unread": 100}] * 2


def test_who_leaves_is_counted_once(parts: Parts) -> None:
    runner, admission, generation = parts

    async def main() -> None:
        await generation.start([[5, 6, 7]], [SamplingParams()] * 2, b"", 100)
        runner.streams[0].give([Token("0", 5, "a", None)])
        generation.close()
        generation.close()
        assert counts(admission) == (0, 0, 0)

    asyncio.run(main())


def test_gaps_are_between_deliveries_whoever_reads(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three tokens came in two, 0.06 s apart, before any was read; then two 0.2 s later."""
    runner, _, generation = parts
    clock = iter([1.0, 1.06, 1.26])
    monkeypatch.setattr("kvgraph.serve.generation.perf_counter", lambda: next(clock))

    async def main() -> None:
        await generation.start([[5, 6, 7]], [SamplingParams()], b"", 100)
        (stream,) = runner.streams
        token = Token("0", 5, "a", None)
        stream.give([token])
        stream.give([token, token])
        await anext(generation)
        stream.give([token, token])
        await anext(generation)

    asyncio.run(main())
    counts = counted(generation)
    name = 'kvgraph:inter_token_latency_seconds_bucket{le="%s",model_name="tiny"}'
    found = [counts[name % bound] for bound in ("0.025", "0.05", "0.1", "+Inf")]
    assert found == [0, 2, 4, 4]
    assert counts['kvgraph:generation_tokens_total{model_name="tiny"}'] == 5


def counted(generation: Generation) -> dict[str, float]:
    """Of each metric, its value."""
    lines = [line for line in generation._metrics.text().decode().splitlines() if line[0] != "#"]
    return {line.partition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


@pytest.mark.parametrize("leaves", [False, True])
def test_histograms_of_tokens(parts: Parts, leaves: bool) -> None:
    """One for each choice, and the longest of them one for each prompt."""
    runner, _, generation = parts

    async def main() -> None:
        await generation.start([[5, 6, 7], [5] * 30], [SamplingParams()] * 2, b"", 100)
        for length, stream in zip((1, 3, 7, 2), runner.streams, strict=True):
            reason = None if leaves else "length"
            stream.give([Token("0", 5, "a", None)] * (length - 1) + [Token("0", 5, "a", reason)])
        await anext(generation)
        generation.close()

    asyncio.run(main())
    found = counted(generation)

    def name(kind: str, part: str) -> str:
        return f'kvgraph:request_{kind}_tokens_{part},model_name="tiny"}}'.replace("{,", "{")

    for kind, bounds in {
        "prompt": {"2.0": 0, "5.0": 2, "20.0": 2, "50.0": 4, "2000.0": 4},
        "generation": {"1.0": 1, "2.0": 2, "5.0": 3, "10.0": 4},
        "max_num_generation": {"2.0": 0, "5.0": 1, "10.0": 2, "+Inf": 2},
    }.items():
        for bound, count in bounds.items():
            assert found[name(kind, f'bucket{{le="{bound}"')] == count, (kind, bound)
    assert found[name("generation", "sum{")] == 13
    assert found[name("max_num_generation", "sum{")] == 10
    assert name("prompt", 'bucket{le="5000.0"') not in found


def test_an_answer_is_freed_without_a_search_for_garbage(engine: Engine) -> None:
    """A search through many log-probabilities stops all other requests."""

    async def stream_of_one() -> weakref.ref[TokenStream]:
        runner = Scripted()
        _, generation = generation_of(engine, runner)
        await generation.start([[5, 6, 7]], [SamplingParams()], b"", 100)
        runner.streams[0].give([Token("0", 5, "a", "stop")])
        await generation.all_tokens()
        generation.close()
        return weakref.ref(runner.streams[0])

    gc.disable()
    try:
        assert asyncio.run(stream_of_one())() is None
    finally:
        gc.enable()


def test_an_engine_that_has_ended_says_so(parts: Parts) -> None:
    runner, admission, generation = parts

    async def main() -> None:
        runner.is_closed = True
        with pytest.raises(ServeError, match="the server ends") as refused:
            await generation.start([[5]], [SamplingParams()], b"", 100)
        assert refused.value.status == 503
        assert counts(admission) == (0, 0, 0)

    asyncio.run(main())


def test_a_client_is_not_told_the_files_of_an_engine_that_ended(parts: Parts) -> None:
    """The reason may name the server's files."""
    runner, _, generation = parts

    async def main() -> None:
        await generation.start([[5]], [SamplingParams()], b"", 100)
        why = f"{ENDED}: ArtifactError: /srv/a.kvg/weights.safetensors: expected\none, got another"
        token = failed("0", why)
        runner.streams[0].give([token])
        runner.is_closed = True
        with pytest.raises(ServeError) as refused:
            await generation.all_tokens()
        assert (refused.value.status, refused.value.message) == (503, ENDED)
        assert token.error is not None
        said = json.loads(failure(generation, token.error).removeprefix(b"data: "))
        assert said["error"]["message"] == ENDED

    asyncio.run(main())


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("events", [completion_events, chat_events])
def test_a_stream_gives_all_text_before_its_error(
    parts: Parts, events: Events, logprobs: bool
) -> None:
    """What came with the error in one piece, and what stop strings had held back."""
    runner, _, generation = parts
    spell = Spelling(lambda tokens: "?" * len(tokens), lambda token: None)
    job = Job("id", "tiny", [[5]], [SamplingParams()], b"", True, True, spell, logprobs, tools=None)
    score = TokenLogprobs(Logprob(5, -1.0, 1), ()) if logprobs else None

    async def main() -> list[Any]:
        await generation.start(job.prompts, job.params, b"", 100)
        (stream,) = runner.streams
        frames = events(job, generation)
        stream.give([Token("0", 5, "a", None, logprobs=score, characters=1)])
        stream.give(
            [
                Token("0", 6, "b", None, logprobs=score, characters=3),
                Token("0", NO_TOKEN, "cd", "error", "it failed"),
            ]
        )
        return [frame.removeprefix(b"data: ") async for frame in frames]

    *frames, usage, done = asyncio.run(main())
    assert done == b"[DONE]\n\n"
    assert json.loads(usage)["usage"]["completion_tokens"] == 2
    *told, error = map(json.loads, frames)
    assert error["error"]["message"] == "it failed"
    choices = [frame["choices"][0] for frame in told]
    said = [choice.get("text", choice.get("delta", {}).get("content")) for choice in choices]
    assert "".join(said) == "abcd"
    assert {choice["finish_reason"] for choice in choices} == {None}
    if logprobs:
        scored = choices[-1]["logprobs"]
        assert len(scored.get("tokens", scored.get("content"))) == 2


def test_tokens_wait_for_the_echo_before_them(parts: Parts) -> None:
    """The prompt ends inside a character, which the second token completes."""
    runner, _, generation = parts
    spell = Spelling(lambda tokens: "?" * len(tokens), lambda token: None)
    echo = Echo("a\N{REPLACEMENT CHARACTER}", decode=lambda ids: {(5, 6, 7): "aé!"}[tuple(ids)])
    params = [SamplingParams(logprobs=0)]
    job = Job("id", "tiny", [[5]], params, b"", True, False, spell, True, [echo])
    score = TokenLogprobs(Logprob(5, -1.0, 1), ())

    async def main() -> list[Any]:
        await generation.start(job.prompts, job.params, b"", 100)
        (stream,) = runner.streams
        frames = completion_events(job, generation)
        stream.give([Token("0", 6, "", None, logprobs=score)])
        first = asyncio.ensure_future(anext(frames))
        while stream.has_news:
            await asyncio.sleep(0)
        stream.give([Token("0", 7, "é!", "stop", logprobs=score)])
        return [await first, *[frame async for frame in frames]]

    frame, done = [frame.removeprefix(b"data: ") for frame in asyncio.run(main())]
    (choice,) = json.loads(frame)["choices"]
    assert (choice["text"], choice["logprobs"]["text_offset"]) == ("aé!", [1, 1])
    assert done == b"[DONE]\n\n"


class Slow(Scripted):
    """Takes a prompt once `most` of them are on their way; refuses `bad`, the token."""

    def __init__(self, most: int, bad: int | None = None) -> None:
        super().__init__()
        self.num_coming = self.num_left = 0
        self._most, self._bad = most, bad
        self._all = asyncio.Event()

    async def submit(self, prompt: Sequence[int], *given: object, **named: Any) -> Any:
        self.num_coming += 1
        if self.num_coming == self._most:
            self._all.set()
        try:
            await self._all.wait()
            for _ in range(9 - prompt[0]):  # the later ones come first
                await asyncio.sleep(0)
            if prompt[0] == self._bad:
                raise RequestError("prompt: expected another token")
            return await super().submit(prompt, *given, **named)
        except BaseException:
            self.num_left += 1
            raise


PROMPTS = [[5, 6], [6], [7]]
BOTH = [SamplingParams()] * 2


def test_prompts_of_a_request_wait_for_no_other(engine: Engine) -> None:
    runner = Slow(len(PROMPTS))
    admission, generation = generation_of(engine, runner)

    async def main() -> None:
        starting = asyncio.ensure_future(generation.start(PROMPTS, BOTH, b"", 100))
        await asyncio.sleep(0)
        assert counts(admission) == (6, 6, 8), "all are in the queue, taken or not"
        await asyncio.wait_for(starting, 60)
        assert counts(admission) == (6, 6, 8)
        assert [choice.index for choice in generation.choices] == list(range(6))
        placed = [choice.prompt for choice in generation.choices]
        assert placed == [prompt for prompt in PROMPTS for _ in BOTH]
        generation.close()
        assert counts(admission) == (0, 0, 0)

    asyncio.run(main())


@pytest.mark.parametrize("bad", [5, 6, 7])
def test_a_prompt_that_is_refused_leaves_no_other_behind(engine: Engine, bad: int) -> None:
    runner = Slow(len(PROMPTS), bad)
    admission, generation = generation_of(engine, runner)

    async def main() -> None:
        with pytest.raises(ServeError, match="expected another token") as refused:
            await asyncio.wait_for(generation.start(PROMPTS, BOTH, b"", 100), 60)
        assert refused.value.status == 400
        require_nothing_left(runner, admission, generation)

    asyncio.run(main())


@pytest.mark.parametrize("most", [len(PROMPTS), 100], ids=["some taken", "none taken"])
def test_who_leaves_while_prompts_are_handed_over(engine: Engine, most: int) -> None:
    runner = Slow(most)
    admission, generation = generation_of(engine, runner)

    async def main() -> None:
        starting = asyncio.ensure_future(generation.start(PROMPTS, BOTH, b"", 100))
        for _ in range(6):
            await asyncio.sleep(0)
        assert not starting.done()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert bool(runner.streams) == (most < 100)
        require_nothing_left(runner, admission, generation)

    asyncio.run(main())


def require_nothing_left(runner: Slow, admission: Admission, generation: Generation) -> None:
    assert counts(admission) == (0, 0, 0)
    assert runner.num_coming == len(runner.streams) + runner.num_left
    assert all(stream.has_ended for stream in runner.streams), "they are cancelled"
    assert len(generation.choices) == len(runner.streams)
    assert len(asyncio.all_tasks()) == 1
