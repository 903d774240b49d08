"""Ranks that are killed at any moment: the other ends with one sentence, and nothing is left."""

from __future__ import annotations

import fcntl
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import ended, started

SEEN = "got the end of its process"
STARTING = 10
"""Seconds that a process may take to be started, on a machine with much else to do."""
DEADLINE = 4
"""Seconds for which a rank waits for the other."""
PIPE = 4096
"""Bytes that rank 0 writes before somebody reads them: half of its text, so it does not end."""
PLACES = [
    pytest.param(False, 0.5, 50, id="one-machine"),
    pytest.param(True, 4.0, 20, id="told-of-several"),
]
"""Whether ranks meet by gloo; seconds of steps at most in which they are killed; kills."""


def shared_files() -> set[str]:
    return set(os.listdir("/dev/shm"))


def command_of(folder: Path) -> tuple[object, ...]:
    options = ("--max-new-tokens", 2000, "--ignore-eos", "--collective-timeout", DEADLINE)
    return ("generate", folder, "The import", *options)


def moments_of(folder: Path, hosts: bool, seconds: float) -> tuple[float, float]:
    """From the start of the processes to their first step, and to some seconds of their steps, at
    most half of what these take, on this machine as it is now."""
    start = time.monotonic()
    with started(*command_of(folder), hosts=hosts) as (leader, _):
        assert leader.stdout is not None
        leader.stdout.read(1)
        first = time.monotonic()
        leader.stdout.read()
        last = time.monotonic()
    return first - start, first - start + min(seconds, (last - first) / 2)


@pytest.mark.slow
@pytest.mark.parametrize(("hosts", "seconds", "kills"), PLACES)
def test_kills_at_random_moments(
    hosts: bool, seconds: float, kills: int, compiled: Callable[..., Path]
) -> None:
    folder, moments = compiled("tiny-llama", tp=2), random.Random(7)
    before = shared_files()
    first, latest = moments_of(folder, hosts, seconds)
    in_steps = 0
    for kill in range(kills):
        earliest = first if kill % 4 > 1 else 0  # half of them while steps run
        victim, after = kill % 2, moments.uniform(earliest, latest)
        with started(*command_of(folder), hosts=hosts) as ranks:
            assert ranks[0].stdout is not None
            fcntl.fcntl(ranks[0].stdout, fcntl.F_SETPIPE_SZ, PIPE)
            time.sleep(after)
            ranks[victim].kill()
            start = time.monotonic()
            code, _, said = ended(ranks[1 - victim])
        # A rank that had not met the other waits for it as long as it was told to.
        limit = 5 if SEEN in said else 5 + STARTING
        assert time.monotonic() - start < limit, (kill, after, said)
        assert code == 2, (kill, after, said)
        sentences = [line for line in said.splitlines() if line.startswith("kvgraph: ")]
        assert len(sentences) == 1, (kill, after, said)
        assert f"rank {victim}: " in said or "got none of [1]" in said, (kill, after, said)
        in_steps += "in the step of 2 ranks" in said
    assert shared_files() == before
    assert in_steps > kills // 5, "too few kills while steps ran"
