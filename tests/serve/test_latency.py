"""Computing stands behind answering: the niceness of a server's threads, and its heap."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

import pytest

from kvgraph import AsyncEngine, Engine
from kvgraph.serve.latency import is_making, keep_heap, make_behind, step_behind
from tests.serve.running import Server, serving
from tests.support.command_line import run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a thread's niceness is Linux's")


def own_niceness(*_: object) -> int:
    return os.getpriority(os.PRIO_PROCESS, 0)


def niceness(server: Server) -> list[int]:
    """Of each thread, the event loop's first, next to this process's."""
    threads = sorted(map(int, os.listdir(f"/proc/{server.process.pid}/task")))
    found = []
    for thread in threads:
        with suppress(ProcessLookupError):  # it has ended since
            found.append(os.getpriority(os.PRIO_PROCESS, thread) - own_niceness())
    return found


def test_the_loop_answers_before_threads_that_compute(artifact: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", artifact, "--threads", 2) as server:
        server.event("ready")
        loop, *others = niceness(server)
        assert loop == 0
        assert {7, 15} <= set(others)
        assert others.count(7) == 1  # the engine's


def test_all_are_equal_where_the_user_asks_for_it(artifact: Path, tmp_path: Path) -> None:
    with serving(tmp_path / "log", artifact, "--threads", 2, "--nice", 0) as server:
        server.event("ready")
        assert set(niceness(server)) == {0}


def test_threads_inherit_it_and_the_caller_keeps_its_own(artifact: Path) -> None:
    own = own_niceness()
    assert asyncio.run(make_behind(own_niceness, 3)) == own + 3
    assert asyncio.run(make_behind(own_niceness, 0)) == own
    assert asyncio.run(make_behind(own_niceness, 19)) == 19  # the most that Linux has
    assert own_niceness() == own

    async def of_steps() -> int:
        async with AsyncEngine(Engine(artifact, num_threads=1, num_pages=20)) as engine:
            await step_behind(engine, 6)
            return await engine.call(own_niceness)

    assert asyncio.run(of_steps()) == own + 3


def test_a_niceness_that_the_system_refuses_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a filter of system calls does: SystemCallFilter=~@resources of systemd."""
    refused = PermissionError(errno.EPERM, "Operation not permitted")
    monkeypatch.setattr(os, "setpriority", mock.Mock(side_effect=refused))
    with pytest.warns(
        UserWarning, match=r"^niceness: .* got 'Operation not permitted'; .*--nice 0"
    ):
        assert asyncio.run(make_behind(lambda: "made", 10)) == "made"


def test_what_make_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        asyncio.run(make_behind(lambda: 1 // 0, 1))


@pytest.mark.parametrize("is_loop_there", [True, False])
def test_what_is_made_for_no_caller_is_dropped(is_loop_there: bool) -> None:
    """The caller leaves; the loop, or the end of it, does not wait for the thread."""
    may_end, dropped = threading.Event(), SimpleQueue[int]()

    def make() -> int:
        may_end.wait(60)
        return 5

    async def leave() -> None:
        making = asyncio.ensure_future(make_behind(make, 0, dropped.put))
        await asyncio.sleep(0.05)
        assert is_making()
        making.cancel()
        with pytest.raises(asyncio.CancelledError):
            await making
        if is_loop_there:
            may_end.set()
            assert await asyncio.to_thread(dropped.get, timeout=60) == 5

    asyncio.run(leave())
    if not is_loop_there:
        assert is_making()
        may_end.set()
        assert dropped.get(timeout=60) == 5
    while is_making():
        time.sleep(0.01)


@pytest.fixture
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("thawed")
def test_a_collection_leaves_the_heap_of_before_alone() -> None:
    old = [[] for _ in range(100)]
    keep_heap()
    assert gc.get_freeze_count() > 100
    assert not any(old is each for each in gc.get_objects())


def test_replicas_have_no_niceness_of_their_own(artifact: Path) -> None:
    done = run("serve", artifact, "--replicas", 2, "--nice", 3)
    assert "--nice: expected one engine, got --replicas" in done.err
    assert done.code == 2
