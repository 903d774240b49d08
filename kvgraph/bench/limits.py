"""Limits of the machine, measured during a run: memory in GB/s, matrix products in GFLOP/s.

    python -m kvgraph.bench.limits THREADS BYTES    one JSON line

Each reading is a separate process, so that the thread settings of the BLAS libraries apply and no
memory stays in use. GB and GFLOP are 1e9.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvgraph.bench.machine import last_level_cache, thread_environment
from kvgraph.contract.loading import require_package
from kvgraph.contract.plain import from_plain
from kvgraph.errors import KVGraphError, MissingDependencyError
from kvgraph.runtime.machine import memory

if TYPE_CHECKING:
    from types import ModuleType

LEAST_READ_BYTES = 1 << 30
CACHES = 4
"""The buffer is as large as this many last-level caches, and at least `LEAST_READ_BYTES`."""
GEMM_SIZE, SMALL_SIZE = 2048, 256
READS, READ_SECONDS = 5, 0.5
"""Least calls of one figure, and least seconds in which they begin: other processes may stop all of
a few short calls."""

SLOW_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Gemm:
    """Rate of a library's square products of `GEMM_SIZE`, or of `SMALL_SIZE` if a large one would
    take SLOW_SECONDS: torch multiplies bfloat16 in loops on processors without instructions for it.
    """

    dtype: str
    library: str
    gflops: float


@dataclass(frozen=True, slots=True)
class Limits:
    """One reading. `missing`: reason why rates of other dtypes are missing, if they are."""

    read_gbs: float
    read_bytes: int
    gemms: list[Gemm]
    missing: str | None = None

    def gflops(self, dtype: str) -> float | None:
        """Rate of the fastest library for `dtype`; None if there is none."""
        return max((gemm.gflops for gemm in self.gemms if gemm.dtype == dtype), default=None)


def read_limits(threads: int, read_bytes: int | None = None) -> Limits:
    """Measure the limits in a new process; each is the best of a few runs."""
    command = [sys.executable, "-m", "kvgraph.bench.limits", str(threads)]
    command.append(str(read_bytes or buffer_bytes()))
    done = subprocess.run(
        command, env=thread_environment(threads), capture_output=True, text=True, check=False
    )
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise KVGraphError(f"limits: expected a reading, got exit status {done.returncode}: {last}")
    return from_plain(Limits, json.loads(done.stdout))


def buffer_bytes() -> int:
    """Bytes of the buffer: larger than all caches, which have hundreds of MB in servers, but at
    most a quarter of the memory, unless that is below LEAST_READ_BYTES."""
    return max(LEAST_READ_BYTES, min(CACHES * last_level_cache(), memory() // 4))


def reader(size: int, threads: int, workers: ThreadPoolExecutor) -> Callable[[], object]:
    """Return a function that reads `size` bytes of one buffer, an equal share on every thread.

    It takes the maximum of int32 elements: of NumPy's reductions this comes closest to the memory's
    speed on one core (a float32 sum reaches 60 % of it). The memory is written first, since
    unwritten memory is one cached page of zeros. Each part is written by its own thread, so that it
    is in memory near that thread.
    """
    parts = np.array_split(np.empty(size // 4, np.int32), threads)
    together = threading.Barrier(threads)  # otherwise one thread could fill several parts

    def fill(part: NDArray[np.int32]) -> None:
        together.wait()
        part.fill(1)

    list(workers.map(fill, parts))
    if threads == 1:
        return parts[0].max
    return lambda: list(workers.map(np.max, parts))


def best_seconds(
    call: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Least seconds of a call, out of READS calls or more in READ_SECONDS, after a first one."""
    call()
    times: list[float] = []
    end = clock() + READ_SECONDS
    while (start := clock()) < end or len(times) < READS:
        call()
        times.append(clock() - start)
    return min(times)


def main() -> None:
    threads, size = int(sys.argv[1]), int(sys.argv[2])
    with ThreadPoolExecutor(threads) as workers:
        read_gbs = size / best_seconds(reader(size, threads, workers)) / 1e9
    gemms, missing = [_gemm("float32", "numpy", _numpy_gemm)], None
    try:
        need = "needed for the limits of bfloat16 and int8"
        torch = require_package("torch", need, "pip install 'kvgraph[torch]'")
    except MissingDependencyError as error:
        missing = str(error)
    else:
        torch.set_num_threads(threads)
        for dtype in ("float32", "bfloat16", "int8"):
            gemms.append(_gemm(dtype, "torch", partial(_torch_gemm, torch, dtype)))
    fields = [{"dtype": g.dtype, "library": g.library, "gflops": g.gflops} for g in gemms]
    reading = {"read_gbs": read_gbs, "read_bytes": size, "gemms": fields, "missing": missing}
    print(json.dumps(reading))


def _gemm(dtype: str, library: str, product: Callable[[int], Callable[[], object]]) -> Gemm:
    seconds = best_seconds(product(SMALL_SIZE))
    size = SMALL_SIZE
    if seconds * (GEMM_SIZE / SMALL_SIZE) ** 3 < SLOW_SECONDS:
        size, seconds = GEMM_SIZE, best_seconds(product(GEMM_SIZE))
    return Gemm(dtype, library, 2 * size**3 / seconds / 1e9)


def _numpy_gemm(size: int) -> Callable[[], object]:
    a = np.random.default_rng(0).standard_normal((size, size), dtype=np.float32)
    return lambda: a @ a


def _torch_gemm(torch: ModuleType, dtype: str, size: int) -> Callable[[], object]:
    a = torch.randn(size, size)
    if dtype == "int8":
        c = (a * 20).to(torch.int8)
        return lambda: torch._int_mm(c, c)
    b = a.to(getattr(torch, dtype))
    return lambda: b @ b


if __name__ == "__main__":
    main()
