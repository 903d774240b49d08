"""The conformance matrix on the Triton kernels: interpreted on a CPU, compiled on a GPU.

TRITON_INTERPRET=1 python -m tests.support.matrix [--slim] [PART_OF_A_CASE_ID ...]
python -m tests.support.matrix --device cuda --arch sm_90
python -m tests.support.matrix --compile FOLDER --arch sm_90      # needs no GPU
python -m tests.support.matrix --device cuda --kernels FOLDER     # needs no Triton

A process of its own: one process cannot both interpret kernels and compile them. `--kernels` runs
cubins by the launcher of sessions, without it Triton's just-in-time compiler does.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvgraph.compiler.targets.cuda import save_kernels
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels import aot, launch, variants
from kvgraph.kernels.run import run as run_by_triton
from kvgraph.kernels.shapes import AttentionShape, HeadNorm, PoolShape, Rope
from kvgraph.kernels.trials import Trial
from kvgraph.kernels.variants import Variant
from kvgraph.runtime.sessions.cuda_gpu import CudaGpu
from tests.support import conformance, matrix_products, routes
from tests.support.conformance import Case, Operands

Array = np.ndarray[Any, Any]
Run = Callable[[launch.LaunchPlan, Mapping[str, torch.Tensor]], None]

ROWS = (
    ("float32", 352, False, 0.0, True),
    ("bfloat16", 4096, True, 0.0, False),
    ("bfloat16", 4096, True, 0.0, True),
    ("float16", 80, True, 1.0, False),
    ("float16", 80, False, 0.0, True),
    ("bfloat16", 128, False, 1.0, False),
)
"""dtype, width, residual, weight_offset and round_first of norms; gates have the first two."""

FAR = AttentionShape(PoolShape("bfloat16", "bfloat16", 8, 128, 128, 1), 8, 0.1)
"""Of `check_far_pages`."""


def shape_of(case: Case) -> AttentionShape:
    cache = PoolShape(
        case.dtype,
        case.pool_dtype,
        case.kv_heads,
        case.head_dim,
        case.page_size,
        conformance.LAYERS,
        case.v_head_dim,
        case.granularity,
    )
    cache.check_granularity()
    rope = None if case.rope_style is None else Rope(case.rotary_dim, case.rope_style == 1)
    return AttentionShape(
        cache,
        case.heads,
        case.head_dim**-0.5,
        case.window,
        case.softcap,
        bool(case.causal),
        case.sinks,
        rope,
        bool(case.chunked),
        None if case.norm is None else HeadNorm(conformance.EPSILON, case.norm),
    )


def plan_of(case: Case, operands: Operands, arch: str) -> launch.LaunchPlan:
    shape = shape_of(case)
    table, bounds = operands.inputs["lookup_table"], operands.inputs.get("max_lengths")
    assert table is not None
    new = [row[1] for row in case.rows]
    longest = max(new, default=0), max((a + b for a, b in case.rows), default=0)
    assert bounds is None or tuple(bounds[0]) == longest
    sizes = launch.Sizes(len(case.rows), sum(new), *longest, table.shape[1])
    if case.op == "store_kv":
        return launch.plan_store(shape, arch, sizes, case.layer)
    if case.op == "paged_attention":
        return launch.plan_attention(shape, arch, sizes, case.layer)
    return launch.plan_update_and_attend(shape, arch, sizes, case.layer, stores=case.stores)


def tensor(array: Array, device: str) -> torch.Tensor:
    """Through integers, as torch takes no ml_dtypes. On the CPU it shares memory."""
    name = str(array.dtype)
    if name not in {"bfloat16", "float8_e4m3fn"}:
        return torch.from_numpy(array).to(device)
    raw = array.view({1: np.uint8, 2: np.int16}[array.itemsize])
    return torch.from_numpy(raw).view(getattr(torch, name)).to(device)


def array(t: torch.Tensor, dtype: str) -> Array:
    raw = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[t.element_size()]
    return t.cpu().view(raw).numpy().view(DTYPES[dtype].numpy)


def norm_and_gate(
    dtype: str, width: int, residual: bool, offset: float, round_first: bool
) -> tuple[Variant, Variant]:
    """Of one of ROWS; gate and up are halves of one tensor."""
    norm = variants.rms_norm_variant(
        dtype, width, 1e-5, residual=residual, weight_offset=offset, round_first=round_first
    )
    strides = {"gate_stride": 2 * width, "up_stride": 2 * width}
    return norm, variants.silu_mul_variant(dtype, width, **strides)


def variants_of(cases: Iterable[Case], arch: str) -> list[Variant]:
    """All that the cases launch."""
    plans = [plan_of(case, conformance.build(case), arch) for case in cases]
    return [one.variant for plan in plans for one in plan.launches]


def variants_of_checks(arch: str) -> list[Variant]:
    plans = [trial.plan for _, trial in trials_of(arch)]
    found = [one.variant for plan in plans for one in plan.launches]
    found += [variant for row in ROWS for variant in norm_and_gate(*row)]
    return [*found, variants.increment_variant(), *aot.all_attention_variants(FAR, arch)]


def run_case(case: Case, arch: str, device: str, run: Run = run_by_triton) -> None:
    operands = conformance.build(case)
    given = {n: tensor(a, device) for n, a in operands.inputs.items() if a is not None}
    out = None
    if case.op != "store_kv":
        total, v_dim = sum(row[1] for row in case.rows), case.v_head_dim or case.head_dim
        out = torch.full((total, case.heads, v_dim), torch.nan, dtype=getattr(torch, case.dtype))
        given["out"] = out = out.to(device)
    run(plan_of(case, operands, arch), given)
    for name in operands.spec.mutated & given.keys():
        before = operands.inputs[name]
        assert before is not None
        operands.inputs[name] = array(given[name], str(before.dtype))
    conformance.check(case, None if out is None else array(out, case.dtype), operands)


def slim() -> list[Case]:
    """Every fourth of the paired cases, and the single ones but for the largest."""
    paired = [c for c in conformance.cases() if c.label in conformance.LENGTHS]
    single = [c for c in conformance.cases() if c.label not in conformance.LENGTHS]
    large = ("many", "llama-8b")
    return paired[::4] + [c for c in single if c.label not in large and c.page_size != 3]


def check_rows(device: str, run: Run) -> None:
    """rms_norm, silu_mul and increment_cache_lengths against NumPy."""
    rng = np.random.default_rng(0)
    for row in ROWS:
        dtype, width, residual, offset, round_first = row
        norm, gate = norm_and_gate(*row)
        rows, kind = 37, DTYPES[dtype].numpy
        x, r, up = (rng.standard_normal((rows, width)).astype(kind) for _ in range(3))
        weight = rng.standard_normal(width).astype(kind)
        tolerance = conformance.TOLERANCE[dtype]

        y = (x.astype("f4") + r.astype("f4")).astype(kind) if residual else x
        rate = 1 / np.sqrt(np.mean(y.astype("f4") ** 2, -1, keepdims=True) + 1e-5)
        normal = y.astype("f4") * rate
        normal = normal.astype(kind).astype("f4") if round_first else normal
        want = normal * (offset + weight.astype("f4"))
        given = {n: tensor(a.copy(), device) for n, a in (("x", x), ("residual", r))}
        given |= {"weight": tensor(weight, device), "out": torch.empty_like(given["x"])}
        run(launch.plan_rms_norm(norm, rows), given)
        _close(array(given["out"], dtype), want, tolerance)
        _rounded_alike(array(given["out"], dtype), want)
        assert array(given["residual"], dtype).tobytes() == (y if residual else r).tobytes()

        pair = np.concatenate([x, up], -1)
        given = {"gate": tensor(pair, device), "out": torch.empty_like(given["out"])}
        given["up"] = given["gate"][:, width:]
        run(launch.plan_silu_mul(gate, rows), given)
        wide = x.astype("f4")
        want = (wide / (1 + np.exp(-wide))).astype(kind).astype("f4") * up.astype("f4")
        _close(array(given["out"], dtype), want, tolerance)
        _rounded_alike(array(given["out"], dtype), want)

    lengths, new = (rng.integers(0, 90, 700).astype(np.int32) for _ in range(2))
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    given = {
        "cache_lengths": tensor(lengths.copy(), device),
        "input_row_offsets": tensor(offsets, device),
    }
    run(launch.plan_increment(700), given)
    assert (given["cache_lengths"].cpu().numpy() == lengths + new).all()


def trials_of(arch: str) -> Iterator[tuple[str, Trial]]:
    """Matrix products with both kinds of tiles, and routers."""
    yield from matrix_products.trials(arch)
    yield from routes.trials()


def run_trial(trial: Trial, device: str, run: Run) -> dict[str, torch.Tensor]:
    """The trial gets its results; its operands on the device are returned."""
    given = {key: tensor(a, device) for key, a in trial.given.items()}
    run(trial.plan, given)
    for out in trial.wanted:
        trial.given[out] = array(given[out], str(trial.given[out].dtype))
    return given


def check_trials(arch: str, device: str, run: Run) -> None:
    """Against the references of their ops."""
    for name, trial in trials_of(arch):
        run_trial(trial, device, run)
        where, error, limit = trial.error()
        assert error <= limit, f"{name}: {where} {error:.2g}"


def _close(got: Array, want: Array, tolerance: float) -> None:
    error = np.abs(got.astype("f4") - want).max()
    assert error <= tolerance * (1 + np.abs(want).max()), f"largest error {error:.3g}"


def _rounded_alike(got: Array, want: Array) -> None:
    """Halves are rounded where the reference rounds: a rare tie may fall the other way, no more.

    One rounding more or less changes a quarter of the elements.
    """
    if got.dtype != np.float32:
        same = float((got == want.astype(got.dtype)).mean())
        assert same >= 0.98, f"{same:.1%} of the elements are rounded as the reference is"


def check_far_pages(arch: str, device: str, run: Run) -> None:
    """Page ids past 2^31 elements; on a CPU the pool is sparse, so untouched pages cost nothing."""
    S, K, D = FAR.cache.page_size, FAR.cache.kv_heads, FAR.cache.head_dim
    slots = 2**31 // (2 * S * K * D) + 40
    pool = tensor(np.zeros((slots, 2, 1, S, K, D), DTYPES["bfloat16"].numpy), device)
    table = np.array([[slots - 2, 3], [slots - 7, slots - 3]], np.int32)
    rng = np.random.default_rng(0)
    kind = DTYPES["bfloat16"].numpy
    q, k, v = (rng.standard_normal((20, K, D)).astype(kind) for _ in range(3))
    cached, offsets = np.array([115, 0], np.int32), np.array([0, 14, 20], np.int32)
    small = np.zeros((4, 2, 1, S, K, D), kind)
    near = np.array([[2, 3], [0, 1]], np.int32)
    bounds = np.array([[14, 129]], np.int32)
    reference = conformance.UPDATE_AND_ATTEND.reference
    want = reference(q, small, offsets, cached, near, bounds, k, v, layer=0, scale=FAR.scale)
    values = {
        "q": q,
        "k": k,
        "v": v,
        "input_row_offsets": offsets,
        "cache_lengths": cached,
        "lookup_table": table,
    }
    given = {name: tensor(a, device) for name, a in values.items()} | {"kv_blocks": pool}
    given["out"] = torch.empty_like(given["q"])
    sizes = launch.Sizes(2, 20, 14, 129, 2)
    run(launch.plan_update_and_attend(FAR, arch, sizes, 0), given)
    _close(array(given["out"], "bfloat16"), want.astype("f4"), conformance.TOLERANCE["bfloat16"])
    for far, close in zip(table.flat, (2, 3, 0, 1), strict=True):
        assert array(pool[int(far)], "bfloat16").tobytes() == small[close].tobytes()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--slim", action="store_true")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--compile", type=Path, help="the kernels of the cases into this folder")
    parser.add_argument("--kernels", type=Path, help="a folder that --compile wrote")
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    cases = slim() if given.slim else list(conformance.cases())
    cases = [c for c in cases if not given.cases or any(text in c.id for text in given.cases)]
    if given.compile:
        used = variants_of(cases, given.arch)
        used += [] if given.cases else variants_of_checks(given.arch)
        made = aot.compile_all(used, given.arch)
        save_kernels(made, given.arch, given.compile)
        print(f"{len(made)} kernels for {given.arch}")
        return 0
    run = run_by_triton
    if given.kernels:
        assert given.device == "cuda", "cubins run on a GPU: --device cuda"
        run = CudaGpu(given.kernels).launch
    elif given.device == "cpu":
        assert os.environ.get("TRITON_INTERPRET") == "1"
        from tests.support.interpreter import mend

        mend()
        np.seterr(over="ignore")  # exp2 of a large capped score is infinite on purpose
    failed, start = 0, time.perf_counter()
    for case in cases:
        began = time.perf_counter()
        try:
            run_case(case, given.arch, given.device, run)
        except Exception as error:
            failed += 1
            print(f"FAILED {case.id}: {type(error).__name__}: {error}"[:400], flush=True)
            if given.verbose:
                traceback.print_exc()
        else:
            if given.verbose:
                print(f"ok     {case.id} {time.perf_counter() - began:.2f} s", flush=True)
    if not given.cases:
        check_rows(given.device, run)
        check_far_pages(given.arch, given.device, run)
        check_trials(given.arch, given.device, run)
    print(
        f"{len(cases) - failed} of {len(cases)} cases passed, {given.arch} tiles, "
        f"{time.perf_counter() - start:.1f} s"
    )
    return 1 if failed or not cases else 0


if __name__ == "__main__":
    sys.exit(main())
