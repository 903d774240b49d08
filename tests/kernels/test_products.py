"""Kernels of matrix products: plans, what compilers make of them, and their results as PTX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
pytest.importorskip("torch", reason="the matrix is also that of Triton's interpreter")

from kvgraph.errors import UnsupportedError
from kvgraph.kernels import aot, experts_plan
from kvgraph.kernels.experts_plan import experts_variants, plan_experts
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.linear_plan import LinearShape, linear_variants, plan_linear, roles_of
from kvgraph.kernels.matrix_tiles import ROLES, multiply_bytes
from kvgraph.kernels.matrix_trials import experts_trial
from kvgraph.kernels.run_ptx import PlanMemory, run_plan
from kvgraph.kernels.variants import Variant
from kvgraph.ops.packed import E2M1, E4M3, INT8, Form
from tests.kernels.table import TENSOR_CORES, instructions
from tests.support.matrix_products import (
    EXPERTS,
    GPT_OSS,
    LLAMA_8B,
    PLAIN,
    QWEN3_30B,
    SHAPES,
    Shape,
    experts,
    has_groups,
    in_form,
    name_of,
    trials_of,
)
from tests.support.ptx_matrix import Kernels

ARCHS = {"sm_80": "mma.sync", "sm_90": "wgmma.mma_async", "sm_100": "tcgen05.mma",
         "sm_120": "mma.sync"}  # fmt: skip
"""Architecture -> its instruction of matrix products."""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


# ---- plans


@settings(max_examples=200)
@given(
    slots=st.lists(st.integers(0, 11), min_size=1, max_size=90),
    block=st.sampled_from([16, 32, 64]),
)
def test_tiles_are_never_more_than_their_table_holds(slots: list[int], block: int) -> None:
    counts = np.bincount(slots, minlength=12)
    needed = int((-(-counts // block)).sum())
    assert needed <= experts_plan.most_tiles(len(slots), 12, block)


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    def grid(rows: int) -> tuple[str, tuple[int, int]]:
        up = plan_experts(QWEN3_30B, "sm_90", rows).launches[2]
        return up.variant.role, up.grid

    assert grid(1) == ("few", (8, 24))
    assert grid(256) == ("few", (128 + (2048 - 128) // 16, 24))
    assert grid(257) == ("many", (128 + (2056 - 128) // 64, 12))
    assert plan_experts(QWEN3_30B, "sm_90", 0) == LaunchPlan()


def test_a_plan_launches_what_is_compiled_and_says_what_scratch_holds() -> None:
    plan = plan_experts(QWEN3_30B, "sm_90", 3)
    known = {variant.name for variant in experts_variants(QWEN3_30B, "sm_90")}
    assert {one.variant.name for one in plan.launches} <= known
    assert plan.scratch == {"order": 24, "offsets": 129, "tiles": 24 * 3, "inner": 24 * 768,
                            "parts": 24 * 2048}  # fmt: skip
    dtypes = plan.scratch_dtypes()
    assert (dtypes["order"], dtypes["inner"], dtypes["parts"]) == ("int32", "bfloat16", "bfloat16")


def test_more_experts_than_a_program_holds_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"experts: expected at most 1024 .*, got 1025"):
        experts_variants(replace(QWEN3_30B, experts=1025), "sm_90")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("bits", [8, 4])
def test_layers_that_no_grid_holds_are_refused(arch: str, bits: int) -> None:
    wide = LinearShape("bfloat16", Form(bits), 256, (1 << 24, 0, 0))
    text = "quantized_linear: expected a layer of at most {} on cuda, got {}; split the layer"
    for planned in (linear_variants, partial(plan_linear, rows=1)):
        with pytest.raises(UnsupportedError, match=text.format(r"\d+ columns", 1 << 24)):
            planned(wide, arch)
    deep = LinearShape("bfloat16", Form(bits), 1 << 24, (256, 0, 0))
    with pytest.raises(UnsupportedError, match=text.format(r"\d+ inputs", 1 << 24)):
        linear_variants(deep, arch)
    for name in ("in_features", "inner_features"):
        large = replace(QWEN3_30B, **{name: 1 << 24})
        with pytest.raises(UnsupportedError, match=r"experts: expected a layer of .* columns on"):
            experts_variants(large, arch)


def test_the_most_columns_of_a_grid_are_planned() -> None:
    most = LinearShape("bfloat16", Form(8), 4096, (65535 * 32, 0, 0))
    (launch,) = plan_linear(most, "sm_90", 1).launches
    assert launch.grid == (1, 65535)


def test_tiles_of_linear_layers_grow_with_the_rows() -> None:
    def grids(layer: str, rows: int, arch: str = "sm_90") -> list[tuple[str, tuple[int, int]]]:
        plan = plan_linear(LLAMA_8B[layer], arch, rows)
        assert {one.variant.name for one in plan.launches} <= {
            variant.name for variant in linear_variants(LLAMA_8B[layer], arch)
        }
        return [(one.variant.role, one.grid) for one in plan.launches]

    assert grids("down", 0) == []
    assert grids("q, k and v", 1) == grids("q, k and v", 16) == [("few", (1, 6144 // 32))]
    assert grids("gate and up", 17) == [("rows32", (1, 28672 // 64))]
    assert grids("gate and up", 33) == grids("gate and up", 64) == [("rows64", (1, 28672 // 64))]
    assert grids("gate and up", 129) == [("rows128", (2, 28672 // 64))]
    assert grids("gate and up", 17, "sm_80") == [("many", (1, 28672 // 128))]


def test_layers_of_few_columns_are_summed_in_parts() -> None:
    """All multiprocessors have a tile; many rows give them one without."""

    def parts(layer: str, rows: int) -> tuple[str, int]:
        plan = plan_linear(LLAMA_8B[layer], "sm_90", rows)
        first, *others = plan.launches
        columns, split = LLAMA_8B[layer].columns, first.grid[1] // (LLAMA_8B[layer].columns // 64)
        assert bool(others) == (split > 1)
        assert plan.scratch == ({"sums": split * rows * columns} if others else {})
        return first.variant.role, split

    assert parts("q, k and v", 64) == ("rows64_split", 3)
    assert parts("down", 64) == ("rows64_split", 4)
    assert parts("down", 128) == ("rows128_split", 4)
    assert parts("down", 256) == ("rows128_split", 2)
    assert parts("down", 384) == ("rows128", 1)
    assert parts("q, k and v", 256) == ("rows128", 1)
    assert roles_of(LLAMA_8B["down"], "sm_90") == (
        "few", "rows32_split", "rows64_split", "rows128_split", "rows128",
    )  # fmt: skip
    assert roles_of(LLAMA_8B["gate and up"], "sm_90") == ("few", "rows32", "rows64", "rows128")
    assert roles_of(LLAMA_8B["down"], "sm_80") == ("few", "many")
    short = replace(LLAMA_8B["down"], in_features=384)
    assert roles_of(short, "sm_90") == ("few", "rows32", "rows64", "rows128"), "nothing to split"


# ---- what is compiled


def variants_of(shape: Shape, arch: str) -> tuple[Variant, ...]:
    if isinstance(shape, LinearShape):
        return tuple(v for v in linear_variants(shape, arch) if v.role)
    return tuple(v for v in experts_variants(shape, arch) if v.role)


def instruction_of(variant: Variant, arch: str) -> str:
    """Warps that sum slices of their own multiply each for itself."""
    return "mma.sync" if variant.constants["SLICES"] != 1 else ARCHS[arch]


GROUPED: Mapping[str, dict[str, Any]] = {
    "int4 of 128 with offsets": {"bits": 4, "group": 128, "offsets": True},
    "int4 of 32 with offsets": {"bits": 4, "group": 32, "offsets": True},
    "FP4 of 32": {"bits": 4, "group": 32, "codes": E2M1},
    "int8 of 32": {"bits": 8, "group": 32, "codes": INT8},
    "FP8 of 128": {"bits": 8, "group": 128, "codes": E4M3},
}


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
def test_products_of_groups_use_tensor_cores_and_do_not_spill(arch: str) -> None:
    """A step over a group of 32 has too few bytes for copies of 16 on each thread."""
    shape = LLAMA_8B["down"]
    if arch == "sm_75":
        shape = replace(shape, dtype="float16")
    for what, form in GROUPED.items():
        for made in aot.compile_all(variants_of(in_form(shape, **form), arch), arch):
            counts = instructions(made.ptx)
            used = [name for name in TENSOR_CORES if counts[name]]
            assert used == ([instruction_of(made.variant, arch)] if arch in ARCHS else []), what
            assert made.resources.spill_stores == made.resources.spill_loads == 0, what
            assert arch == "sm_75" or form["group"] < 128 or counts["cp.async 16"] >= 4, what


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_products_use_tensor_cores_and_do_not_spill(arch: str, bits: int) -> None:
    shapes: list[Shape] = [in_form(QWEN3_30B, bits)]
    if bits:
        shapes.append(in_form(LLAMA_8B["gate and up"], bits))
    for made in aot.compile_all([v for s in shapes for v in variants_of(s, arch)], arch):
        counts = instructions(made.ptx)
        used = [name for name in TENSOR_CORES if counts[name]]
        assert used == [instruction_of(made.variant, arch)]
        assert counts["cp.async 16"] >= 4, "rows travel in 16-byte copies"
        assert made.resources.spill_stores == made.resources.spill_loads == 0


def test_the_oldest_architecture_multiplies_without_tensor_cores() -> None:
    for bits in (0, 8, 4):
        shape = in_form(replace(QWEN3_30B, dtype="float16"), bits)
        for made in aot.compile_all(experts_variants(shape, "sm_75"), "sm_75"):
            assert not any(instructions(made.ptx)[name] for name in TENSOR_CORES)
            assert made.resources.spill_stores == 0


# ---- results


def cases() -> Iterator[Any]:
    """Each shape's tiles on one architecture in `make test`, in turn; the others are slow.

    Kernels of float32 are the same everywhere but for their stages, and numbers in groups are made
    on sm_120 as on sm_80.
    """
    for number, shape in enumerate(SHAPES):
        kinds = 1 if shape.dtype == "float32" else 2 if has_groups(shape) else 3
        for at, arch in enumerate(["sm_80", "sm_90", "sm_120"][:kinds]):
            if getattr(shape, "rounds", False) and not multiply_bytes(shape.form, [arch]):
                continue
            for turn, name in enumerate(trials_of(shape, arch)):
                marks = [pytest.mark.slow] * (at != (number + turn) % kinds)
                yield pytest.param(
                    shape, name, arch, id=f"{name_of(shape)}-{name}-{arch}", marks=marks
                )


@pytest.mark.parametrize(("shape", "name", "arch"), list(cases()))
def test_products_are_their_reference(kernels: Kernels, shape: Shape, name: str, arch: str) -> None:
    """In the order of threads and, on one architecture, in another one: the same bits."""
    found = []
    for order in (None, 1) if arch == "sm_90" else (2,):
        trial = trials_of(shape, arch)[name]()
        run_plan(trial.plan, trial.given, lambda variant: kernels.get(variant, arch), order=order)
        where, error, limit = trial.error()
        assert error <= limit, (where, error)
        found.append([trial.given[name].tobytes() for name in trial.wanted])
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("bits", [0, 4])
def test_a_row_does_not_depend_on_the_others(kernels: Kernels, bits: int) -> None:
    """Fewer rows in another order, with the same tiles: each has the same bits."""
    shape = experts("bfloat16", Form(bits), 5, 2, 160, 96)
    whole = experts_trial(shape, "sm_90", "few")
    some = np.array([11, 3, 17, 4, 0])
    own = {n: a[some] if n in ("x", "indices", "weights", "out") else a
           for n, a in whole.given.items()}  # fmt: skip
    plans = (whole.plan, whole.given), (plan_experts(shape, "sm_90", len(some), "few"), own)
    for plan, arrays in plans:
        run_plan(plan, arrays, lambda variant: kernels.get(variant, "sm_90"))
    assert own["out"].tobytes() == whole.given["out"][some].tobytes()


@pytest.mark.parametrize("role", ROLES)
def test_a_limit_keeps_a_nan(kernels: Kernels, role: str) -> None:
    """A row with a NaN has only NaN, and no other row has one, as in the reference."""
    shape = experts("bfloat16", PLAIN, 4, 2, 160, 96, **GPT_OSS)
    trial = experts_trial(shape, "sm_90", role)
    trial.given["x"][1, 3] = np.nan
    run_plan(trial.plan, trial.given, lambda variant: kernels.get(variant, "sm_90"))
    is_nan_MK = np.isnan(trial.given["out"].astype(np.float32))
    assert is_nan_MK[1].all()
    assert not np.delete(is_nan_MK, 1, 0).any()


@pytest.mark.parametrize(
    "form",
    [{"bits": 0}, {"bits": 8}, {"bits": 4}, GROUPED["FP4 of 32"], GROUPED["FP8 of 128"]],
    ids=str,
)
def test_half_precision_on_the_oldest_architecture(kernels: Kernels, form: dict[str, Any]) -> None:
    shape = in_form(replace(EXPERTS[1], dtype="float16"), **form)
    for made in trials_of(shape, "sm_75").values():
        trial = made()
        run_plan(trial.plan, trial.given, lambda variant: kernels.get(variant, "sm_75"))
        where, error, limit = trial.error()
        assert error <= limit, (where, error)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("bits", [0, 8, 4])
def test_products_read_whole_sectors_and_meet_no_bank_conflicts(
    kernels: Kernels, bits: int, arch: str
) -> None:
    shapes: list[Shape] = [experts("bfloat16", Form(bits), 4, 2, 256, 128)]
    if bits:
        shapes.append(LinearShape("bfloat16", Form(bits), 256, (128, 64, 64)))
        codes = E2M1 if bits == 4 else E4M3
        shapes.append(LinearShape("bfloat16", Form(bits, 32, codes), 256, (128, 64, 64)))
    for shape in shapes:
        trial = trials_of(shape, arch)["few"]()
        memory = PlanMemory(trial.plan, trial.given)
        for one in trial.plan.launches:
            counted = memory.run(one, *kernels.get(one.variant, arch), profile=True)
            if one.variant.role:
                traffic = [*counted.global_reads.values(), *counted.global_writes.values()]
                sectors, ideal = (sum(getattr(t, n) for t in traffic) for n in ("sectors", "ideal"))
                assert sectors <= 1.01 * ideal  # a tile of sorted slots may begin within a sector
                # Slices of x share banks: measured on an H100, they are faster all the same.
                most = 2.3 if one.variant.constants["SLICES"] != 1 else 1.0
                assert counted.wavefronts <= most * counted.ideal_wavefronts


@pytest.mark.parametrize(("count", "active"), [(512, 10), (1024, 16), (3, 3)])
def test_layers_of_very_many_and_of_few_experts(kernels: Kernels, count: int, active: int) -> None:
    shape = experts("bfloat16", PLAIN, count, active, 64, 32)
    trial = experts_trial(shape, "sm_80", "few", rows=5)
    run_plan(trial.plan, trial.given, lambda variant: kernels.get(variant, "sm_80"))
    where, error, limit = trial.error()
    assert error <= limit, (where, error)


def test_slots_are_sorted_and_tiles_are_found(kernels: Kernels) -> None:
    """Experts that no row chose have no tile; several thousand slots take several turns."""
    shape = experts("float16", PLAIN, 37, 3, 16, 16)
    plan = plan_experts(shape, "sm_80", 700)
    rng = np.random.default_rng(0)
    ids = np.array([5 * rng.permutation(7)[:3] + 1 for _ in range(700)], np.int32)
    slots, count = ids.size, plan.scratch["tiles"] // 3
    held = {
        "indices": ids,
        "order": np.full(slots, -1, np.int32),
        "offsets": np.full(38, -1, np.int32),
        "tiles": np.full((count, 3), -1, np.int32),
    }
    sort, place = plan.launches[:2]
    both = LaunchPlan((sort, place))
    run_plan(both, held, lambda variant: kernels.get(variant, "sm_80"), order=4)
    counts = np.bincount(ids.reshape(-1), minlength=37)
    assert (held["order"] == np.argsort(ids.reshape(-1), kind="stable")).all()
    assert (held["offsets"] == np.concatenate([[0], np.cumsum(counts)])).all()
    block = int(str(place.variant.constants["BLOCK_M"]))
    wanted = [
        (expert, first, min(first + block, end))
        for expert, (begin, end) in enumerate(
            zip(held["offsets"][:-1], held["offsets"][1:], strict=True)
        )
        for first in range(begin, end, block)
    ]
    assert [tuple(tile) for tile in held["tiles"][: len(wanted)].tolist()] == wanted
    assert (held["tiles"][len(wanted) :] == 0).all()
