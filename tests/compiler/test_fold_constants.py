"""Numbers that a model makes of constants in each step are made once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from kvgraph.compiler.passes.fold_constants import MOST_ELEMENTS, fold_constants


class Cutoff(nn.Module):
    """Gemma 3n's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantile = torch.distributions.normal.Normal(0, 1).icdf(torch.tensor(0.7))
        return torch.relu(x - x.mean() - quantile.type(x.dtype)), quantile


class Split(nn.Module):
    """Two readers of one constant, one of them through another."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 4.0]).exp()
        return x * table + table.sum()


class Large(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (torch.tensor([2.0]).expand(MOST_ELEMENTS + 1) * 3).sum()


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.bernoulli(torch.tensor([0.5]))


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight.exp()


def exported(model: nn.Module) -> ExportedProgram:
    return export(model.eval(), (torch.randn(4, 3),), dynamic_shapes=({0: Dim("tokens")},))


def targets(program: ExportedProgram) -> list[str]:
    return [str(n.target) for n in program.graph.nodes if n.op == "call_function"]


@pytest.mark.parametrize(("model", "count", "gone"), [(Cutoff(), 2, "erfinv"), (Split(), 2, "exp")])
def test_the_same_numbers_without_their_making(model: nn.Module, count: int, gone: str) -> None:
    program, x = exported(model), torch.randn(7, 3)
    assert any(gone in target for target in targets(program))
    report = fold_constants(program)
    program.graph.lint()
    program.graph_module.recompile()
    assert (report.applied, report.unmatched) == (count, [])
    assert not any(gone in target for target in targets(program))
    torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("model", [Large(), Noise(), Weight()])
def test_what_stays(model: nn.Module) -> None:
    program = exported(model)
    before = targets(program)
    assert fold_constants(program).applied == 0
    assert targets(program) == before
