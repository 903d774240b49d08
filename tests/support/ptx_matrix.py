"""The conformance matrix on the compiled kernels, executed as PTX on a CPU.

python -m tests.support.ptx_matrix [--jobs 2] [--slim] [--order SEED] [ARCH ...]

What ptxas is given runs in `kvgraph.ptx`, launched by the project's own plans. Compiled kernels
have no pages of 1 token: these cases get pages of 16. Others that they refuse are counted as such.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from kvgraph import ptx
from kvgraph.contract.dtypes import DTYPES
from kvgraph.errors import KernelError, KernelFaultError, UnsupportedError
from kvgraph.kernels import aot, launch, shapes, variants
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.run_ptx import run_plan
from kvgraph.kernels.variants import Variant
from kvgraph.ptx import Counters
from tests.support import conformance
from tests.support.conformance import Array, Case
from tests.support.matrix import plan_of, shape_of, slim

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")
ALIKE = ("sm_121",)
"""Architectures with the kernels of another one (sm_120), which run a part of the cases."""

REFUSED = ("tcgen05.", "bytes of shared memory, got")
"""What the machine does not model, and kernels that want more than an architecture has."""

ROWS = "rms_norm, silu_mul, increment_cache_lengths"


class Kernels:
    """Compiled once for all processes: PTX by variant and architecture, in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parsed: dict[str, tuple[ptx.Kernel, int]] = {}

    def get(self, variant: Variant, arch: str) -> tuple[ptx.Kernel, int]:
        """The kernel, and its dynamic shared memory in bytes."""
        key = hashlib.sha256(f"{variant!r} {arch}".encode()).hexdigest()
        if key not in self._parsed:
            path = self._folder / key
            if not path.exists():
                made = aot.compile_variant(variant, arch)
                text = f"{made.entry}\n{made.resources.shared}\n{made.ptx}"
                partial = path.with_suffix(f".{time.monotonic_ns()}")
                partial.write_text(text)
                partial.replace(path)
            entry, shared, text = path.read_text().split("\n", 2)
            self._parsed[key] = ptx.parse(text).kernels[entry], int(shared)
        return self._parsed[key]

    def run(
        self, plan: LaunchPlan, arch: str, arrays: Mapping[str, Array], *, order: int | None = None
    ) -> list[Counters]:
        """Launch in order, over arrays by parameter name, which are changed."""
        return run_plan(plan, arrays, lambda variant: self.get(variant, arch), order=order)


def run_case(kernels: Kernels, case: Case, arch: str, order: int | None = None) -> None:
    """UnsupportedError where no kernel is for the case; AssertionError where it computes wrong."""
    shape = shape_of(case)
    shape.check()
    shapes.check_arch(shape.cache, arch)
    operands = conformance.build(case)
    plan = plan_of(case, operands, arch)
    given = {n: np.ascontiguousarray(a) for n, a in operands.inputs.items() if a is not None}
    out = None
    if case.op != "store_kv":
        total, v_dim = sum(row[1] for row in case.rows), case.v_head_dim or case.head_dim
        out = np.full((total, case.heads, v_dim), np.nan, DTYPES[case.dtype].numpy)
        given["out"] = out
    kernels.run(plan, arch, given, order=order)
    for name in operands.spec.mutated & given.keys():
        operands.inputs[name] = given[name]
    conformance.check(case, out, operands)


