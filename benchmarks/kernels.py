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

import numpy as np

from kvgraph import ptx
from kvgraph.errors import KernelError
from kvgraph.kernels import aot
from kvgraph.kernels.shapes import AttentionShape, CacheShape
from kvgraph.kernels.trials import Rows, Trial, attention_trial
from kvgraph.ptx import Counters

CONTEXT, CHUNK, ROWS = 4096, 512, 4
PROMPT, MULTIPROCESSORS, GRID_HEADS = 2048, 132, 8
HEADS, KV_HEADS, HEAD_DIM = 4, 1, 128
ARCHS = ("sm_75", "sm_80", "sm_89", "sm_90", "sm_120")


def shape_of(arch: str) -> AttentionShape:
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    cache = CacheShape(dtype, dtype, KV_HEADS, HEAD_DIM, 128, 1)
    return AttentionShape(cache, HEADS, HEAD_DIM**-0.5)


def work_of_blocks(arch: str) -> list[int]:
    """Warp instructions of each block of the prompt's prefill, in the order of the grid: counted of
    every eighth, and between them on a line, as each block sees one tile's keys more."""
    trial = attention_trial(shape_of(arch), arch, "bench", ((0, PROMPT),), multiprocessors=1)
    memory = ptx.Memory()
    addresses = {name: memory.add(array, name) for name, array in trial.given.items()}
    one = next(one for one in trial.plan.launches if one.variant.role == "prefill")
    compiled = aot.compile_variant(one.variant, arch)
    given = [addresses[a] if isinstance(a, str) else a for a in one.arguments]
    kernel = ptx.parse(compiled.ptx).kernels[compiled.entry]
    counted: dict[int, int] = {}
    for block in {*range(0, one.grid[0], 8), one.grid[0] - 1}:
        counters = ptx.run(
            kernel,
            memory,
            grid=(*one.grid, 1),
            threads=32 * one.variant.num_warps,
            arguments=[*given, 0, 0],
            shared=compiled.resources.shared,
            checks=False,
            blocks=[(block, 0, 0)],
        )
        counted[block] = sum(counters.instructions.values())
    at = sorted(counted)
    return [int(w) for w in np.interp(range(one.grid[0]), at, [counted[b] for b in at])]


def balance(work: Sequence[int]) -> float:
    """Time until the last multiprocessor is done, over equal shares; one block at a time each."""
    busy = [0] * MULTIPROCESSORS
    for one in work:
        heapq.heapreplace(busy, busy[0] + one)
    return max(busy) / (sum(work) / MULTIPROCESSORS)


def counted(arch: str, rows: Rows) -> tuple[Trial, Counters]:
    """The attention's launch of one step, and what it did. KernelError where it computes wrong."""
    trial = attention_trial(shape_of(arch), arch, "bench", rows, multiprocessors=1)
    memory = ptx.Memory()
    scratch = {name: np.full(n, np.nan, np.float32) for name, n in trial.plan.scratch.items()}
    held = {**trial.given, **scratch}
    addresses = {name: memory.add(array, name) for name, array in held.items()}
    made: list[Counters] = []
    for one in trial.plan.launches:
        compiled = aot.compile_variant(one.variant, arch)
        given = [addresses[a] if isinstance(a, str) else a for a in one.arguments]
        made.append(
            ptx.run(
                ptx.parse(compiled.ptx).kernels[compiled.entry],
                memory,
                grid=(*one.grid, 1),
                threads=32 * one.variant.num_warps,
                arguments=[*given, 0, 0],
                shared=compiled.resources.shared,
                checks=False,
                profile=True,
            )
        )
    where, error, limit = trial.error()
    if error > limit:
        raise KernelError(f"{arch}: {where}: expected an error of at most {limit}, got {error}")
    return trial, max(made, key=lambda c: c.mma or sum(c.instructions.values()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archs", nargs="*", default=ARCHS)
    print("arch     K, V bytes   sectors   useful of mma   conflicts       balance       s")
    for arch in parser.parse_args().archs:
        start = time.perf_counter()
        _, decode = counted(arch, ((CONTEXT, 1),) * ROWS)
        pool = decode.global_reads["kv_blocks"]
        least = ROWS * (CONTEXT + 1) * KV_HEADS * HEAD_DIM * 2 * 2
        reads = decode.global_reads.values()
        sectors = sum(r.sectors for r in reads) / sum(r.ideal for r in reads)
        _, prefill = counted(arch, ((CONTEXT, CHUNK),))
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
