"""A decode step visits few files: a reader who follows it has to open these, and no other."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph import Engine, SamplingParams

PACKAGE = Path(kvgraph.__file__).parent

VISITED = {
    "contract/inputs.py",
    "kv/paged.py",
    "kv/pool/batch.py",
    "kv/pool/first_touch.py",
    "kv/pool/leaf.py",
    "kv/pool/pages.py",
    "kv/requests.py",
    "runtime/engine.py",
    "runtime/outcome.py",
    "runtime/scheduler.py",
    "runtime/sessions/base.py",
    "runtime/sessions/onnxruntime.py",
    "runtime/text.py",
}
"""Files of the package that a decode step on ONNX Runtime's CPU session visits."""

SAMPLER = {"ops/native.py"}
"""And where a row is not greedy, or not alone: the kernel's."""

RANDOM = SAMPLER | {"runtime/sampling.py"}
"""And where a row is not greedy: its random numbers."""


@pytest.mark.parametrize(
    ("rows", "temperature", "visited"),
    [(1, 0.0, VISITED), (1, 0.8, VISITED | RANDOM), (3, 0.0, VISITED | SAMPLER)],
)
def test_files_of_a_decode_step(
    compiled: Callable[..., Path], rows: int, temperature: float, visited: set[str]
) -> None:
    """In the middle of a page; its tokens have their text."""
    engine = Engine(compiled("tiny-llama"), num_pages=64)
    sampling = SamplingParams(max_new_tokens=40, temperature=temperature, seed=1, ignore_eos=True)
    for _ in range(rows):
        engine.submit("The import statement", sampling)
    said = [engine.step() for _ in range(5)]
    files, tokens = files_of(engine.step)
    assert len(tokens) == rows
    assert any(token.text for step in [*said, tokens] for token in step)
    assert files == visited


def files_of(call: Callable[[], Any]) -> tuple[set[str], Any]:
    """Files of the package whose functions `call` runs, and what it returned."""
    files: set[str] = set()

    def visit(frame: Any, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.add(str(path.relative_to(PACKAGE)))

    sys.setprofile(visit)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return files, result
