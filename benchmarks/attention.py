"""Decode and prefill attention of the CPU kernels, alone, against the memory that they must read.

    python -m benchmarks.attention [ISA]         (KVGRAPH_CPU_ISA; default: what the CPU has)

Decode: 32 query heads over 8 kv heads of 128, pages of 16 tokens in shuffled order. Limit: the
same bytes in one piece, read by `reader` of kvgraph bench on as many threads, in turns with the
kernel. Baseline: torch's SDPA over K and V already gathered and converted (gathering is not
counted), after them, as its threads spin on between calls. Reference check: the op's NumPy form on
a small case of the same dtypes. One thread is timed by its own processor time, as other processes
may take the core; several by the clock.
Medians, and the best.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from kvgraph.bench.limits import reader
from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops import PAGED_ATTENTION, native
from kvgraph.ops._store_kv import quantize

N, K, D, S = 32, 8, 128, 16
SCALE = D**-0.5
TOLERANCE = {"float32": 2e-5, "bfloat16": 1.6e-2}
Array = np.ndarray[Any, Any]
Call = Callable[[], object]


def operands(batch: int, context: int, new: int, pool: str, dtype: str) -> list[Array | None]:
    """Rows whose last `new` of `context` tokens ask; a pool of no more pages than they need."""
    rng = np.random.default_rng(0)
    pages = batch * -(-context // S)
    shape = (pages, 2, 1, S, K, D)
    scales = None
    if pool == "int8":
        few = quantize(rng.standard_normal((1, *shape[1:]), dtype=np.float32), "int8", 1)
        kv, scales = (np.repeat(part, pages, 0) for part in (few[0].astype(np.int8), few[1]))
    else:
        kv = np.empty(shape, DTYPES[pool].numpy)
        for page in kv:
            page[:] = rng.standard_normal(shape[1:], dtype=np.float32)
    q = rng.standard_normal((batch * new, N, D), dtype=np.float32).astype(DTYPES[dtype].numpy)
    offsets, cached = np.arange(batch + 1) * new, np.full(batch, context - new)
    table = rng.permutation(pages).reshape(batch, -1)
    index = [a.astype(np.int32) for a in (offsets, cached, table, np.array([[new, context]]))]
    return [q, kv, *index, scales, None]


def check(pool: str, dtype: str) -> float:
    """Largest error against the reference, relative to the largest output; refuses a wrong one."""
    arrays = operands(2, 700, 3, pool, dtype)
    want = PAGED_ATTENTION.reference(*arrays, layer=0, scale=SCALE).astype(np.float32)
    got = native.run(PAGED_ATTENTION, *arrays, layer=0, scale=SCALE).astype(np.float32)
    error = float(np.abs(got - want).max() / (1 + np.abs(want).max()))
    if not error <= TOLERANCE[dtype]:
        raise SystemExit(f"{pool} {dtype}: error {error:.2g}, tolerance {TOLERANCE[dtype]}")
    return error


def baseline(batch: int, context: int, new: int, dtype: str) -> Call:
    """torch's SDPA on dense K and V of the activations' dtype."""
    kind = getattr(torch, dtype)
    q = torch.randn(batch, N, new, D).to(kind)
    k, v = (torch.randn(batch, K, context, D).to(kind) for _ in range(2))
    mask = torch.ones(new, context, dtype=torch.bool).tril(context - new) if new > 1 else None

    def run() -> object:
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True
        )

    return run


def in_turns(calls: dict[str, Call], threads: int, repeats: int) -> dict[str, list[float]]:
    """Seconds of each call."""
    clock = time.thread_time if threads == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = clock()
            call()
            times[name].append(clock() - start)
    return {name: seconds[1:] for name, seconds in times.items()}


def decode(batch: int, context: int, pool: str, dtype: str, threads: int) -> None:
    arrays = operands(batch, context, 1, pool, dtype)
    size = sum(a.nbytes for a in (arrays[1], arrays[6]) if a is not None)
    with ThreadPoolExecutor(threads) as workers:
        times = in_turns(
            {
                "ours": lambda: native.run(PAGED_ATTENTION, *arrays, layer=0, scale=SCALE),
                "read": reader(size, threads, workers),
            },
            threads,
            repeats := max(6, min(40, int(1e9 / size))),
        )
    times |= in_turns({"sdpa": baseline(batch, context, 1, dtype)}, threads, min(10, repeats))
    ours, read, sdpa = (statistics.median(times[name]) for name in ("ours", "read", "sdpa"))
    best = min(times["ours"])
    print(
        f"decode  {threads} thr  batch {batch} x {context:5}  pool {pool:8} q {dtype:8} "
        f"{ours * 1e3:8.3f} ms  {size / ours / 1e9:5.1f} GB/s (best {size / best / 1e9:5.1f})  "
        f"limit {size / read / 1e9:5.1f}: {read / ours:4.0%}   SDPA {sdpa * 1e3:8.3f} ms",
        flush=True,
    )


def prefill(new: int, pool: str, dtype: str, threads: int) -> None:
    arrays = operands(1, new, new, pool, dtype)
    times = in_turns(
        {
            "ours": lambda: native.run(PAGED_ATTENTION, *arrays, layer=0, scale=SCALE),
            "sdpa": baseline(1, new, new, dtype),
        },
        threads,
        6,
    )
    flops = 4 * N * D * new * (new + 1) / 2
    ours, sdpa = (statistics.median(times[name]) for name in ("ours", "sdpa"))
    print(
        f"prefill {threads} thr  {new} tokens  pool {pool:8} q {dtype:8} {ours * 1e3:8.2f} ms  "
        f"{flops / ours / 1e9:5.0f} GFLOP/s   SDPA {sdpa * 1e3:8.2f} ms",
        flush=True,
    )


def main() -> None:
    if len(sys.argv) > 1:
        os.environ["KVGRAPH_CPU_ISA"] = sys.argv[1]
    kinds = [("bfloat16", "bfloat16"), ("float32", "float32"), ("int8", "bfloat16")]
    for pool, dtype in kinds:
        print(f"reference check, pool {pool}, q {dtype}: error {check(pool, dtype):.1e}")
    for threads in sorted({1, len(os.sched_getaffinity(0))}):
        native.set_num_threads(threads)
        torch.set_num_threads(threads)
        for pool, dtype in kinds:
            for batch in (1, 8):
                for context in (512, 4096, 16384):
                    decode(batch, context, pool, dtype, threads)
            prefill(1024, pool, dtype, threads)


if __name__ == "__main__":
    main()
