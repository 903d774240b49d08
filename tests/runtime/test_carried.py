"""The ways of an engine that a GPU is checked with, on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs the model that is compared with")

from tests.support import carried
from tests.support.models import greedy_tokens


def test_every_way_gives_transformers_tokens(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path]
) -> None:
    """Chunks, preemption, prefixes and tiers happen: each way says so itself."""
    model = carried.load(model_folder("tiny-llama"))
    artifact = compiled("tiny-llama", dtype="float32", page_size=carried.PAGE)
    found = {way: generate() for way, generate in carried.ways(artifact)}
    assert len(found) == 7
    for way, tokens in found.items():
        prompts = carried.prompts_of(way)
        assert tokens == [greedy_tokens(model, prompt, carried.NEW) for prompt in prompts], way


def test_names_are_distinct() -> None:
    names = [f"{each.name}-{dtype}" for each in carried.CARRIED for dtype in each.dtypes]
    assert len(set(names)) == len(names)
