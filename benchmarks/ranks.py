"""A step of two ranks next to one process: `python -m benchmarks.ranks [CHECKPOINT] [--json]`.

Method: a Llama of 246M parameters with random weights (or CHECKPOINT) in int8, compiled for one
rank and for two. One process of two threads runs the first; two processes of one thread each run
the second. `batch` requests decode behind prompts of 128 tokens: the median of 64 steps. Prefill
is one prompt of 512 tokens, the best of 3. "collectives" are the calls of such a step between two
processes that do nothing else; "waiting" is the time that rank 0 spends in a step's collectives
until the other rank is there. The goal: a step of two ranks takes at most 1.15 times that of one
process, plus the collectives. The limit is the reading of the weights at what the memory gives to
two threads. Logits of both artifacts are compared with those of float32 first.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

import kvgraph
from benchmarks.step import SHAPE
from kvgraph.bench.limits import read_limits
from kvgraph.build import run_artifact
from kvgraph.contract.manifest import Manifest, read_manifest
from kvgraph.ops import ALL_GATHER, ALL_REDUCE, native
from kvgraph.runtime.ranks import meeting
from kvgraph.runtime.ranks.launched import launched

BATCHES, PROMPT, STEPS, WARM, PREFILL = (1, 8), 128, 64, 8, 512
GOAL = 1.15
RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", type=Path)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    parser.add_argument("--run", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        run_rank(args.run)
        return
    with tempfile.TemporaryDirectory() as name:
        checkpoint = args.checkpoint or made(Path(name) / "checkpoint")
        figures = measured(checkpoint, Path(name))
    print(json.dumps(figures, indent=2) if args.json else f"{__doc__.strip()}\n\n{table(figures)}")


def made(folder: Path) -> Path:
    """A checkpoint of SHAPE."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE)).save_pretrained(folder)
    return folder


def measured(checkpoint: Path, folder: Path) -> dict[str, Any]:
    one, two, exact = (folder / name for name in ("one", "two", "exact"))
    kvgraph.compile(checkpoint, exact, check=False)
    kvgraph.compile(checkpoint, one, weights="int8", check=False)
    kvgraph.compile(checkpoint, two, weights="int8", tp=RANKS, check=False)
    errors = {"one": error(one, exact), "two": error(two, exact)}
    limits = read_limits(RANKS)
    weights = sum((one / name).stat().st_size for name in ("weights.safetensors",))
    return {
        "errors": errors,
        "read_gbs": limits.read_gbs,
        "limit_ms": weights / limits.read_gbs / 1e6,
        "one": run(one, {}),
        "two": run(two, None),
    }


def error(folder: Path, exact: Path) -> float:
    """Of the logits of two rows, over their spread."""
    rng = np.random.default_rng(0)
    vocab = read_manifest(exact).model.vocab_size
    rows = [rng.integers(3, vocab, n).astype(np.int32) for n in (40, 17)]
    found, expected = (np.concatenate(run_artifact(f, rows, 32)) for f in (folder, exact))
    return float(np.abs(found - expected).mean() / expected.std())


def run(folder: Path, alone: dict[str, str] | None) -> dict[str, Any]:
    """What rank 0 measures: a process alone, or the first of two."""
    command = [sys.executable, "-m", "benchmarks.ranks", "--run", str(folder)]
    each = [{}] if alone is not None else [of_rank(rank) for rank in range(RANKS)]
    processes = [
        subprocess.Popen(command, env=os.environ | own, stdout=subprocess.PIPE, text=True)
        for own in each
    ]
    outputs = [process.communicate()[0] for process in processes]
    found: dict[str, Any] = json.loads(outputs[0])
    return found


