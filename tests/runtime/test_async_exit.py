"""A program that ends while an AsyncEngine runs: it ends as it would without one."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ENDING = """
import asyncio, os, sys
from kvgraph import AsyncEngine, Engine, SamplingParams

LONG = SamplingParams(max_new_tokens=800, ignore_eos=True)
shared = AsyncEngine(Engine(sys.argv[1], num_pages=400, num_threads=2))

async def main():
    await shared.start()
    tasks = [
        asyncio.create_task(shared.generate("The import statement " * 300, LONG))
        for _ in range(16)
    ]
    while not shared.engine.generated_tokens:
        await asyncio.sleep(0.01)
    {end}

{run}
"""

RUN = "asyncio.run(main())"
OWN_LOOP = """
import threading
threading.Thread(target=asyncio.run, args=(main(),), daemon=True).start()
while not shared.engine.generated_tokens:
    pass
"""


@pytest.mark.parametrize(
    ("end", "run", "code"),
    [
        ("pass", RUN, 0),
        ("sys.exit(3)", RUN, 3),
        ("await asyncio.sleep(60)", OWN_LOOP, 0),
        ("await shared.close()", RUN, 0),
    ],
    ids=["returns", "exits", "in a daemon thread", "closed"],
)
def test_a_program_that_ends_waits_for_the_step_that_runs(
    compiled: Callable[..., Path], end: str, run: str, code: int
) -> None:
    program = ENDING.format(end=end, run=run)
    command = [sys.executable, "-c", program, str(compiled("tiny-llama"))]
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert "terminate" not in done.stderr


def test_a_forked_child_has_no_step_to_wait_for(compiled: Callable[..., Path]) -> None:
    fork = "child = os.fork() or sys.exit(4); print(os.waitpid(child, 0)[1] >> 8)"
    program = ENDING.format(end=fork, run=RUN)
    command = [sys.executable, "-c", program, str(compiled("tiny-llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr


def test_a_forked_child_leaves_the_engine_to_its_parent(compiled: Callable[..., Path]) -> None:
    """It neither waits for the thread, which it has not, nor asks it."""
    fork = """
    child = os.fork()
    if not child:
        try:
            await shared.generate("The")
        except RequestError as error:
            assert "got a fork of it" in str(error)
        await shared.close()
        os._exit(4)
    print(os.waitpid(child, 0)[1] >> 8)
    print((await shared.generate("The", SamplingParams(max_new_tokens=2))).finish_reason)
    await shared.close()
"""
    program = ENDING.replace("kvgraph import", "kvgraph import RequestError,")
    program = program.format(end=fork, run=RUN)
    command = [sys.executable, "-c", program, str(compiled("tiny-llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "4\nlength\n"), done.stderr


THREAD = """
import os, signal, sys, threading, time
from kvgraph import Engine, SamplingParams

engine = Engine(sys.argv[1], num_pages=400, num_threads=2)
LONG = SamplingParams(max_new_tokens=800, ignore_eos=True)
GUIDED = SamplingParams(guided_json={{"type": "array"}}, max_new_tokens=800)

def run():  # from Python 3.12 on, the end waits for a thread that is no daemon
    until = time.monotonic() + 3
    while time.monotonic() < until:
        {call}

thread = threading.Thread(target=run, daemon={is_daemon})
thread.start()
while not engine.generated_tokens:
    pass
{end}
"""

GENERATE = "engine.generate(['The import statement ' * 300] * 16, LONG)"
INTERRUPTED = """
threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
thread.join()
"""


@pytest.mark.parametrize(
    ("call", "is_daemon", "end", "code"),
    [
        (GENERATE, True, "", 0),
        (GENERATE, False, INTERRUPTED, -signal.SIGINT),
        ("engine.generate(['The'] * 16, GUIDED)", True, "", 0),
    ],
    ids=["daemon", "interrupted", "guided"],
)
def test_a_program_that_ends_waits_for_the_step_of_any_thread(
    compiled: Callable[..., Path], call: str, is_daemon: bool, end: str, code: int
) -> None:
    program = THREAD.format(call=call, is_daemon=is_daemon, end=end)
    command = [sys.executable, "-c", program, str(compiled("tiny-llama"))]
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == code, done.stderr
        assert "terminate" not in done.stderr


REFUSED = """
@atexit.register
def look():
    for _ in range(2):
        try:
            engine.generate(["The"])  # the thread that ends Python may go on
        except Exception as error:
            print(error)
    is_ending.set()
    thread.join()

def ask():
    is_ending.wait()
    try:
        engine.generate(["The"])
    except RequestError as error:
        print(error)

from kvgraph import Engine, RequestError
engine = Engine(sys.argv[1], num_pages=400, num_threads=2)
is_ending = threading.Event()
thread = threading.Thread(target=ask, daemon=True)  # from Python 3.12 on, none starts in a hook
thread.start()
"""


def test_a_step_of_another_thread_is_refused_once_python_ends(
    compiled: Callable[..., Path],
) -> None:
    """Hooks that were registered before kvgraph was imported run last."""
    command = [sys.executable, "-c", f"import atexit, sys, threading{REFUSED}"]
    done = subprocess.run(
        [*command, str(compiled("tiny-llama"))], capture_output=True, text=True, timeout=120
    )
    sentence = "run: expected no call while Python ends, got one\n"
    assert (done.returncode, done.stdout) == (0, sentence), done.stderr
