"""Cold start to the first token: `python -m benchmarks.start [ARTIFACT] [--runs 5] [--json]`.

Method: a new process for each run, from its start to a printed first token of a prompt of 32
tokens; the artifact's files are in the system's cache (default: tiny-llama, compiled here). Stages
are timed in the process, "interpreter" is what the parent saw before. Medians over the runs, with
the peak of the resident memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import kvgraph

TINY_LLAMA = Path(__file__).parents[1] / "examples" / "tiny-llama"

CHILD = """
import json, resource, sys, time
marks = [("interpreter", time.time())]
def mark(stage): marks.append((stage, time.time()))
import kvgraph
from kvgraph.runtime.engine import Engine
mark("import")
artifact = kvgraph.load(sys.argv[1])
mark("read and verify")
session = artifact.session()
mark("session")
engine = Engine(artifact, session=session, max_batch_size=1)
mark("engine")
next(iter(engine.generate([list(range(3, 35))], kvgraph.SamplingParams(max_new_tokens=1))))
mark("first token")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"marks": marks, "peak MiB": peak}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("artifact", nargs="?", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        folder = args.artifact or stack.enter_context(compiled())
        runs = [start(folder) for _ in range(args.runs + 1)][1:]  # the first one fills the cache
    rows = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    print(json.dumps(rows, indent=2) if args.json else f"{__doc__.strip()}\n\n{table(rows)}")


@contextlib.contextmanager
def compiled() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        kvgraph.compile(TINY_LLAMA, Path(name) / "artifact")
        yield Path(name) / "artifact"


def start(folder: Path) -> dict[str, float]:
    """Milliseconds of each stage and of all, and the peak in MiB."""
    began = time.time()
    command = [sys.executable, "-c", CHILD, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    stages, last = {}, began
    for stage, at in found["marks"]:
        stages[f"{stage} ms"] = (at - last) * 1e3
        last = at
    return stages | {"all ms": (last - began) * 1e3, "peak MiB": found["peak MiB"]}


def table(rows: dict[str, float]) -> str:
    return "\n".join(f"{name:20} {value:10.1f}" for name, value in rows.items())


if __name__ == "__main__":
    main()
