"""A decode step's time does not depend on the pool's size: the graph mutates it in place.

    python -m benchmarks.pool [ARTIFACT]         (make bench-pool)

Alternates steps over a 16 MiB and a 1 GiB pool of one artifact, and a copy of the small pool per
step as the baseline that an engine without in-place binding pays. Reference check: both pools give
the same tokens. Physical limit: the bytes of weights that a step reads, at the read bandwidth
measured on a buffer of the same size.
"""

from __future__ import annotations

import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import kvgraph

ROOT = Path(__file__).parents[1]
STEPS, CONTEXT = 400, 128


def engine(artifact: kvgraph.runtime.artifact.Artifact, pool_bytes: int) -> kvgraph.Engine:
    pages = pool_bytes // artifact.params().bytes_per_page
    made = kvgraph.Engine(artifact, num_pages=pages, max_batch_size=1)
    sampling = kvgraph.SamplingParams(max_new_tokens=STEPS + 8, ignore_eos=True)
    made.submit(list(range(2, 2 + CONTEXT)), sampling)
    for _ in range(4):
        made.step()
    return made


def timed(call: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = call()
    return (time.perf_counter() - start) * 1e6, result


def show(name: str, micros: list[float]) -> float:
    low, median, high = (float(np.percentile(micros, q)) for q in (10, 50, 90))
    print(f"{name:34} median {median:8.1f} us   10-90 % {low:8.1f} to {high:8.1f}")
    return median


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(folder) / "tiny-llama.kvg"
        if len(sys.argv) == 1:
            kvgraph.compile(ROOT / "examples" / "tiny-llama", path, page_size=16)
        artifact = kvgraph.load(path)
        small, large = engine(artifact, 16 << 20), engine(artifact, 1 << 30)
        gc.disable()
        times: dict[str, list[float]] = {"small": [], "large": [], "copy": []}
        pool = small.kv.get_device_buffer(0).all_buffers[0].handle
        for _ in range(STEPS):
            micros, ours = timed(small.step)
            times["small"].append(micros)
            micros, theirs = timed(large.step)
            times["large"].append(micros)
            assert [t.token_id for t in ours] == [t.token_id for t in theirs]  # type: ignore[attr-defined]
            times["copy"].append(timed(pool.copy)[0])
        base = show("decode step, 16 MiB pool", times["small"])
        grown = show("decode step, 1 GiB pool", times["large"])
        copied = show("baseline: one copy of 16 MiB", times["copy"])
        print(
            f"1 GiB / 16 MiB: {grown / base:.2f} "
            f"(a copied pool would be at least 64 x {copied:.0f} us)"
        )
        weights = (path / "weights.safetensors").stat().st_size
        buffer = np.ones(weights // 8)
        limit = statistics.median(timed(buffer.sum)[0] for _ in range(50))
        print(
            f"weights {weights / 2**20:.1f} MiB are read in {limit:.0f} us: "
            f"{limit / base:.0%} of a step"
        )


if __name__ == "__main__":
    main()
