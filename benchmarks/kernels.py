"""GPU kernels without a GPU: `python -m benchmarks.kernels [ARCH ...]`.

What a profiler would count, from the PTX of the compiled kernels, executed on a CPU:

  decode    4 rows behind 4,096 tokens: bytes of the pool that are read, over those of K and V; and
            sectors of 32 bytes that requests touch, over the fewest (a batch of 64 has more rows of
            the same)
  prefill   a chunk of 512 tokens behind 4,096: multiply-adds that the result needs, over those that
            matrix instructions do; passes of shared memory, over those without bank conflicts
  balance   a prompt of 2,048 tokens, 8 heads of keys: time until the last of 132 multiprocessors is
            done, over equal shares. Blocks start in the order of the grid; a block's time is its
            count of instructions. In brackets: in the opposite order

Heads are 128 wide, 4 queries for each kv head, pages of 128 tokens, bfloat16 (float16 on sm_75).
"""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Sequence
from functools import partial

import numpy as np

from kvgraph import ptx
from kvgraph.errors import KernelError
from kvgraph.kernels import aot
from kvgraph.kernels.run_ptx import PlanMemory, run_plan
from kvgraph.kernels.shapes import AttentionShape, PoolShape
from kvgraph.kernels.trials import Rows, attention_trial
from kvgraph.kernels.variants import Variant
from kvgraph.ptx import Counters

CONTEXT, CHUNK, ROWS = 4096, 512, 4
PROMPT, MULTIPROCESSORS, GRID_HEADS = 2048, 132, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 1, 128
ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_120")


def shape_of(arch: str) -> AttentionShape:
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    cache = PoolShape(dtype, dtype, KV_HEADS, HEAD_DIM, 128, 1)
    return AttentionShape(cache, HEADS, HEAD_DIM**-0.5)


def work_of_blocks(arch: str) -> list[int]:
    """Warp instructions of each block of the prompt's prefill, in the order of the grid: counted of
    every eighth, and between them on a line, as each block sees one tile's keys more."""
    trial = attention_trial(shape_of(arch), arch, "bench", ((0, PROMPT),), multiprocessors=1)
    memory = PlanMemory(trial.plan, trial.given)
    one = next(one for one in trial.plan.launches if one.variant.role == "prefill")
    kernel, shared = compiled(one.variant, arch)
    work: dict[int, int] = {}
    for block in (*range(0, one.grid[0] - 1, 8), one.grid[0] - 1):
        did = memory.run(one, kernel, shared, checks=False, blocks=[(block, 0, 0)])
        work[block] = sum(did.instructions.values())
    return [int(w) for w in np.interp(range(one.grid[0]), [*work], [*work.values()])]


def compiled(variant: Variant, arch: str) -> tuple[ptx.Kernel, int]:
    """The kernel, and its dynamic shared memory in bytes."""
    made = aot.compile_variant(variant, arch)
    return ptx.parse(made.ptx).kernels[made.entry], made.resources.shared


def balance(work: Sequence[int]) -> float:
    """Time until the last multiprocessor is done, over equal shares; one block at a time each."""
    busy = [0] * MULTIPROCESSORS
    for one in work:
        heapq.heapreplace(busy, busy[0] + one)
    return max(busy) / (sum(work) / MULTIPROCESSORS)


def counted(arch: str, rows: Rows) -> Counters:
    """What the attention's launch of one step did. KernelError where it computes wrong."""
    trial = attention_trial(shape_of(arch), arch, "bench", rows, multiprocessors=1)
    kernels = partial(compiled, arch=arch)
    made = run_plan(trial.plan, trial.given, kernels, checks=False, profile=True)
    where, error, limit = trial.error()
    if error > limit:
        raise KernelError(f"{arch}: {where}: expected an error of at most {limit}, got {error}")
    return max(made, key=lambda c: c.mma or sum(c.instructions.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archs", nargs="*", default=ARCHS)
    print("arch     K, V bytes   sectors   useful of mma   conflicts       balance       s")
    for arch in parser.parse_args().archs:
        start = time.perf_counter()
        decode = counted(arch, ((CONTEXT, 1),) * ROWS)
        pool = decode.global_reads["kv_blocks"]
        least = ROWS * (CONTEXT + 1) * KV_HEADS * HEAD_DIM * 2 * 2
        reads = decode.global_reads.values()
        sectors = sum(r.sectors for r in reads) / sum(r.ideal for r in reads)
        prefill = counted(arch, ((CONTEXT, CHUNK),))
        seen = sum(range(CONTEXT + 1, CONTEXT + CHUNK + 1))
        useful = f"{2 * seen * HEADS * HEAD_DIM / prefill.mma:.3f}" if prefill.mma else "no mma"
        ways = prefill.wavefronts / max(prefill.ideal_wavefronts, 1)
        work = [one for one in work_of_blocks(arch) for _ in range(GRID_HEADS)]
        even = f"{balance(work):.2f} ({balance(work[::-1]):.2f})"
        print(
            f"{arch:7} {pool.bytes / least:11.3f} {sectors:9.3f} {useful:>15} {ways:11.3f} "
            f"{even:>13} {time.perf_counter() - start:7.1f}",
            flush=True,
        )
    print("All launches of decode and prefill computed what the NumPy reference does.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
