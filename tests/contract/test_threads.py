"""Threads once Python ends: executors start none, and from 3.12 on `Thread.start` neither."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvgraph.contract.threads import executor, mapped, threads_needed
from kvgraph.errors import CapacityError

ENDING = "^threads: expected that one more can start, got the end of Python"

MESSAGES = (
    "can't create new thread at interpreter shutdown",
    "cannot schedule new futures after interpreter shutdown",
    "cannot schedule new futures after shutdown",
    "can't register atexit after shutdown",
)

LATE = """
import sys, threading, kvgraph
{imports}

def work():
    threading.main_thread().join()
    {call}

threading.Thread(target=work).start()
"""

GENERATE = (
    "print(len(kvgraph.Engine(sys.argv[1], num_pages=16, num_threads=1).generate("
    "['The'], kvgraph.SamplingParams(max_new_tokens=2, ignore_eos=True))[0].token_ids))"
)


@pytest.mark.parametrize("imports", ["", "kvgraph.Engine, kvgraph.AsyncEngine"])
def test_the_first_load_in_a_thread_that_outlives_the_main_thread(
    imports: str, compiled: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hashes the files: what is kept of earlier hashes is elsewhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    program = LATE.format(imports=imports, call=GENERATE)
    command = [sys.executable, "-c", program, str(compiled("tiny-llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("message", MESSAGES)
def test_a_thread_that_python_refuses(message: str) -> None:
    with pytest.raises(CapacityError, match=ENDING), threads_needed():
        raise RuntimeError(message)


def test_another_error_is_none_of_threads() -> None:
    with pytest.raises(RuntimeError, match=r"^another$"), threads_needed():
        raise RuntimeError("another")


def test_results_are_in_order() -> None:
    with mapped(str, range(20), "numbers") as results:
        assert list(results) == [str(number) for number in range(20)]


@pytest.mark.parametrize("first", [0, 1])
def test_the_calling_thread_does_the_work_of_refused_ones(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, left = threading.Thread.start, first

    def start(self: threading.Thread) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError(MESSAGES[0])
        begin(self)

    barrier = threading.Event()

    def call(number: int) -> int:  # a thread that waits is not idle: the next job needs another one
        if threading.current_thread() is not threading.main_thread():
            barrier.wait(60)
        return number

    monkeypatch.setattr(threading.Thread, "start", start)
    with mapped(call, range(3), "numbers") as results:
        assert list(results) == [0, 1, 2]
        barrier.set()


def test_jobs_that_nothing_waits_for_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    go, end = threading.Event(), ThreadPoolExecutor.shutdown

    def call(number: int) -> None:
        begun.append(number)
        go.wait(60)

    def shutdown(pool: ThreadPoolExecutor, *, cancel_futures: bool) -> None:
        end(pool, wait=False, cancel_futures=cancel_futures)
        go.set()
        end(pool)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", shutdown)
    with pytest.raises(KeyboardInterrupt), mapped(call, range(1000), "numbers"):
        raise KeyboardInterrupt
    assert len(begun) < 1000


def test_an_executor_of_a_late_import() -> None:
    call = "from kvgraph.contract.threads import executor; executor(1, 'late')"
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(imports="", call=call)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "EndingError: threads: expected that one more can start, got the end" in done.stderr
    with executor(1, "early") as threads:
        assert threads.submit(int).result() == 0
