"""Engines and managers, of which a copy would own the same memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvgraph import AsyncEngine, Engine
from kvgraph.errors import RequestError


@pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_copy_is_made(made: Callable[[Any], Any], compiled: Callable[..., Path]) -> None:
    with Engine(compiled("tiny-llama"), num_pages=8, num_threads=1) as engine:
        for one in (engine, engine.kv, AsyncEngine(engine)):
            said = f"^{type(one).__name__}: expected one owner of its memory, got a copy"
            with pytest.raises(TypeError, match=said):
                made(one)


@pytest.mark.parametrize("given", ["tiny.kvg", 5, None, Path("tiny.kvg")])
def test_an_async_engine_of_something_else(given: Any) -> None:
    with pytest.raises(RequestError, match=r"^engine: expected an Engine, as Engine\(path\) makes"):
        AsyncEngine(given)
