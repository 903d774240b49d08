"""One server for all tests of a process, and the engine that its answers are compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("uvicorn", reason="kvgraph serve needs the extra `serve`")

from kvgraph import Engine
from tests.serve.running import Server, serving


@pytest.fixture(scope="session")
def artifact(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama")


@pytest.fixture(scope="session")
def running(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("serve") / "log", artifact, "--threads", 1) as server:
        yield server


@pytest.fixture
def server(running: Server) -> Iterator[Server]:
    """Afterwards every page is back, and no exception was logged."""
    yield running
    running.wait_until_idle()
    assert "Traceback" not in running.log(), running.log()


@pytest.fixture(scope="session")
def engine(artifact: Path) -> Engine:
    return Engine(artifact, num_threads=1, num_pages=200)
