"""Processes of one run, as torchrun starts them: a rank each, by its environment."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.support.ports import free_port

RUNS = itertools.count()


def environment(rank: int, size: int, run: str, port: int = 29500, **other: str) -> dict[str, str]:
    given = {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "TORCHELASTIC_RUN_ID": run,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return given | other


@contextmanager
def started(
    *arguments: Any,
    size: int = 2,
    only: tuple[int, ...] | None = None,
    hosts: bool = False,
    followers: tuple[Any, ...] = (),
) -> Iterator[list[subprocess.Popen[str]]]:
    """`kvgraph ARGUMENTS` in each rank (of `only`), killed on the way out.

    `hosts`: each is told that it is alone on its machine. `followers`: arguments of ranks above 0.
    """
    run = f"test-{os.getpid()}-{next(RUNS)}"
    port = free_port() if hosts else 29500
    alone = {"LOCAL_WORLD_SIZE": "1"} if hosts else {}

    def command(rank: int) -> list[str]:
        given = followers if rank and followers else arguments
        return [sys.executable, "-m", "kvgraph", *map(str, given)]

    processes = [
        subprocess.Popen(
            command(rank),
            env=os.environ | environment(rank, size, run, port, **alone),
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


def ended(process: subprocess.Popen[str], seconds: float = 180) -> tuple[int, str, str]:
    """Exit code, stdout and stderr."""
    out, err = process.communicate(timeout=seconds)
    return process.returncode, out, err
