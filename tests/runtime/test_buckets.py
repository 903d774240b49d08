"""Decode steps padded to few sizes: the same tokens, from few shapes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.contract.params import KVCacheParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.buckets import DecodeBuckets, batch_sizes, dummy_rows
from kvgraph.runtime.sampling import TokenSource
from kvgraph.runtime.scheduler import Request, Scheduler
from kvgraph.runtime.sessions.onnxruntime import OnnxRuntimeSession


@pytest.mark.parametrize(
    ("most", "sizes", "dummies"),
    [
        (1, [1], 0),
        (2, [1, 2], 0),
        (6, [1, 2, 4, 6], 1),
        (16, [1, 2, 4, 8, 16], 7),
        (64, [1, 2, 4, 8, 16, 24, 32, 48, 64], 15),
        (100, [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 100], 31),
    ],
)
def test_sizes(most: int, sizes: list[int], dummies: int) -> None:
    assert batch_sizes(most) == sizes
    assert dummy_rows(most) == dummies


def make_scheduler(max_rows: int, num_pages: int = 64) -> tuple[Scheduler, DecodeBuckets]:
    params = KVCacheParams("float32", n_kv_heads=1, head_dim=8, num_layers=1, page_size=16)
    kv = PagedKVCacheManager(
        params, None, num_pages, max_batch_size=max_rows + dummy_rows(max_rows)
    )
    return Scheduler(kv, max_rows, 64), DecodeBuckets(kv, max_rows)


def request(name: str, length: int, max_length: int = 80) -> Request:
    context = TextContext(name, list(range(length)))
    return Request(context, TokenSource(SamplingParams()), frozenset(), max_length)


def test_a_decode_batch_is_padded_and_bounded() -> None:
    scheduler, buckets = make_scheduler(8)
    for i, length in enumerate((3, 40, 1)):
        scheduler.enqueue(request(f"r{i}", length))
    first = scheduler.schedule()
    assert first is not None
    assert buckets.pad(first) is None  # prompts are not padded
    first.update([7, 8, 9], [None] * 3, {})
    batch = scheduler.schedule()
    assert batch is not None
    padded = buckets.pad(batch)
    assert padded is not None
    assert padded.inputs.tokens.tolist() == [7, 8, 9, 0]
    assert padded.inputs.input_row_offsets.tolist() == [0, 1, 2, 3, 4]
    assert padded.inputs.logits_indices.tolist() == [0, 1, 2, 3]
    bounds = padded.bounds
    assert (bounds.batch_size, bounds.max_prompt_length, bounds.max_cache_valid_length) == (
        4, 1, 512
    )  # fmt: skip
    kv = scheduler.kv.runtime_inputs(padded.requests, batch_characteristics=bounds).inputs[0]
    assert kv.max_lengths.handle.tolist() == [[1, 512]]
    assert kv.lookup_table.shape == (4, 512 // 16)
    assert kv.cache_lengths.handle.tolist() == [3, 40, 1, 0]
    assert (np.asarray(kv.lookup_table)[3] == 64).all()  # the dummy's pages are the null page


def test_a_chunk_is_no_decode_step() -> None:
    """One new token of a row whose prompt goes on must not be sampled, so it is not padded."""
    scheduler, buckets = make_scheduler(4)
    scheduler.max_batch_tokens = 1
    scheduler.enqueue(request("r", 3))
    batch = scheduler.schedule()
    assert batch is not None
    assert len(batch.inputs.tokens) == 1
    assert buckets.pad(batch) is None


def test_bounds_stay_within_the_pool() -> None:
    scheduler, buckets = make_scheduler(2, num_pages=5)
    scheduler.enqueue(request("r", 70))
    first = scheduler.schedule()
    while first is not None and not first.sampled:
        first.update([], [], {})
        first = scheduler.schedule()
    assert first is not None
    first.update([1], [None], {})
    batch = scheduler.schedule()
    assert batch is not None
    padded = buckets.pad(batch)
    assert padded is not None
    assert padded.bounds.max_cache_valid_length == 80


class RecordingSession(OnnxRuntimeSession):
    """Captures nothing, but says so, and records what it is asked to."""

    captures = True

    def __init__(self, artifact: Any) -> None:
        super().__init__(artifact)
        self.seen: list[tuple[Any, ...]] = []

    def _run_captured(self, arrays: list[Any]) -> Any:
        names = [symbol.name for symbol in self.signature.inputs]
        given = dict(zip(names, arrays, strict=True))
        widths = [a.shape for name, a in given.items() if name.endswith("lookup_table")]
        bounds = [a.tolist() for name, a in given.items() if name.endswith("max_lengths")]
        self.seen.append((len(given["tokens"]), *widths, *map(str, bounds)))
        return self._run(arrays)


@pytest.mark.parametrize("model", ["tiny-llama", "gemma2"])
def test_padding_changes_no_token(compiled: Callable[..., Path], model: str) -> None:
    """Ragged prompts that come and go, preemption included; few sizes are seen."""
    artifact = kvgraph.load(compiled(model))
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 150, n).tolist() for n in (5, 33, 1, 60, 17, 8, 29)]
    sampling = [
        SamplingParams(max_new_tokens=n, ignore_eos=True) for n in (20, 9, 31, 40, 3, 12, 25)
    ]
    options: dict[str, Any] = {"max_batch_size": 6, "num_pages": 12, "max_batch_tokens": 48}
    plain = Engine(artifact, **options)
    expected = [c.token_ids for c in plain.generate(prompts, sampling)]
    session = RecordingSession(artifact)
    engine = Engine(artifact, session=session, **options)
    assert [c.token_ids for c in engine.generate(prompts, sampling)] == expected
    assert engine.scheduler.preemptions == plain.scheduler.preemptions
    assert plain.scheduler.preemptions > 0
    assert len(session.seen) > 20
    assert {seen[0] for seen in session.seen} <= {1, 2, 4, 6}
    assert len(set(session.seen)) <= 4  # contexts stay within one bound
    assert engine.kv.get_num_used_pages() == 0  # type: ignore[attr-defined]


def test_dummy_rows_are_claimed_again_after_a_step_that_was_interrupted(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact = kvgraph.load(compiled("tiny-llama"))
    session = RecordingSession(artifact)
    engine = Engine(artifact, session=session, max_batch_size=8, num_pages=40)
    prompts, sampling = [[5, 6, 7], [8], [9] * 20], SamplingParams(max_new_tokens=9)
    expected = [done.token_ids for done in engine.generate(prompts, sampling)]
    found: dict[str, list[int]] = {engine.submit(prompt, sampling): [] for prompt in prompts}

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for token in engine.step() + engine.step():
        found[token.request_id].append(token.token_id)
    with monkeypatch.context() as patch:
        patch.setattr(engine.kv, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    session.seen.clear()
    while engine.busy:
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    assert list(found.values()) == expected
    assert {seen[0] for seen in session.seen} == {4}, "three rows and a dummy"
