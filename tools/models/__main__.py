"""`python -m tools.models [NAME ...]`: judge cases, a line each; `--write` makes docs/models.md and
tests/golden/models.json of all of them, in about ten minutes on two cores. It writes nothing if a
case has other tokens."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor

from tools.models import cases
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found: dict[str, Verdict] = {}
    for name, verdict in judged(given.names or cases.names()):
        found[name] = verdict
        print(f"{name:28} {verdict.result:12} {verdict.why}", flush=True)
    is_right = all(verdict.result != "other tokens" for verdict in found.values())
    if given.write and is_right:
        from tools.models import page

        page.write(found)
    elif given.write:
        print("nothing was written: a model must make the tokens of transformers")
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main())
