"""Owners of memory, files, threads or connections, of which a copy would own the same ones."""

from __future__ import annotations

import copy
import pickle
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvgraph import AsyncEngine, Engine
from kvgraph.errors import RequestError
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.tiers.remote import RemoteStore
from kvgraph.kv.tiers.transfer import PageTransfer
from kvgraph.ops.group import Group, shared_bytes
from kvgraph.runtime.ranks.wire import Wire
from tests.support.builders import make_params

MADE = pytest.mark.parametrize("made", [copy.copy, copy.deepcopy, pickle.dumps])


def refused(made: Callable[[Any], Any], owners: Iterable[object]) -> None:
    for one in owners:
        said = f"^{type(one).__name__}: expected one owner of what it holds, got a copy"
        with pytest.raises(TypeError, match=said):
            made(one)


@MADE
def test_no_copy_is_made(
    made: Callable[[Any], Any], compiled: Callable[..., Path], tmp_path: Path
) -> None:
    tiers = {"host_memory": "1MiB", "disk": tmp_path}
    with Engine(compiled("tiny-llama"), num_pages=8, num_threads=1, **tiers) as engine:
        assert engine.kv._tiers is not None
        workers = engine.kv._tiers.connector
        stores = [workers._host, *workers._stores]
        refused(made, [engine, engine.session, engine.kv, AsyncEngine(engine), workers, *stores])
        refused(made, [PageTransfer(engine.kv)])


@MADE
def test_no_copy_of_other_managers_and_ranks(
    made: Callable[[Any], Any], compiled: Callable[..., Path]
) -> None:
    near, far = socket.socketpair()
    with near, far, Engine(compiled("tiny-llama", tp=2), num_threads=1) as engine:
        memory = np.zeros(shared_bytes(1), np.uint8)
        refused(made, [engine.session, Wire(near, 1), Group(memory, 0, 1, [-1], 1.0)])
    refused(
        made,
        [
            PaddedKVCacheManager(make_params(), 4, 16),
            RemoteStore("redis://127.0.0.1:1", bytes(32), 1),
        ],
    )


@pytest.mark.parametrize("given", ["tiny.kvg", 5, None, Path("tiny.kvg")])
def test_an_async_engine_of_something_else(given: Any) -> None:
    with pytest.raises(RequestError, match=r"^engine: expected an Engine, as Engine\(path\) makes"):
        AsyncEngine(given)
