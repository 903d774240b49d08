"""Engine over tiny-llama: ends, batches, dry pools; and over a session that says a script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, RequestError, SamplingParams
from kvgraph.contract.dims import TOTAL_SEQ_LEN
from kvgraph.runtime import scheduler
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sampling import Token
from tests.runtime.scripted import Scripted, assert_empty, greedy, scripted

PROMPTS = (
    "The import statement",
    "A class",
    "If the condition is true, the following suite is executed; otherwise",
    "def",
    "A function call always assigns values to all parameters mentioned in the parameter list, "
    "either from positional arguments, from keyword arguments, or from default values.",
    "An exception",
)
BOS, EOS = 0, 1


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture(scope="module")
def roomy(artifact: Artifact) -> Engine:
    """One pool for all tests that only ask for tokens."""
    return Engine(artifact, num_pages=800)


def ids(completions: Sequence[Any]) -> list[list[int]]:
    return [completion.token_ids for completion in completions]


# -- ends


def test_a_stop_token_ends_the_request_and_is_not_text(artifact: Artifact, roomy: Engine) -> None:
    script = roomy.tokenize("import is not used")
    engine = scripted(artifact, script)
    completion = engine.generate([[BOS]], greedy(50, stop_token_ids=(script[3], 7)))[0]
    assert completion.finish_reason == "stop"
    assert completion.token_ids == script[1:4]
    assert completion.text == roomy._text.tokenizer.decode(script[1:3])


def test_the_end_token_stops_unless_ignored(artifact: Artifact, roomy: Engine) -> None:
    head, tail = roomy.tokenize("The end")[1:], roomy.tokenize(" goes on")[1:]
    script = [BOS, *head, EOS, *tail]
    assert artifact.manifest.model.eos_token_ids == [EOS]
    engine = scripted(artifact, script)
    stopped = engine.generate([[BOS]], SamplingParams(max_new_tokens=len(script) - 1))[0]
    assert (stopped.finish_reason, stopped.text) == ("stop", "The end")
    assert stopped.token_ids == [*head, EOS]
    ignored = engine.generate([[BOS]], greedy(len(script) - 1))[0]
    assert (ignored.finish_reason, ignored.text) == ("length", "The end goes on")


def test_max_new_tokens(roomy: Engine) -> None:
    for count in (1, 2, 17):
        completion = roomy.generate([PROMPTS[0]], greedy(count))[0]
        assert len(completion.token_ids) == count
        assert completion.finish_reason == "length"


@pytest.mark.parametrize("room", [1, 8])
def test_max_seq_len_ends_a_request(artifact: Artifact, room: int) -> None:
    limit = artifact.manifest.model.max_seq_len
    engine = scripted(artifact, [5] * limit)
    completion = engine.generate([[5] * (limit - room)], greedy(100))[0]
    assert completion.token_ids == [5] * room
    assert completion.finish_reason == "length"


def test_a_prompt_without_room_is_refused(artifact: Artifact) -> None:
    limit = artifact.manifest.model.max_seq_len
    engine = scripted(artifact, [5])
    message = rf"at most {limit - 1} tokens \(the model's max_seq_len is {limit}\), got {limit}$"
    with pytest.raises(RequestError, match=message):
        engine.submit([5] * limit)
    assert_empty(engine)


# -- every way to batch gives the same tokens


@pytest.fixture(scope="module")
def expected(roomy: Engine) -> list[list[int]]:
    """Each prompt alone."""
    return [roomy.generate([prompt], greedy())[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize("chunk", [1, 7, 2048])
def test_chunks(artifact: Artifact, expected: list[list[int]], chunk: int) -> None:
    engine = Engine(artifact, num_pages=100, max_batch_tokens=chunk)
    assert ids(engine.generate(PROMPTS, greedy())) == expected


@pytest.mark.parametrize(
    ("asked", "limit", "steps"),
    [(None, 99, [7, 7, 6]), (9, 99, [9, 9, 2]), (None, 5, [5] * 4), (9, 8, [8, 8, 4])],
)
def test_tokens_of_a_step(
    artifact: Artifact, asked: int | None, limit: int, steps: list[int]
) -> None:
    """What is asked for, else the session's own; never more than was compiled."""
    session = Scripted(artifact, range(40))
    session.step_tokens, session.limits = 7, {TOTAL_SEQ_LEN: limit}
    engine = Engine(artifact, session=session, num_pages=8, max_batch_tokens=asked)
    assert engine.generate([list(range(20))], greedy(1))[0].token_ids == [20]
    assert session.steps == steps


