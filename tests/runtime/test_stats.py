"""What an engine tells of its requests and of itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph import Engine
from kvgraph.runtime.artifact import Artifact
from tests.runtime.scripted import greedy, scripted

PROMPT = list(range(2, 42))


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


def test_a_completion_tells_what_was_cached(artifact: Artifact) -> None:
    engine = scripted(artifact, PROMPT)
    first = engine.generate([PROMPT], greedy(8))[0]
    second = engine.generate([PROMPT], greedy(8))[0]
    assert (first.prompt_tokens, first.cached_tokens) == (40, 0)
    assert (second.prompt_tokens, second.cached_tokens) == (40, 32)


def test_a_completions_times_are_in_order(artifact: Artifact) -> None:
    engine = scripted(artifact, PROMPT, max_batch_size=1)
    first, second = engine.generate([PROMPT, PROMPT[::-1]], greedy(8))
    for done in (first, second):
        assert 0 < done.queue_seconds < done.first_token_seconds < done.total_seconds
        assert done.prefill_tokens_per_second > 0
        assert done.decode_tokens_per_second > 0
    assert second.queue_seconds > first.first_token_seconds  # one row: it waits for the first


def test_one_token_has_no_rate_of_decode(artifact: Artifact) -> None:
    done = scripted(artifact, PROMPT).generate([PROMPT], greedy(1))[0]
    assert done.decode_tokens_per_second is None
    assert done.total_seconds == done.first_token_seconds


def test_a_preempted_request_counts_its_first_admission(artifact: Artifact) -> None:
    prompts = [PROMPT, PROMPT[::-1]]
    engine = scripted(artifact, PROMPT * 4, num_pages=7)
    done = engine.generate(prompts, greedy(40))
    assert engine.scheduler.preemptions > 0
    assert [each.cached_tokens for each in done] == [0, 0]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens) == (80, 0)
    metrics = engine.kv.get_metrics_aggregated()
    assert metrics.cache_tokens > 0, "it found its own pages"
    assert stats.computed_tokens == metrics.input_tokens > 80


def test_an_engine_tells_what_runs(artifact: Artifact) -> None:
    engine = scripted(artifact, PROMPT, num_pages=40, max_batch_size=1)
    for prompt in (PROMPT, PROMPT[::-1]):
        engine.submit(prompt, greedy(3))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_free_pages, stats.num_pages) == (37, 40)
    assert stats.page_usage == pytest.approx(3 / 40)
    assert repr(engine).endswith(": 1 running, 1 waiting, 37 of 40 pages free>")
    while engine.busy:
        engine.step()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.cached_tokens, stats.generated_tokens) == (80, 0, 6)
    assert (stats.num_running, stats.num_free_pages, stats.page_usage) == (0, 40, 0)


def test_a_cache_without_pages_has_none_of_them(compiled: Callable[..., Path]) -> None:
    engine = Engine(compiled("tiny-llama", cache="padded"))
    stats = engine.stats()
    assert (stats.num_pages, stats.num_free_pages, stats.page_usage) == (None, None, 0.0)
    assert "pages" not in repr(engine)
