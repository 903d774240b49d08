"""Linear layers of many rows that are rounded to FP8: torch multiplies both factors' bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("torch", reason="multiplies: pip install 'kvgraph[torch]'")
pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")

import torch
from torch import nn

from kvgraph.kernels.linear_plan import LinearShape, is_library, linear_variants
from kvgraph.kernels.matrix_trials import linear_trial
from kvgraph.ops import QUANTIZED_LINEAR, torch_fusions
from kvgraph.ops.packed import E4M3, Form
from kvgraph.runtime.sessions import launches
from kvgraph.runtime.sessions.launches import QuantizedLinear
from kvgraph.runtime.sessions.scaled import Scaled
from tests.runtime.test_expanded import Executing
from tests.support.matrix import tensor
from tests.support.matrix_products import name_of
from tests.support.ptx_matrix import Kernels

PLAIN = LinearShape("bfloat16", Form(8, codes=E4M3), 256, (64, 0, 0), rounds=True)
SHAPES = (
    PLAIN,
    replace(PLAIN, bias=True),
    replace(PLAIN, gated=True),
    replace(PLAIN, in_features=208, out_features=(64, 32, 16), bias=True),
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_the_library_gives_what_the_kernels_give(kernels: Kernels, shape: LinearShape) -> None:
    gpu, trial = Executing(kernels), linear_trial(shape, "sm_90", "rows64")
    given = {name: tensor(held, "cpu") for name, held in trial.given.items()}
    outs = Scaled(shape, gpu.launch).run(given["x"], given)
    for name, out in zip(trial.wanted, outs.values(), strict=True):
        assert out.shape == given[name].shape
        given[name].copy_(out)
    where, error, limit = trial.error()
    assert error <= limit, (where, error)
    assert gpu.launched == ["round_rows"] + ["sum_linear"] * (shape is not PLAIN)
    known = {variant.kernel.name for variant in linear_variants(shape, gpu.arch)}
    assert set(gpu.launched) <= known


@pytest.mark.parametrize(
    "other",
    [
        {"form": Form(8, 128, E4M3)},
        {"form": Form(8)},
        {"dtype": "float16"},
        {"in_features": 200},
        {"out_features": (40, 0, 0)},
        {"rounds": False},
    ],
    ids=str,
)
def test_what_the_library_does_not_take_goes_to_kernels(other: dict[str, object]) -> None:
    assert is_library(PLAIN, "sm_90")
    assert not is_library(PLAIN, "sm_120")
    assert not is_library(replace(PLAIN, **other), "sm_90")  # type: ignore[arg-type]


def test_rows_say_who_multiplies(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launches, "SCALED_ROWS", 5)
    shape = replace(PLAIN, out_features=(64, 32, 0))
    trial = linear_trial(shape, "sm_90", "rows64", rows=6)
    given = {name: tensor(held, "cpu") for name, held in trial.given.items()}
    graph, gpu = torch.fx.Graph(), Executing(kernels)
    nodes = {}
    for operand in ("x", "weight", "scales"):
        nodes[operand] = graph.placeholder(operand)
        nodes[operand].meta["val"] = given[operand]
    node = graph.call_function(
        torch_fusions.quantized_linear.default,
        tuple(nodes.get(operand.name) for operand in QUANTIZED_LINEAR.inputs),
        {"out_features": 64, "out_features_1": 32, "bits": 8, "codes": E4M3, "x_bits": 8},
    )
    layer = QuantizedLinear(node, nn.Module(), gpu)
    operands = [given[name] for name in layer.names[1:]]
    for rows, launched in ((5, "quantized_linear"), (6, "sum_linear")):
        gpu.launched.clear()
        outs = layer.run(given["x"][:rows].view(1, rows, -1), *operands)
        assert gpu.launched == ["round_rows", launched]
        assert [tuple(out.shape) for out in outs] == [(1, rows, 64), (1, rows, 32), (0, 0)]
        for out, name in zip(outs, ("out", "out_1"), strict=False):
            want = torch.from_numpy(trial.wanted[name][:rows].astype("f4"))
            assert (out[0].float() - want).abs().max() <= 0.03 * want.abs().max()
