"""How many threads a session may have, and how many it gets by default."""

from __future__ import annotations

import os
from pathlib import Path

from kvgraph.errors import RequestError

TOPOLOGY = Path("/sys/devices/system/cpu")


def require_threads(asked: int | None) -> None:
    """RequestError for more threads than processors that this process may run on."""
    most = len(os.sched_getaffinity(0))
    if asked is not None and not 0 <= asked <= most:
        raise RequestError(f"num_threads: expected 1 to {most} from this machine, got {asked}")


def default_threads(topology: Path = TOPOLOGY) -> int:
    """One for each physical core that this process may run on.

    Two threads of a core share its vector units, and one that has to wait holds up all others.
    A processor that says nothing about its core counts as one.
    """
    cores = {_core(topology / f"cpu{number}", number) for number in os.sched_getaffinity(0)}
    return len(cores)


def _core(folder: Path, number: int) -> str:
    try:
        return (folder / "topology" / "thread_siblings_list").read_text().strip()
    except OSError:
        return f"processor {number}"