@pytest.mark.parametrize("chunk", [16, 2048])
@pytest.mark.parametrize("prefix", [False, True])
def test_a_pool_that_runs_dry(
    artifact: Artifact, expected: list[list[int]], chunk: int, prefix: bool
) -> None:
    """Five pages of 16 tokens, of which the longest request alone needs four."""
    engine = Engine(artifact, num_pages=5, max_batch_tokens=chunk, enable_prefix_caching=prefix)
    assert ids(engine.generate(PROMPTS, greedy())) == expected
    assert engine.scheduler.preemptions > 0
    assert_empty(engine)


@pytest.mark.parametrize("prefix", [False, True])
def test_caches_with_windows(compiled: Callable[..., Path], prefix: bool) -> None:
    """Gemma 2 has one cache of its sliding layers (window 24) and one of its full layers."""
    artifact = kvgraph.load(compiled("gemma2"))
    random = np.random.default_rng(1)
    prompts = [random.integers(3, 160, n).tolist() for n in (70, 1, 33, 16, 48, 90)]
    prompts.append(prompts[0][:50])
    wanted = ids(Engine(artifact, num_pages=200).generate(prompts, greedy()))
    engine = Engine(artifact, num_pages=8, max_batch_tokens=33, enable_prefix_caching=prefix)
    assert ids(engine.generate(prompts, greedy())) == wanted
    assert engine.scheduler.preemptions > 0
    assert_empty(engine)


def test_prefix_caching(artifact: Artifact) -> None:
    """Prompts with a common beginning, together and one after the other."""
    beginning = PROMPTS[4]
    prompts = [beginning, *(f"{beginning} {prompt}" for prompt in PROMPTS), beginning]
    cold = Engine(artifact, num_pages=100, enable_prefix_caching=False)
    without = ids(cold.generate(prompts, greedy()))
    engine = Engine(artifact, num_pages=100)
    assert ids([engine.generate([prompt], greedy())[0] for prompt in prompts]) == without
    assert ids(engine.generate(prompts, greedy())) == without
    assert engine.kv.get_metrics_aggregated().cache_tokens >= 16 * len(prompts)
    assert cold.kv.get_metrics_aggregated().cache_tokens == 0


def test_equal_prompts_that_start_together_are_computed_once(artifact: Artifact) -> None:
    """8 prompts of 161 tokens share 160, over pages of 16."""
    shared = np.random.default_rng(2).integers(3, 2048, 160).tolist()
    prompts = [[*shared, 10 + i] for i in range(8)]
    cold = Engine(artifact, num_pages=200, enable_prefix_caching=False)
    engine = Engine(artifact, num_pages=200)
    assert ids(engine.generate(prompts, greedy(8))) == ids(cold.generate(prompts, greedy(8)))
    metrics = engine.kv.get_metrics_aggregated()  # type: ignore[attr-defined]
    assert (metrics.input_tokens, metrics.cache_tokens) == (168, 7 * 160)


def test_batch_of_one_and_of_64(artifact: Artifact, roomy: Engine) -> None:
    random = np.random.default_rng(3)
    prompts = [random.integers(2, 2048, 1 + i % 23).tolist() for i in range(64)]
    alone = [roomy.generate([prompt], greedy(6))[0].token_ids for prompt in prompts]
    engine = Engine(artifact, num_pages=256, max_batch_size=64)
    for prompt in prompts:
        engine.submit(prompt, greedy(6))
    assert len(engine.step()) == 64
    assert ids(engine.generate(prompts, greedy(6))) == alone


def test_a_seed_repeats_alone_and_in_a_batch(roomy: Engine) -> None:
    params = greedy(temperature=0.9, top_p=0.95, seed=7)
    other = greedy(temperature=1.5, seed=8)
    alone = roomy.generate([PROMPTS[0]], params)[0]
    assert roomy.generate([PROMPTS[0]], params)[0].token_ids == alone.token_ids
    together = roomy.generate(PROMPTS[:3], [params, other, greedy()])
    assert together[0].token_ids == alone.token_ids
    assert roomy.generate([PROMPTS[0]], greedy(temperature=0.9, seed=9))[0] != alone


# -- requests that come and go


