"""The reference session agrees with ONNX Runtime, whether ops write in place or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph

pytest.importorskip("onnx", reason="the reference session evaluates ONNX graphs")


@pytest.mark.parametrize("cache", ["paged", "padded"])
def test_tokens_are_those_of_onnx_runtime(compiled: Callable[..., Path], cache: str) -> None:
    folder = compiled("tiny-llama", **({} if cache == "paged" else {"cache": cache}))
    greedy = kvgraph.SamplingParams(max_new_tokens=6)
    sessions = ("reference", "onnxruntime")
    engines = [kvgraph.Engine(folder, session=kind, max_batch_size=1) for kind in sessions]
    first, second = ([c.token_ids for c in e.generate(["A list"], greedy)] for e in engines)
    assert first == second
