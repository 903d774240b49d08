"""Some of the conformance matrix on compiled kernels that are executed as PTX: one architecture of
each generation. All of it: `make check-ptx`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
pytest.importorskip("torch", reason="the matrix is also that of Triton's interpreter")

import numpy as np

from kvgraph.errors import KernelError
from kvgraph.kernels.run_ptx import PlanMemory
from tests.support import conformance
from tests.support.matrix import plan_of
from tests.support.ptx_matrix import Kernels, check_rows, run_case

CASES = {case.id: case for case in conformance.cases()}
HALF = conformance.Case(
    "update_and_attend",
    "float16",
    "float16",
    rows=((20, 1), (0, 70), (130, 9), (0, 0), (15, 1)),
    head_dim=128,
    heads=8,
    page_size=16,
    rope_style=0,
    rotary_dim=128,
    window=60,
)
QUANTIZED = conformance.Case(
    "update_and_attend",
    "float32",
    "float8_e4m3fn",
    rows=((5, 1), (31, 1), (0, 40)),
    granularity=32,
    softcap=5.0,
    sinks=True,
)
NORMED = conformance.Case(
    "update_and_attend",
    "bfloat16",
    "bfloat16",
    rows=((700, 1), (9, 1), (0, 40)),
    rope_style=0,
    rotary_dim=64,
    norm=1.0,
)
SPLIT = conformance.Case("paged_attention", rows=((700, 1), (9, 1)), page_size=16)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_a_step_of_every_kind(kernels: Kernels, arch: str) -> None:
    """On sm_90 its products are of four warps."""
    run_case(kernels, HALF, arch)
    run_case(kernels, HALF, arch, order=1)


@pytest.mark.parametrize(
    ("arch", "case"), [("sm_89", QUANTIZED), ("sm_86", SPLIT), ("sm_90", NORMED)]
)
def test_quantized_pools_split_contexts_and_norms(
    kernels: Kernels, arch: str, case: conformance.Case
) -> None:
    run_case(kernels, case, arch, order=2)


def test_kernels_of_rows(kernels: Kernels) -> None:
    check_rows(kernels, "sm_80", order=3)


def test_the_last_tokens_of_a_prompt_start_first(kernels: Kernels) -> None:
    """They see the most keys: blocks that start in the grid's order end at about the same time."""
    case = conformance.Case("paged_attention", "float16", "float16", rows=((0, 300),), page_size=16)
    operands = conformance.build(case)
    plan = plan_of(case, operands, "sm_80")
    (one,) = (one for one in plan.launches if one.variant.role == "prefill")
    kernel, shared = kernels.get(one.variant, "sm_80")
    given = {n: np.ascontiguousarray(a) for n, a in operands.inputs.items() if a is not None}
    given["out"] = np.zeros((300, case.heads, case.head_dim), np.float16)
    memory = PlanMemory(plan, given)
    blocks = [(block, 0, 0) for block in range(one.grid[0])]
    work = [memory.run(one, kernel, shared, blocks=[block]).mma for block in blocks]
    tiles = [work[block] for block in range(0, len(work), case.kv_heads) if work[block]]
    assert len(tiles) > 2
    assert tiles == sorted(tiles, reverse=True)


def test_refused(tmp_path: Path) -> None:
    """Products of the fifth generation's tensor memory are not modelled, and refused by name."""
    with pytest.raises(KernelError, match=r"an instruction that is modelled, got '@%p\d+ tcgen05"):
        run_case(Kernels(tmp_path), HALF, "sm_100")
