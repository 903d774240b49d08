"""Some of the conformance matrix on compiled kernels that are executed as PTX: one architecture of
each generation. All of it: `make check-ptx`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
pytest.importorskip("torch", reason="the matrix is also that of Triton's interpreter")

from kvgraph.errors import KernelError
from tests.support import conformance
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
SPLIT = conformance.Case("paged_attention", rows=((700, 1), (9, 1)), page_size=16)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernels]:
    yield Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
def test_a_step_of_every_kind(kernels: Kernels, arch: str) -> None:
    """On sm_90 its products are of four warps."""
    run_case(kernels, HALF, arch)
    run_case(kernels, HALF, arch, order=1)


@pytest.mark.parametrize(("arch", "case"), [("sm_89", QUANTIZED), ("sm_86", SPLIT)])
def test_quantized_pools_and_split_contexts(
    kernels: Kernels, arch: str, case: conformance.Case
) -> None:
    run_case(kernels, case, arch, order=2)


def test_kernels_of_rows(kernels: Kernels) -> None:
    check_rows(kernels, "sm_80", order=3)


def test_refused(tmp_path: Path) -> None:
    """Products of the fifth generation's tensor memory are not modelled, and refused by name."""
    with pytest.raises(KernelError, match=r"an instruction that is modelled, got '@%p\d+ tcgen05"):
        run_case(Kernels(tmp_path), HALF, "sm_100")
