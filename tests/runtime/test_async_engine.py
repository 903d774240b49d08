"""AsyncEngine over tiny-llama: tasks get the engine's own tokens, and leave it as they found it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph import Engine, GenerationError, RankError, RequestError, SamplingParams
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.sessions.onnxruntime import OnnxRuntimeSession
from tests.runtime.scripted import greedy

PROMPTS = [f"{word} {'is ' * count}" for count, word in enumerate(["A", "The", "An", "If"] * 5)]
TEN = greedy(10)


class Raising(OnnxRuntimeSession):
    """Raises in each step while `failures` is above 0, and counts that down."""

    failures = 0

    def _run(self, arrays: list[Any]) -> Any:
        if self.failures:
            self.failures -= 1
            raise MemoryError("no memory for this step")
        return super()._run(arrays)


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture
def engine(artifact: Artifact) -> Engine:
    return Engine(artifact, session=Raising(artifact, num_threads=1), num_pages=200)


def use(
    engine: Engine, task: Callable[[AsyncEngine], Awaitable[Any]], in_step: bool = False
) -> Any:
    """What `task` returns; afterwards every page is back.

    `in_step`: each step waits until the loop's tasks have read the step before the last one.
    """

    async def main() -> Any:
        loop = asyncio.get_running_loop()

        async def read() -> None:
            for _ in range(5):  # a stream's news wake its reader, which wakes who waits for it
                await asyncio.sleep(0)

        async with AsyncEngine(engine) as shared:
            if in_step:
                shared.after_step = lambda tokens: asyncio.run_coroutine_threadsafe(
                    read(), loop
                ).result()
            return await asyncio.wait_for(task(shared), timeout=60)

    result = asyncio.run(main())
    assert not engine.busy
    assert engine.kv.num_free_blocks() == engine.kv.total_num_blocks()
    return result


def test_tasks_get_the_engines_own_tokens(artifact: Artifact, engine: Engine) -> None:
    alone = [done.token_ids for done in Engine(artifact, num_pages=200).generate(PROMPTS, TEN)]

    async def task(shared: AsyncEngine) -> list[list[int]]:
        together = await asyncio.gather(*(shared.generate(prompt, TEN) for prompt in PROMPTS))
        return [done.token_ids for done in together]

    assert use(engine, task) == alone


def test_one_call_of_the_loop_carries_a_steps_tokens(engine: Engine) -> None:
    steps = 0

    async def task(shared: AsyncEngine) -> int:
        nonlocal steps
        calls, deliver = 0, shared._deliver

        def counted(tokens: Any) -> None:
            nonlocal calls
            calls += 1
            deliver(tokens)

        def after_step(tokens: Any) -> None:
            nonlocal steps
            steps += bool(tokens)

        shared._deliver, shared.after_step = counted, after_step  # type: ignore[method-assign]
        await asyncio.gather(*(shared.generate(prompt, TEN) for prompt in PROMPTS))
        return calls

    assert use(engine, task) == steps < 10 * len(PROMPTS)


def test_a_stream_is_the_completions_text(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> tuple[str, str]:
        pieces = [piece async for piece in shared.stream(PROMPTS[0], TEN)]
        assert len(pieces) > 1
        return "".join(pieces), (await shared.generate(PROMPTS[0], TEN)).text

    text, expected = use(engine, task, in_step=True)
    assert text == expected


def test_leaving_a_stream_cancels_its_request(engine: Engine) -> None:
    async def leave(shared: AsyncEngine, prompt: str) -> None:
        stream = shared.stream(prompt, greedy(400))
        async for _ in stream:
            break
        await stream.aclose()

    async def task(shared: AsyncEngine) -> list[int]:
        leaving = [leave(shared, prompt) for prompt in PROMPTS]
        kept = shared.generate(PROMPTS[1], TEN)
        *_, done = await asyncio.gather(*leaving, kept)
        while shared.engine.busy:
            await asyncio.sleep(0.001)
        return done.token_ids  # type: ignore[no-any-return]

    assert len(use(engine, task, in_step=True)) == 10
    assert engine.generated_tokens < 200


def test_a_cancelled_task_cancels_its_request(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> None:
        waiting = asyncio.ensure_future(shared.generate(PROMPTS[0], greedy(400)))
        while not engine.generated_tokens:
            await asyncio.sleep(0.001)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert shared.num_open == 0

    use(engine, task, in_step=True)
    assert engine.generated_tokens < 400


def test_a_cancellation_that_raises_happens_with_the_next_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures, cancel = [MemoryError("no memory to cancel")], engine.scheduler.cancel

    def failing(request_id: str) -> None:
        if failures:
            raise failures.pop()
        cancel(request_id)

    async def task(shared: AsyncEngine) -> list[int]:
        monkeypatch.setattr(engine.scheduler, "cancel", failing)
        (await shared.submit(PROMPTS[0], greedy(400))).cancel()
        return (await shared.generate(PROMPTS[1], TEN)).token_ids

    assert len(use(engine, task)) == 10
    assert not failures


def test_a_bad_request_is_refused_at_once_and_harms_no_other(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> list[Any]:
        bad = [shared.generate(prompt) for prompt in ("", [1, 10**9], [5] * 5000, None)]
        odd = [shared.submit([1], request_id=7)]  # type: ignore[arg-type]
        return await asyncio.gather(
            shared.generate(PROMPTS[0], TEN), *bad, *odd, return_exceptions=True
        )

    done, *errors = use(engine, task)
    assert len(done.token_ids) == 10
    assert all(isinstance(error, RequestError) for error in errors)


def test_an_id_is_used_once_at_a_time(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> None:
        await shared.submit(PROMPTS[0], greedy(400), request_id="a")
        with pytest.raises(RequestError, match="request 'a': expected a new id, got one in use"):
            await shared.submit(PROMPTS[0], request_id="a")

    use(engine, task)


@pytest.mark.parametrize("long", [False, True])
def test_a_text_is_tokenized_as_the_engine_does(engine: Engine, long: bool) -> None:
    text = "import " * (2400 if long else 3)

    async def task(shared: AsyncEngine) -> int:
        if long:
            with pytest.raises(RequestError, match="tokens"):
                await shared.submit(text)
            return 0
        return (await shared.submit(text)).stats.prompt_tokens

    assert use(engine, task) == (0 if long else len(engine.tokenize(text)))


def test_a_step_that_fails_once_is_run_again(artifact: Artifact, engine: Engine) -> None:
    alone = Engine(artifact, num_pages=200).generate(PROMPTS[:3], TEN)

    async def task(shared: AsyncEngine) -> list[list[int]]:
        engine.session.failures = 1  # type: ignore[attr-defined]
        together = await asyncio.gather(*(shared.generate(prompt, TEN) for prompt in PROMPTS[:3]))
        return [done.token_ids for done in together]

    assert use(engine, task) == [done.token_ids for done in alone]


def test_a_step_that_fails_twice_ends_what_is_open_and_the_engine_goes_on(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> None:
        engine.session.failures = 2  # type: ignore[attr-defined]
        with pytest.raises(GenerationError, match="a step failed twice: MemoryError: no memory"):
            async for _ in shared.stream(PROMPTS[0], TEN):
                pass
        assert (await shared.generate(PROMPTS[0], TEN)).finish_reason == "length"

    use(engine, task)


def test_a_slow_reader_is_cut(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> kvgraph.Token:
        stream = await shared.submit(PROMPTS[0], greedy(400), most_unread=20)
        while not stream.has_ended:
            await asyncio.sleep(0.001)
        tokens = [token async for given in stream for token in given]
        assert shared.num_open == 0
        return tokens[-1]

    last = use(engine, task)
    assert last.finish_reason == "error"
    assert last.error == (
        "request 'async-0': expected its reader to keep up, got more than 20 unread tokens; "
        "it is cancelled"
    )


def test_closing_cancels_what_is_open(engine: Engine) -> None:
    async def main() -> None:
        shared = AsyncEngine(engine)
        with pytest.raises(RequestError, match="expected a running engine, got a stopped one"):
            await shared.submit(PROMPTS[0])
        await shared.start()
        with pytest.raises(RequestError, match="the engine was started already"):
            await shared.start()
        stream = await shared.submit(PROMPTS[0], greedy(400))
        await shared.close()
        await shared.close()
        assert stream.has_ended
        with pytest.raises(RequestError, match="expected a running engine, got a stopped one"):
            await shared.submit(PROMPTS[0])

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_has_one_async_engine(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> None:
        with pytest.raises(RequestError, match="the engine was started already"):
            await AsyncEngine(engine).start()

    use(engine, task)


def test_another_event_loop_is_refused(engine: Engine) -> None:
    shared = AsyncEngine(engine)

    async def first() -> None:
        await shared.start()
        await shared.generate(PROMPTS[0], TEN)

    async def second() -> None:
        with pytest.raises(RequestError, match="expected the event loop of `start`, got another"):
            await asyncio.wait_for(shared.generate(PROMPTS[0], TEN), 60)
        await shared.close()

    asyncio.run(first())
    asyncio.run(second())


def test_an_id_that_is_used_again_gets_its_own_tokens(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> None:
        expected = (await shared.generate("A class", TEN)).token_ids
        for _ in range(50):
            left = await shared.submit("The import", greedy(400), request_id="same")
            await anext(left)
            left.cancel()
            stream = await shared.submit("A class", TEN, request_id="same")
            left.cancel()  # it has ended: the request that has its id now goes on
            assert [token.token_id async for tokens in stream for token in tokens] == expected

    use(engine, task)


def test_what_ends_the_thread_ends_all_requests(engine: Engine) -> None:
    async def main() -> None:
        shared, submitted = AsyncEngine(engine), threading.Event()
        shared.after_step = lambda tokens: 1 // (not submitted.wait(60))  # type: ignore
        await shared.start()
        streams = [await shared.submit(prompt, TEN) for prompt in PROMPTS[:2]]
        submitted.set()
        for stream in streams:
            (last,) = [tokens[-1] async for tokens in stream]
            assert "the engine's thread has ended: ZeroDivisionError" in (last.error or "")
        for call in (shared.generate(PROMPTS[0], TEN), shared.call(lambda own: None)):
            with pytest.raises(RequestError, match="got a stopped one: ZeroDivisionError"):
                await call
        await shared.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("kind", [RankError, kvgraph.DeviceLostError])
def test_what_is_lost_ends_all(engine: Engine, monkeypatch: Any, kind: type[Exception]) -> None:
    """At once: no later step can run."""
    why = "rank 1: expected it to take part"

    def step() -> None:
        raise kind(why)

    async def main() -> None:
        shared, told = AsyncEngine(engine), []
        shared.after_failure = told.append
        await shared.start()
        stream = await shared.submit(PROMPTS[0], TEN)
        monkeypatch.setattr(engine, "step", step)
        tokens = [token async for some in stream for token in some]
        assert (tokens[-1].error or "").endswith(f"thread has ended: {kind.__name__}: {why}")
        assert [str(error) for error in told] == [why]
        assert shared.is_closed
        await shared.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_as_the_thread_ends_is_refused(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        shared = AsyncEngine(engine)
        shared.after_step = lambda tokens: 1 // 0  # type: ignore[assignment, return-value]
        await shared.start()
        await shared.submit(PROMPTS[0], TEN)
        monkeypatch.setattr(shared, "_require_running", lambda call: None)  # it still ran then
        late = asyncio.ensure_future(shared.call(lambda own: None))
        assert shared._thread is not None
        shared._thread.join()  # before the loop goes on
        with pytest.raises(RequestError, match=r"call: the engine's thread has ended: ZeroDiv"):
            await late
        await shared.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_call_gives_back_whatever_is_raised(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> None:
        with pytest.raises(RuntimeError, match="the function raised StopIteration"):
            await shared.call(lambda own: next(iter([])))
        with pytest.raises(RuntimeError, match="the function raised GeneratorExit"):
            await shared.call(lambda own: _raise(GeneratorExit()))
        assert len((await shared.generate(PROMPTS[0], TEN)).token_ids) == 10

    use(engine, task)


def _raise(error: BaseException) -> None:
    raise error


def test_a_call_sees_the_engine_between_steps(engine: Engine) -> None:
    async def task(shared: AsyncEngine) -> None:
        stream = await shared.submit(PROMPTS[0], greedy(400))
        assert await shared.call(lambda own: own.busy)
        with pytest.raises(ZeroDivisionError):
            await shared.call(lambda own: 1 // 0)
        pending = asyncio.ensure_future(shared.call(lambda own: own.model.vocab_size))
        await asyncio.sleep(0)
        await shared.close()
        assert await pending == engine.model.vocab_size
        assert stream.has_ended
        with pytest.raises(RequestError, match="call: expected a running engine"):
            await shared.call(lambda own: None)

    use(engine, task)


def test_sampling_is_repeatable(engine: Engine) -> None:
    sampled = SamplingParams(max_new_tokens=8, temperature=1.0, seed=7, ignore_eos=True)

    async def task(shared: AsyncEngine) -> list[list[int]]:
        both = await asyncio.gather(*(shared.generate(PROMPTS[0], sampled) for _ in range(2)))
        return [done.token_ids for done in both]

    first, second = use(engine, task)
    assert first == second
