"""The reference session agrees with ONNX Runtime, whether ops write in place or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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


@pytest.mark.parametrize("kind", ["reference", "onnxruntime"])
def test_an_artifact_of_an_mla_cache_has_no_session(
    compiled: Callable[..., Path], kind: str
) -> None:
    artifact = kvgraph.load(compiled("tiny-llama"))
    layout = artifact.manifest.layout | {"is_mla": True}
    mla = replace(artifact, manifest=replace(artifact.manifest, layout=layout))
    with pytest.raises(kvgraph.UnsupportedError, match=r"is_mla: expected False .*, got True"):
        mla.session(kind)
