"""Linear layers of many rows: a small weight is written in full, and torch multiplies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("torch", reason="multiplies: pip install 'kvgraph[torch]'")
pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")

import torch
from torch import nn

from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.linear_plan import LinearShape, is_expanded, linear_variants
from kvgraph.kernels.matrix_trials import linear_trial
from kvgraph.ops import QUANTIZED_LINEAR, torch_fusions
from kvgraph.ops.packed import Form
from kvgraph.runtime.sessions import expanded
from kvgraph.runtime.sessions.expanded import Expanded, Operands
from kvgraph.runtime.sessions.launches import QuantizedLinear
from tests.support.matrix import array, tensor
from tests.support.matrix_products import LINEARS, LLAMA_8B, name_of
from tests.support.ptx_matrix import Kernels

HALVES = [s for s in LINEARS if s.dtype != "float32" and is_expanded(s, "sm_90")]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels(tmp_path_factory.mktemp("kernels"))


class Executing:
    """Launches kernels as PTX, over tensors of a CPU."""

    device, arch, multiprocessors = torch.device("cpu"), "sm_90", 132

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self.launched: list[str] = []

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        self.launched += [one.variant.kernel.name for one in plan.launches]
        held = {name: array(x, str(x.dtype).partition(".")[2]) for name, x in operands.items()}
        self._kernels.run(plan, self.arch, held)


@pytest.mark.parametrize("shape", HALVES, ids=name_of)
def test_a_weight_in_full_gives_what_the_kernels_of_few_rows_give(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch, shape: LinearShape
) -> None:
    monkeypatch.setattr(expanded, "PIECE", 1)  # the fewest columns at a time, of several outputs
    gpu, trial = Executing(kernels), linear_trial(shape, "sm_90", "few", rows=18)
    given = {name: tensor(held, "cpu") for name, held in trial.given.items()}
    outs = [given[name] for name in trial.wanted]
    Expanded(shape, gpu.arch, gpu.launch).run(given["x"], given, outs)
    where, error, limit = trial.error()
    assert error <= limit, (where, error)
    pieces = -(-shape.columns // 32)
    before, after = ["round_rows"] * shape.rounds, ["silu_mul"] * shape.gated
    assert gpu.launched == before + ["expand_weight"] * pieces + after
    known = {variant.kernel.name for variant in linear_variants(shape, gpu.arch)}
    assert set(gpu.launched) <= known


def test_rows_say_who_multiplies(kernels: Kernels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded, "CONVERTED_ROWS", 5)
    shape = LinearShape("bfloat16", Form(8), 64, (32, 16, 0), bias=True)
    trial = linear_trial(shape, "sm_90", "few", rows=6)
    given = {name: tensor(held, "cpu") for name, held in trial.given.items()}
    graph, gpu = torch.fx.Graph(), Executing(kernels)
    nodes = {}
    for operand in ("x", "weight", "scales", "bias"):
        nodes[operand] = graph.placeholder(operand)
        nodes[operand].meta["val"] = given[operand]
    node = graph.call_function(
        torch_fusions.quantized_linear.default,
        tuple(nodes.get(operand.name) for operand in QUANTIZED_LINEAR.inputs),
        {"out_features": 32, "out_features_1": 16, "bits": 8},
    )
    layer = QuantizedLinear(node, nn.Module(), gpu)
    assert layer.names[0] == "x"
    operands = [given[name] for name in layer.names[1:]]
    for rows, launched in ((5, "quantized_linear"), (6, "expand_weight")):
        gpu.launched.clear()
        x = given["x"][:rows].view(1, rows, -1)
        outs = layer.run(x, *operands)
        assert set(gpu.launched) == {launched}
        assert [tuple(out.shape) for out in outs] == [(1, rows, 32), (1, rows, 16), (0, 0)]
        for out, name in zip(outs, ("out", "out_1"), strict=False):
            want = trial.wanted[name][:rows].astype("f4")
            assert np.abs(out[0].float().numpy() - want).max() <= 0.03 * np.abs(want).max()


def test_rounded_rows_are_expanded_later(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = next(s for s in HALVES if s.rounds)
    monkeypatch.setattr(expanded, "ROUNDED_ROWS", 7)
    assert Expanded(shape, "sm_90", lambda plan, operands: None).least_rows == 8
    plain = Expanded(replace(shape, rounds=False), "sm_90", lambda plan, operands: None)
    assert plain.least_rows == expanded.CONVERTED_ROWS + 1


def test_pieces_are_written_over_each_other() -> None:
    planned: list[tuple[str | int, ...]] = []
    layer = Expanded(
        LLAMA_8B["gate and up"],
        "sm_90",
        lambda plan, operands: planned.append(plan.launches[0].arguments[-2:]),
    )
    x = torch.empty(1, 4096, dtype=torch.bfloat16, device="meta")
    pieces = [(first, plain) for first, plain, _ in layer._pieces(x, {})]
    assert planned == [(0, 16384), (16384, 28672 - 16384)]
    assert [first for first, _ in pieces] == [0, 16384]
    assert pieces[0][1].nbytes == expanded.PIECE
    assert pieces[1][1]._base is pieces[0][1]._base is not None
