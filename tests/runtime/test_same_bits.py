"""A token's numbers are the same bits in any batch, chunk and thread, and behind cached pages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvgraph import Completion, Engine, SamplingParams
from kvgraph.contract.dims import ceildiv
from kvgraph.ops import native
from tests.support.artifacts import Compiled
from tests.support.isa import isa_of
from tests.support.models import OVERRIDES

ALL = SamplingParams(max_new_tokens=6, prompt_logprobs=2, logprobs=2, ignore_eos=True)
SAMPLED = SamplingParams(max_new_tokens=24, temperature=0.8, seed=3, logprobs=2, ignore_eos=True)


def prompts(longest: int, vocab: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(2, vocab, longest // (i + 1)).tolist() for i in range(4)]


@contextmanager
def opened(folder: Path, **settings: object) -> Iterator[Engine]:
    with Engine(folder, **({"num_pages": 400} | settings)) as engine:  # type: ignore[arg-type]
        yield engine


def scores(done: Completion) -> list[object]:
    return [done.token_ids, done.logprobs, done.prompt_logprobs]


def check(folder: Path, longest: int, chunks: tuple[int, ...]) -> None:
    with opened(folder, max_batch_size=1, enable_prefix_caching=False, num_threads=1) as engine:
        given = prompts(longest, engine.model.vocab_size)
        expected = [scores(engine.generate([one], ALL)[0]) for one in given]
        sampled = [scores(engine.generate([one], SAMPLED)[0]) for one in given]
    for chunk in chunks:
        with opened(folder, max_batch_tokens=chunk, max_batch_size=min(4, chunk)) as engine:
            assert [scores(done) for done in engine.generate(given, ALL)] == expected
    with opened(folder) as engine:
        for _ in range(2):  # the second time behind cached pages
            assert [scores(done) for done in engine.generate(given, SAMPLED)] == sampled
        assert engine.stats().cached_tokens > 0
    few = sum(ceildiv(len(one), 16) for one in given) + 1
    with opened(folder, num_pages=few, enable_prefix_caching=False) as engine:
        assert [scores(done) for done in engine.generate(given, SAMPLED)] == sampled
        has_window = "mistral" in folder.name  # which gives pages back
        assert engine.stats().num_preemptions > 0 or has_window


@pytest.mark.parametrize("model", OVERRIDES)
def test_each_architecture(model: str, compiled: Compiled) -> None:
    check(compiled(model), 300, (1, 7, 64))


@pytest.mark.parametrize(
    "options",
    [
        {"weights": "bf16", "cache_dtype": "bfloat16"},
        {"weights": "int8", "cache_dtype": "int8"},
        {"weights": "int4", "cache_dtype": "float8_e4m3fn"},
    ],
    ids=lambda options: options["weights"],
)
def test_small_weights_over_small_pools(options: dict[str, str], compiled: Compiled) -> None:
    """Contexts that are split among tasks, from 1,024 tokens on, among them."""
    if options["weights"] == "bf16" and isa_of(native.library()) == "amx":
        pytest.skip("AMX sums products of bfloat16 by how many rows there are")
    check(compiled("tiny-llama", **options), 1300, (5, 300))


@pytest.mark.slow
def test_backend_torch(compiled: Compiled) -> None:
    check(compiled("tiny-llama", "torch", weights="int8"), 300, (1, 7, 64))