def test_submit_and_step(roomy: Engine) -> None:
    wanted = roomy.generate(PROMPTS[:2], greedy(5))
    roomy.submit(PROMPTS[0], greedy(5), request_id="first")
    found: dict[str, list[Token]] = {"first": roomy.step(), "second": []}
    roomy.submit(PROMPTS[1], greedy(5), request_id="second")
    while tokens := roomy.step():
        for token in tokens:
            found[token.request_id].append(token)
    for tokens, done in zip(found.values(), wanted, strict=True):
        assert [token.token_id for token in tokens] == done.token_ids
        assert "".join(token.text for token in tokens) == done.text
        assert [token.finish_reason for token in tokens] == [None] * 4 + ["length"]


def test_two_streams_at_once(roomy: Engine) -> None:
    """Each step runs both; neither loses what the other's step generated."""
    wanted = [done.text for done in roomy.generate(PROMPTS[:2], greedy())]
    first, second = (roomy.stream(prompt, greedy()) for prompt in PROMPTS[:2])
    texts = [next(first), next(second)]
    texts[0] += next(first) + next(first)
    texts[1] += "".join(second)
    texts[0] += "".join(first)
    assert texts == wanted
    assert_empty(roomy)


def test_submitted_requests_survive_a_stream(roomy: Engine) -> None:
    wanted = roomy.generate(PROMPTS[:3], greedy(6))
    roomy.submit(PROMPTS[0], greedy(6), request_id="mine")
    assert "".join(roomy.stream(PROMPTS[1], greedy(6))) == wanted[1].text
    assert roomy.generate([PROMPTS[2]], greedy(6))[0].text == wanted[2].text
    tokens = [token for token in roomy.step() if token.request_id == "mine"]
    assert [token.token_id for token in tokens] == wanted[0].token_ids
    assert_empty(roomy)


@pytest.mark.parametrize("pieces", [0, 1, 3])
def test_leaving_a_stream_cancels_it(roomy: Engine, pieces: int) -> None:
    stream = roomy.stream(PROMPTS[0], greedy(40))
    for _ in range(pieces):
        next(stream)
    assert bool(roomy.scheduler.running) == (pieces > 0)
    stream.close()
    assert_empty(roomy)


def test_cancel(roomy: Engine) -> None:
    """Before the first step, between steps, and not after the last."""
    roomy.submit(PROMPTS[0], greedy(), request_id="waiting")
    roomy.cancel("waiting")
    roomy.submit(PROMPTS[0], greedy(), request_id="running")
    roomy.step()
    roomy.cancel("running")
    roomy.submit(PROMPTS[0], greedy(1), request_id="done")
    roomy.step()
    for name in ("waiting", "running", "done", "nobody"):
        with pytest.raises(RequestError, match=f"cancel of '{name}': expected an open"):
            roomy.cancel(name)
    assert_empty(roomy)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("", r"expected a prompt, got an empty one"),
        ([], r"expected a prompt, got an empty one"),
        ([5, -1], r"token ids in \[0, 2048\), got -1"),
        ([2048, 5], r"token ids in \[0, 2048\), got 2048"),
        ([5] * 2048, r"at most 2047 tokens .*got 2048"),
        ([5] * 900, r"at most 10 pages from the pool, got 924 tokens .*need 58"),
    ],
)
def test_a_bad_prompt_among_good_ones_leaves_nothing_behind(
    artifact: Artifact, bad: Any, message: str
) -> None:
    engine = Engine(artifact, num_pages=10)
    with pytest.raises(RequestError, match=message):
        engine.generate([PROMPTS[0], [5, 6, 7], bad, PROMPTS[1]], greedy())
    assert_empty(engine)


def test_a_step_that_fails_leaves_nothing_of_generate_behind(artifact: Artifact) -> None:
    class Failing(Scripted):
        fails = True

        def _run(self, arrays: list[Any]) -> Any:
            if self.fails:
                raise kvgraph.KernelError("no")
            return super()._run(arrays)

    session = Failing(artifact, [5] * 100)
    engine = Engine(artifact, session=session, num_pages=10)
    with pytest.raises(kvgraph.KernelError):
        engine.generate([[5, 6]])
    session.fails = False
    assert_empty(engine)


def test_as_many_sampling_params_as_prompts(roomy: Engine) -> None:
    with pytest.raises(ValueError, match="2"):
        roomy.generate(PROMPTS[:3], [greedy(), greedy()])
    assert_empty(roomy)


