"""Complex numbers of a program as pairs of real ones: the same numbers, and no complex one left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.export import Dim, export

from kvgraph.compiler.passes.pair_complex import pair_complex


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    turn = torch.polar(torch.ones_like(angle), angle)[None].unsqueeze(-2) * 0.5
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn.to(x.device)).flatten(-2)


def sliced(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    turn = torch.polar(angle.cos(), angle)[:, 1:3]
    return torch.view_as_real(turn.contiguous().unsqueeze(0) * turn) + x.sum()


def narrowed(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    turn = torch.polar(torch.ones_like(angle), angle.double().cos().float()).to(torch.complex128)
    return torch.view_as_real(turn.to(torch.complex64)) * 3 + x.sum()


class Model(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        return self.function(x, angle)


def complex_nodes(program: torch.export.ExportedProgram) -> list[str]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.is_complex()]


@pytest.mark.parametrize("function", [rotated, sliced, narrowed])
def test_the_same_numbers_without_complex_ones(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x, angle = torch.randn(1, 5, 3, 8), torch.randn(5, 4)
    tokens = Dim("tokens", min=2)
    shapes = {"x": {1: tokens}, "angle": {0: tokens}}
    program = export(Model(function), (x, angle), dynamic_shapes=shapes)
    assert complex_nodes(program)
    report = pair_complex(program.graph)
    program.graph.lint()
    assert not complex_nodes(program)
    assert report.applied > 3
    assert not report.unmatched
    for count in (5, 9):
        x, angle = torch.randn(1, count, 3, 8), torch.randn(count, 4)
        torch.testing.assert_close(program.module()(x, angle), function(x, angle))


def test_an_operator_without_a_rule_stays() -> None:
    x, angle = torch.randn(1, 5, 3, 8), torch.randn(5, 4)
    power = lambda x, angle: torch.view_as_real(torch.polar(angle, angle) ** 2)  # noqa: E731
    program = export(Model(power), (x, angle))
    report = pair_complex(program.graph)
    program.graph.lint()
    assert report.unmatched[0].startswith("pow_1: expected an operator on pairs, got aten.pow")
    torch.testing.assert_close(program.module()(x, angle), power(x, angle))
