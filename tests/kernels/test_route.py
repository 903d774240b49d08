"""The kernel of routers: what is compiled of it, and its results as PTX."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
pytest.importorskip("torch", reason="the routers are also those of Triton's interpreter")

from kvgraph.kernels import aot
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.route_plan import RouteShape, plan_route, route_variant
from kvgraph.kernels.run_ptx import run_plan
from kvgraph.kernels.trials import Trial, route_trial
from tests.support.ptx_matrix import Kernels
from tests.support.routes import DEEPSEEK, ROUTES, ROWS, odd_trial


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


def executed(kernels: Kernels, trial: Trial, arch: str, order: int | None = None) -> None:
    run_plan(trial.plan, trial.given, lambda variant: kernels.get(variant, arch), order=order)


@pytest.mark.parametrize("shape", ROUTES.values(), ids=str)
def test_a_plan_is_one_launch_of_what_is_compiled(shape: RouteShape) -> None:
    (one,) = plan_route(shape, 3).launches
    assert (one.variant, one.grid) == (route_variant(shape), (3, 1))
    assert RouteShape.of_variant(one.variant) == shape
    assert plan_route(shape, 0) == LaunchPlan()


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_120"])
@pytest.mark.parametrize("name", ROUTES)
def test_is_its_reference(kernels: Kernels, name: str, arch: str) -> None:
    shape = ROUTES[name]
    if arch == "sm_75" and shape.dtype == "bfloat16":
        shape = replace(shape, dtype="float16")
    for trial in (route_trial(shape, ROWS), odd_trial(shape)):
        executed(kernels, trial, arch)
        where, error, limit = trial.error()
        assert error <= limit, (where, error)
        found, wanted = trial.given["weights"], trial.wanted["weights"]
        np.testing.assert_allclose(found, wanted, rtol=1e-5)  # small ones too


@pytest.mark.parametrize("name", ["indices", "weights"])
def test_a_trial_finds_what_is_wrong_in_either_result(name: str) -> None:
    trial = route_trial(DEEPSEEK, 3)
    trial.given.update(trial.wanted)
    assert trial.error()[1] == 0
    wrong = trial.given[name] = trial.wanted[name].copy()
    wrong[1, 2] = 7 if name == "indices" else np.nan
    where, error, limit = trial.error()
    assert where == name
    assert error > limit


def test_threads_in_another_order_give_the_same_bits(kernels: Kernels) -> None:
    """Rows of more experts than one warp takes."""
    found = []
    for order in (None, 1, 2):
        trial = route_trial(ROUTES["very many"], 3)
        executed(kernels, trial, "sm_90", order)
        found.append([trial.given[name].tobytes() for name in trial.wanted])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_100"])
def test_nothing_leaves_the_registers(arch: str) -> None:
    shapes = (DEEPSEEK, replace(DEEPSEEK, num_experts=1000), ROUTES["very many"])
    for made in aot.compile_all([route_variant(shape) for shape in shapes], arch):
        used = made.resources
        assert (used.spill_stores, used.spill_loads, used.stack) == (0, 0, 0)