def test_request_ids(roomy: Engine) -> None:
    """One in use is refused, one that has ended can be used again, made ones evade given ones."""
    roomy.submit(PROMPTS[0], greedy(2), request_id="mine")
    with pytest.raises(RequestError, match="request 'mine': expected a new id, got one in use"):
        roomy.submit(PROMPTS[1], greedy(2), request_id="mine")
    while roomy.step():
        pass
    assert roomy.submit(PROMPTS[1], greedy(2), request_id="mine") == "mine"
    upcoming = int(roomy.submit(PROMPTS[0], greedy(2)).removeprefix("request-")) + 1
    roomy.submit(PROMPTS[1], greedy(2), request_id=f"request-{upcoming}")
    assert roomy.submit(PROMPTS[1], greedy(2)) == f"request-{upcoming + 1}"
    assert len(roomy.step()) == 4
    roomy.step()
    assert_empty(roomy)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_batch_tokens": 0}, r"max_batch_tokens: expected >= 1 or None, got 0"),
        ({"max_batch_size": 0}, r"max_batch_size: expected >= 1, got 0"),
        ({"num_pages": 0}, r"^num_pages: expected >= 1 or None, got 0"),
        ({"num_pages": None, "cache_memory": 1000}, r"at least one page of 32768 .*got 1000"),
        ({"num_pages": 1 << 30}, r"kv_blocks: expected 32.0 TiB of host memory .* fewer pages"),
        ({"session": "tensorrt"}, r"\['onnxruntime', 'reference'\] .*'onnx', got 'tensorrt'"),
        ({"session": "torch"}, r"\['onnxruntime', 'reference'\] .*'onnx', got 'torch'"),
    ],
)
def test_bad_options(artifact: Artifact, options: dict[str, Any], message: str) -> None:
    with pytest.raises(kvgraph.KVGraphError, match=message):
        Engine(artifact, **({"num_pages": 4} | options))


# -- prompts beside rows that decode


def test_a_prompt_is_computed_in_small_chunks_beside_a_row_that_decodes(artifact: Artifact) -> None:
    engine = scripted(artifact, range(2, 200), max_prefill_tokens=8)
    engine.submit(list(range(2, 42)), greedy(20))
    engine.step()
    engine.step()
    assert engine.session.steps == [40, 1]  # type: ignore[attr-defined]  # alone: no limit
    for first in (50, 90):
        engine.submit(list(range(first, first + 20)), greedy(4))
    while engine.busy:
        engine.step()
    steps = engine.session.steps[2:]  # type: ignore[attr-defined]
    assert steps[:4] == [9, 9, 9, 10]  # eight of the prompts, and a token of each row that decodes


def test_prompts_that_come_to_an_idle_engine_start_together(artifact: Artifact) -> None:
    options = {"max_prefill_tokens": 7, "max_batch_tokens": 41, "max_batch_size": 4}
    engine = scripted(artifact, range(2, 200), **options)
    for first in (2, 50, 90, 130, 170):  # the last one has no row to come
        engine.submit(list(range(first, first + 20)), greedy(9))
    while engine.busy:
        engine.step()
    assert engine.session.steps[:3] == [41, 2 + 39, 4]  # type: ignore[attr-defined]


def test_chunks_are_as_large_as_the_time_of_steps_allows(
    artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Scripted(artifact, range(2, 400))

    def clock() -> float:
        """A step takes a second, and as much for each ten tokens."""
        return len(session.steps) + sum(session.steps) / 10

    monkeypatch.setattr(scheduler, "perf_counter", clock)
    engine = Engine(artifact, session=session, num_pages=200, max_prefill_tokens="auto")
    for first in (2, 50, 100, 150):
        engine.submit(list(range(first, first + 40)), greedy(100))
    while len(session.steps) < 40:
        engine.step()
    session.steps.clear()
    engine.submit(list(range(40, 300)), greedy(4))
    for _ in range(10):
        engine.step()
    decoding, share = 1 + 4 / 10, 1 + 1 / 4  # of four rows, while one prompt waits
    most = 1 + share
    assert session.steps[0] == 4 + 48  # before a step with a prompt was measured
    taken = [(1 + tokens / 10) / decoding for tokens in session.steps[1:]]
    assert all(0.8 * most < each < 1.2 * most for each in taken)


@pytest.mark.parametrize("most", [3, "auto"])
def test_small_chunks_give_the_same_tokens(artifact: Artifact, most: int | Literal["auto"]) -> None:
    prompts = [list(range(5 + i, 45 + 7 * i)) for i in range(6)]
    sampling = greedy(12)
    expected = ids(Engine(artifact, num_pages=200).generate(prompts, sampling))
    bounded = Engine(artifact, num_pages=200, max_prefill_tokens=most, max_batch_size=4)
    assert ids(bounded.generate(prompts, sampling)) == expected
