"""Products with experts and small weights on GPUs, without one: `python -m benchmarks.products`.

What a profiler would count for one row, from the PTX of the compiled kernels, executed on a CPU:
bytes of weights that are read, over those that the row needs; sectors of 32 bytes that requests
touch, over the fewest; passes of shared memory, over those without bank conflicts. And what the
tiles of few and of many rows take of a multiprocessor.

Layers: the experts of Qwen3-30B-A3B (8 of 128 experts of 768 inner features, 2,048 inputs), and q,
k and v of Llama-3-8B (4,096 inputs, 6,144 columns), in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from kvgraph import ptx
from kvgraph.errors import KernelError
from kvgraph.kernels import aot
from kvgraph.kernels.aot import Compiled
from kvgraph.kernels.experts_plan import ExpertsShape
from kvgraph.kernels.linear_plan import LinearShape, roles_of
from kvgraph.kernels.matrix_tiles import ROLES
from kvgraph.kernels.matrix_trials import experts_trial, linear_trial
from kvgraph.kernels.run_ptx import run_plan
from kvgraph.kernels.trials import Trial
from kvgraph.kernels.variants import Variant
from kvgraph.ops.packed import E2M1, E4M3, Form

QWEN3_30B = ExpertsShape("bfloat16", Form(0), Form(0), 128, 8, 2048, 768)
LLAMA_8B = LinearShape("bfloat16", Form(8), 4096, (4096, 1024, 1024))
ARCHS = ("sm_80", "sm_90", "sm_120")
WEIGHTS = ("up", "down", "weight")


def steps(arch: str) -> Iterator[tuple[str, dict[str, Trial]]]:
    """A layer, and its steps by the role of their tiles: one row, the rest of a tile is empty."""
    for bits in (0, 8, 4):
        yield f"experts, {bits or 16} bits", _of_experts(Form(bits), arch)
    for bits in (8, 4):
        yield f"q, k, v, {bits} bits", _of_linear(replace(LLAMA_8B, form=Form(bits)), arch)
    yield "experts, MXFP4", _of_experts(Form(4, 32, E2M1), arch)
    yield "q, k, v, FP8", _of_linear(replace(LLAMA_8B, form=Form(8, 128, E4M3)), arch)


def _of_experts(form: Form, arch: str) -> dict[str, Trial]:
    shape = replace(QWEN3_30B, up=form, down=form)
    return {role: experts_trial(shape, arch, role, rows=1) for role in ROLES}


def _of_linear(shape: LinearShape, arch: str) -> dict[str, Trial]:
    return {role: linear_trial(shape, arch, role, rows=1) for role in roles_of(shape, arch)}


def compiled(trial: Trial, arch: str) -> dict[Variant, Compiled]:
    distinct = dict.fromkeys(one.variant for one in trial.plan.launches)
    return {variant: aot.compile_variant(variant, arch) for variant in distinct}


def counted(trial: Trial, made: dict[Variant, Compiled]) -> tuple[float, float, float]:
    """Weights read over those needed, sectors, conflicts. KernelError where it computes wrong."""

    def kernel(variant: Variant) -> tuple[ptx.Kernel, int]:
        one = made[variant]
        return ptx.parse(one.ptx).kernels[one.entry], one.resources.shared

    did = run_plan(trial.plan, trial.given, kernel, checks=False, profile=True)
    where, error, limit = trial.error()
    if error > limit:
        raise KernelError(f"{where}: expected an error of at most {limit}, got {error}")
    read = sum(c.global_reads[n].bytes for c in did for n in WEIGHTS if n in c.global_reads)
    experts = int((trial.given["indices"] >= 0).sum()) if "indices" in trial.given else 0
    needed = 0
    for name in WEIGHTS:
        if name in trial.given:
            held = trial.given[name]
            needed += held.nbytes * experts // len(held) if experts else held.nbytes
    traffic = [t for c in did for t in (*c.global_reads.values(), *c.global_writes.values())]
    sectors = sum(t.sectors for t in traffic) / sum(t.ideal for t in traffic)
    ways = sum(c.wavefronts for c in did) / max(sum(c.ideal_wavefronts for c in did), 1)
    return read / needed, sectors, ways


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("archs", nargs="*", default=ARCHS)
    print(
        "arch    layer               weights   sectors  conflicts   registers and shared KiB     s"
    )
    for arch in parser.parse_args().archs:
        for layer, by_role in steps(arch):
            start = time.perf_counter()
            made = {role: compiled(trial, arch) for role, trial in by_role.items()}
            weights, sectors, ways = counted(by_role["few"], made["few"])
            taken = []
            for role, kernels in made.items():
                used = [one.resources for v, one in kernels.items() if v.role]
                registers, shared = max(u.registers for u in used), max(u.shared for u in used)
                taken.append(f"{role} {registers}, {shared / 1024:.0f}")
            print(
                f"{arch:7} {layer:18} {weights:8.3f} {sectors:9.3f} {ways:10.3f}   "
                f"{'; '.join(taken):26} {time.perf_counter() - start:5.1f}",
                flush=True,
            )
    print("All launches computed what the NumPy reference does.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
