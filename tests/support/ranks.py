"""Processes of one run, as torchrun starts them: a rank each, by its environment."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

RUNS = itertools.count()


def environment(rank: int, size: int, run: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": run,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }


@contextmanager
def started(
    *arguments: Any, size: int = 2, only: tuple[int, ...] | None = None
) -> Iterator[list[subprocess.Popen[str]]]:
    """`kvgraph ARGUMENTS` in each rank (of `only`), killed on the way out."""
    run = f"test-{os.getpid()}-{next(RUNS)}"
    command = [sys.executable, "-m", "kvgraph", *map(str, arguments)]
    processes = [
        subprocess.Popen(
            command,
            env=os.environ | environment(rank, size, run),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (range(size) if only is None else only)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.__exit__(None, None, None)  # closes its pipes and waits


def ended(process: subprocess.Popen[str], seconds: float = 60) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err
