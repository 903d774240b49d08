"""Host cost of the cache's bookkeeping: `python -m benchmarks.kv [--json]`.

Method: one process, warm, garbage collector off, `time.perf_counter_ns`; page 128, 8 kv heads,
prefix caching on, requests without a common prefix. A decode step is `alloc_batch` +
`runtime_inputs` + `step` of the whole batch; `ctx.update` between them is not timed. Requests of a
batch sit at different offsets in their pages, so page edges, commits and hashing are spread over
the steps. Reported: median, and 99th percentile, of the steps. The pool is never touched.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
from collections.abc import Callable, Iterator
from time import perf_counter_ns

import numpy as np

from kvgraph.contract.params import KVCacheParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext

STEPS = 2000
WARM = 50
PAGE = 128
PARAMS = KVCacheParams(
    "bfloat16",
    n_kv_heads=8,
    head_dim=1,  # bookkeeping does not depend on the width of a head; this keeps the pool small
    num_layers=1,
    page_size=PAGE,
    enable_prefix_caching=True,
)
TARGETS = {
    "decode, batch 1": 30,
    "decode, batch 32": 60,
    "decode, batch 256": 150,
    "prefill alloc, 500 tokens, per request": 15,
    "hit lookup, 4000 tokens": 60,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="figures as JSON")
    as_json = parser.parse_args().json
    rows = dict(measure_all())
    print(json.dumps(rows, indent=2) if as_json else f"{__doc__.strip()}\n\n{table(rows)}")


def measure_all() -> Iterator[tuple[str, dict[str, float]]]:
    for batch in (1, 32, 256):
        yield f"decode, batch {batch}", decode(batch, 500)
    for batch in (1, 32, 256):
        yield f"decode, batch {batch}, 32000-token contexts", decode(batch, 32_000)
    yield "decode, batch 256, one request replaced per step", decode(256, 500, churn=True)
    yield "prefill alloc, 500 tokens, per request", prefill(500)
    yield "hit lookup, 4000 tokens", hit(4000)


def decode(batch: int, length: int, *, churn: bool = False) -> dict[str, float]:
    """Whole decode steps; with `churn` the oldest request is replaced between steps, untimed."""
    pages = batch * ((length + STEPS) // PAGE + 3)
    manager = PagedKVCacheManager(PARAMS, None, pages, max_batch_size=batch)
    contexts = [request(i, length + i % PAGE) for i in range(batch)]
    for ctx in contexts:
        manager.claim(ctx.request_id)
    spares = [request(batch + i, length) for i in range(2 * STEPS)] if churn else []

    def step() -> int:
        start = perf_counter_ns()
        manager.alloc_batch([contexts])
        manager.runtime_inputs([contexts])
        before = perf_counter_ns() - start
        for ctx in contexts:
            ctx.update(7)
        start = perf_counter_ns()
        manager.step([contexts])
        elapsed = before + perf_counter_ns() - start
        if spares:
            manager.release(contexts.pop(0).request_id)
            contexts.append(spares.pop())
            manager.claim(contexts[-1].request_id)
        return elapsed

    return sample(step, STEPS)


def prefill(length: int) -> dict[str, float]:
    """`alloc` of a claimed request that misses the cache, and evicts pages as it goes."""
    manager = PagedKVCacheManager(PARAMS, None, 4096, max_batch_size=1)
    requests = iter([request(i, length) for i in range(STEPS + WARM)])

    def step() -> int:
        ctx = next(requests)
        manager.claim(ctx.request_id)
        start = perf_counter_ns()
        manager.alloc(ctx)
        elapsed = perf_counter_ns() - start
        ctx.update(7)
        manager.step([ctx])
        manager.release(ctx.request_id)
        return elapsed

    return sample(step, STEPS)


def hit(length: int) -> dict[str, float]:
    """`alloc` of a claimed request whose full pages are all cached and free."""
    manager = PagedKVCacheManager(PARAMS, None, 4096, max_batch_size=1)
    tokens = request(0, length).tokens

    def step() -> int:
        ctx = TextContext("r", tokens)
        manager.claim("r")
        start = perf_counter_ns()
        manager.alloc(ctx)
        elapsed = perf_counter_ns() - start
        ctx.update(7)
        manager.step([ctx])
        manager.release("r")
        return elapsed

    result = sample(step, STEPS)
    assert manager.get_metrics_aggregated().cache_hit_rate > 0.9
    return result


def request(index: int, length: int) -> TextContext:
    return TextContext(f"r{index}", (np.arange(length) + index * 7919) % 32_000)


def sample(step: Callable[[], int], count: int) -> dict[str, float]:
    """Median and 99th percentile of `count` steps after warm-up, in microseconds."""
    for _ in range(WARM):
        step()
    gc.collect()
    gc.disable()
    times = sorted(step() for _ in range(count))
    gc.enable()
    return {"median_us": statistics.median(times) / 1e3, "p99_us": times[count * 99 // 100] / 1e3}


def table(rows: dict[str, dict[str, float]]) -> str:
    lines = ["| host cost | median us | p99 us | target us |", "|---|---|---|---|"]
    for name, row in rows.items():
        target = TARGETS.get(name, "")
        lines.append(f"| {name} | {row['median_us']:.1f} | {row['p99_us']:.1f} | {target} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