def check_rows(kernels: Kernels, arch: str, order: int | None = None) -> None:
    """rms_norm with a residual, silu_mul and increment_cache_lengths against NumPy."""
    rng = np.random.default_rng(0)
    dtype = "float16" if arch == "sm_75" else "bfloat16"
    kind, width, rows = DTYPES[dtype].numpy, 352, 19
    halves = rng.standard_normal((rows, 2 * width)).astype(kind)
    x, residual, up = (rng.standard_normal((rows, width)).astype(kind) for _ in range(3))
    weight = rng.standard_normal(width).astype(kind)
    total = (x.astype("f4") + residual.astype("f4")).astype(kind)
    rate = 1 / np.sqrt(np.mean(total.astype("f4") ** 2, -1, keepdims=True) + 1e-5)
    given = {"x": x, "residual": residual, "weight": weight, "out": np.zeros_like(x)}
    variant = variants.rms_norm_variant(dtype, width, 1e-5, residual=True, round_first=False)
    kernels.run(launch.plan_rms_norm(variant, rows), arch, given, order=order)
    want = total.astype("f4") * rate * weight.astype("f4")
    tolerance = conformance.TOLERANCE[dtype]
    assert np.abs(given["out"].astype("f4") - want).max() <= tolerance * (1 + np.abs(want).max())
    assert (given["residual"] == total).all()

    given = {"x": halves, "weight": weight, "out": np.zeros_like(x)}
    variant = variants.rms_norm_variant(dtype, width, 1e-5, x_stride=2 * width)
    kernels.run(launch.plan_rms_norm(variant, rows), arch, given, order=order)
    part = halves[:, :width].astype("f4")
    want = part / np.sqrt(np.mean(part**2, -1, keepdims=True) + 1e-5) * weight.astype("f4")
    assert np.abs(given["out"].astype("f4") - want).max() <= tolerance * (1 + np.abs(want).max())

    given = {"gate": x, "up": up, "out": np.zeros_like(x)}
    variant = variants.silu_mul_variant(dtype, width)
    kernels.run(launch.plan_silu_mul(variant, rows), arch, given, order=order)
    wide = x.astype("f4")
    want = (wide / (1 + np.exp(-wide))).astype(kind).astype("f4") * up.astype("f4")
    assert np.abs(given["out"].astype("f4") - want).max() <= tolerance * (1 + np.abs(want).max())

    lengths, new = (rng.integers(0, 90, 700).astype(np.int32) for _ in range(2))
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    given = {"cache_lengths": lengths.copy(), "input_row_offsets": offsets}
    kernels.run(launch.plan_increment(700), arch, given, order=order)
    assert (given["cache_lengths"] == lengths + new).all()


def _judge(task: tuple[Path, Case | None, str, int | None]) -> tuple[str, str, str]:
    """Verdict ("passed", "refused", "failed"), what it is of, and why."""
    folder, case, arch, order = task
    what = f"{arch} {ROWS if case is None else case.id}"
    kernels = _KERNELS.setdefault(folder, Kernels(folder))
    try:
        if case is None:
            check_rows(kernels, arch, order)
        else:
            run_case(kernels, case, arch, order)
    except UnsupportedError as why:
        return "refused", what, str(why)
    except (KernelError, AssertionError) as why:
        is_known = not isinstance(why, KernelFaultError) and any(x in str(why) for x in REFUSED)
        return "refused" if is_known else "failed", what, str(why)
    return "passed", what, ""


_KERNELS: dict[Path, Kernels] = {}


def judged(
    archs: list[str], cases: list[Case], folder: Path, jobs: int, order: int | None
) -> Iterator[tuple[str, str, str]]:
    """Verdicts of all cases, as they come; those of one variant one after the other."""
    few = [case for case in cases if case in slim()]
    tasks = [
        (folder, case, arch, order)
        for arch in archs
        for case in [*(few if arch in ALIKE else cases), None]
    ]
    clean = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(jobs, mp_context=clean) as pool:
        yield from pool.map(_judge, tasks, chunksize=4)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--slim", action="store_true")
    parser.add_argument("--order", type=int)
    parser.add_argument("archs", nargs="*", default=ARCHS)
    given = parser.parse_args()
    cases = slim() if given.slim else list(conformance.cases())
    cases = [replace(case, page_size=16) if case.page_size == 1 else case for case in cases]
    counts: dict[str, Counter[str]] = {arch: Counter() for arch in given.archs}
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for verdict, what, why in judged(
            list(given.archs), cases, Path(folder), given.jobs, given.order
        ):
            counts[what.split(" ")[0]][verdict] += 1
            if verdict == "failed":
                print(f"{verdict} {what}: {why}"[:300], flush=True)
    for arch, found in counts.items():
        print(f"{arch:7} " + ", ".join(f"{found[v]} {v}" for v in ("passed", "failed", "refused")))
    total = sum(counts.values(), Counter[str]())
    seconds = time.perf_counter() - start
    print(f"{total['passed']} cases passed, {total['failed']} failed, {seconds:.0f} s")
    return int(total["failed"] > 0 or not total["passed"])


if __name__ == "__main__":
    sys.exit(main())