def of_rank(rank: int) -> dict[str, str]:
    size = str(RANKS)
    own = {"RANK": str(rank), "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return own | {"TORCHELASTIC_RUN_ID": f"benchmark-{os.getpid()}"}


def run_rank(folder: Path) -> None:
    artifact, own = kvgraph.load(folder), launched()
    threads = RANKS if own is None else 1
    collectives = {} if own is None else alone(artifact.manifest)
    if own is not None and own.rank:
        artifact.follow(num_threads=threads)
        return
    session = artifact.session(num_threads=threads)
    figures = {f"batch {batch}": decode(artifact, session, batch) for batch in BATCHES}
    figures["prefill"] = {"ms": prefill(artifact, session)}
    for batch, seconds in collectives.items():
        figures[f"batch {batch}"]["collectives"] = seconds * 1e3
    print(json.dumps(figures))


def alone(manifest: Manifest) -> dict[int, float]:
    """Median seconds of all collectives of a step, by batch."""
    own = launched()
    assert own is not None
    call: Any = meeting.follow if own.rank else meeting.lead
    group, _ = call(own, {}, 60.0)
    group.enter()
    found = {}
    for batch in BATCHES:
        times = []
        for _ in range(100):
            start = perf_counter()
            for each in manifest.collectives:
                x = np.ones((batch, each.bytes // 4), np.float32)
                for _ in range(each.count):
                    if each.op == "all_reduce":
                        native.run(ALL_REDUCE, x, ranks=RANKS)
                    else:
                        native.run(ALL_GATHER, x, ranks=RANKS, out_width=RANKS * x.shape[1])
            times.append(perf_counter() - start)
        found[batch] = statistics.median(times)
    return found


def decode(artifact: Any, session: Any, batch: int) -> dict[str, float]:
    """Median milliseconds of a step, and of the waiting in it."""
    group = getattr(session, "_group", None)
    with engine_of(artifact, session, batch, PROMPT, STEPS + WARM + 2) as engine:
        times, waits = [], []
        for _ in range(STEPS + WARM):
            waited, start = group.waited_seconds if group else 0.0, perf_counter()
            engine.step()
            times.append(perf_counter() - start)
            waits.append((group.waited_seconds if group else 0.0) - waited)
    return {
        "ms": statistics.median(times[WARM:]) * 1e3,
        "waiting": statistics.median(waits[WARM:]) * 1e3,
    }


def prefill(artifact: Any, session: Any) -> float:
    """Best milliseconds of a prompt of PREFILL tokens."""
    times = []
    for seed in range(3):
        start = perf_counter()
        with engine_of(artifact, session, 1, PREFILL, 1, seed):
            times.append(perf_counter() - start)
    return min(times) * 1e3


@contextlib.contextmanager
def engine_of(
    artifact: Any, session: Any, batch: int, length: int, new: int, seed: int = 0
) -> Iterator[Any]:
    """An engine whose prompts are computed."""
    engine = kvgraph.Engine(artifact, session=session, max_batch_size=batch, num_pages=256)
    rng, vocab = np.random.default_rng(seed), artifact.manifest.model.vocab_size
    sampling = kvgraph.SamplingParams(max_new_tokens=new, ignore_eos=True)
    for _ in range(batch):
        engine.submit(rng.integers(3, vocab, length).tolist(), sampling)
    generated = 0
    while generated < batch:
        generated += len(engine.step())
    yield engine
    engine.close()


def table(figures: dict[str, Any]) -> str:
    one, two = figures["one"], figures["two"]
    lines = [
        f"memory gives {figures['read_gbs']:.1f} GB/s to two threads; "
        f"reading the weights takes {figures['limit_ms']:.2f} ms",
        "errors of the logits over their spread: "
        + ", ".join(f"{name} {value:.4f}" for name, value in figures["errors"].items()),
        "",
        "step        one process     two ranks   collectives   waiting   ratio   ratio without",
    ]
    for name in (*(f"batch {batch}" for batch in BATCHES), "prefill"):
        mine, theirs = two[name], one[name]["ms"]
        apart = mine.get("collectives", 0.0)
        lines.append(
            f"{name:10}{theirs:11.2f} ms{mine['ms']:11.2f} ms{apart:11.2f} ms"
            f"{mine.get('waiting', 0.0):7.2f} ms{mine['ms'] / theirs:8.2f}"
            f"{(mine['ms'] - apart) / theirs:16.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
