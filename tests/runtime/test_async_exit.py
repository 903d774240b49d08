"""A program that ends while an AsyncEngine runs: it ends as it would without one."""

from __future__ import annotations

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
