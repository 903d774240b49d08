"""Cases in processes, which find their function here: they cannot import a package's __main__."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from tools.models.judge import Verdict


def quietly(name: str) -> tuple[str, Verdict]:
    """Of one case in a process of its own, whose libraries print nothing."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import torch

    from tools.models.judge import judge

    torch.set_num_threads(1)
    return name, judge(name)


def judged(names: Iterable[str], jobs: int = 2) -> Iterator[tuple[str, Verdict]]:
    """Each case in a process of its own, in order.

    Processes are forked from one that has loaded the libraries and runs no threads.
    """
    clean = multiprocessing.get_context("forkserver")
    clean.set_forkserver_preload(["kvgraph.compiler.frontends.huggingface", "kvgraph.runtime"])
    with ProcessPoolExecutor(jobs, mp_context=clean, max_tasks_per_child=1) as pool:
        yield from pool.map(quietly, names)
