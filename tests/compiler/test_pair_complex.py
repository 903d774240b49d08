"""Complex numbers of a program as pairs of real ones: the same numbers, and no complex one left."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim, export

import kvgraph
from kvgraph.compiler.passes.pair_complex import pair_complex
from tests.compiler.test_own_module import Decoder, compile_module


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


def moved(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    turn = torch.polar(angle.cos(), angle).select(-2, 1).view(2, 2).transpose(0, 1)
    turn = turn.unsqueeze(-1).expand(2, 2, 3).flatten(-2, -1).squeeze(0)
    return torch.cat([turn.real.reshape(-1), turn.imag.reshape(-1)]) + x.sum()


class Model(torch.nn.Module):
    def __init__(self, function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
        return self.function(x, angle)


def complex_nodes(program: torch.export.ExportedProgram) -> list[str]:
    values = {node.name: node.meta.get("val") for node in program.graph.nodes}
    return [n for n, v in values.items() if isinstance(v, torch.Tensor) and v.is_complex()]


@pytest.mark.parametrize("function", [rotated, sliced, narrowed, moved])
def test_the_same_numbers_without_complex_ones(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> None:
    x, angle = torch.randn(1, 5, 3, 8), torch.randn(5, 4)
    tokens = Dim("tokens", min=2)
    shapes = {"x": {1: tokens}, "angle": {0: tokens}}
    program = export(Model(function), (x, angle), dynamic_shapes=shapes)
    assert complex_nodes(program)
    report = pair_complex(program)
    program.graph.lint()
    assert not complex_nodes(program)
    assert report.applied > 3
    assert not report.unmatched
    for count in (5, 9):
        x, angle = torch.randn(1, count, 3, 8), torch.randn(count, 4)
        torch.testing.assert_close(program.module()(x, angle), function(x, angle))


class Table(torch.nn.Module):
    """Llama's own rotary embedding, over a table of complex numbers."""

    def __init__(self, look_up: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.look_up = look_up
        angles = torch.outer(torch.arange(32.0), torch.rand(4))
        self.register_buffer("turns", torch.polar(torch.rand(32, 4), angles), persistent=False)
        self.turns: torch.Tensor

    def forward(self, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2))
        turns = self.look_up(self.turns, at).view(-1, 1, 4)
        return torch.view_as_real(pairs * turns).flatten(2)


@pytest.mark.parametrize(
    "look_up",
    [
        lambda table, at: table[at],
        lambda table, at: table.index_select(-2, at),
        lambda table, at: torch.nn.functional.embedding(at, table),
        lambda table, at: torch.complex(table.real, table.imag)[at],
    ],
)
def test_a_table_of_complex_numbers(look_up: Callable[..., torch.Tensor]) -> None:
    module = Table(look_up)
    shapes = {"x": {0: (tokens := Dim("tokens", min=2))}, "at": {0: tokens}}
    program = export(module, (torch.randn(5, 3, 8), torch.arange(5)), dynamic_shapes=shapes)
    assert not pair_complex(program).unmatched
    program.graph.lint()
    assert not complex_nodes(program)
    assert not any(held.is_complex() for held in program.state_dict.values())
    x, at = torch.randn(9, 3, 8), torch.arange(9).flip(0)
    torch.testing.assert_close(program.module()(x, at), module(x, at))


def test_an_operator_without_a_rule_stays() -> None:
    x, angle = torch.randn(1, 5, 3, 8), torch.randn(5, 4)
    power = lambda x, angle: torch.view_as_real(torch.polar(angle, angle) ** 2)  # noqa: E731
    program = export(Model(power), (x, angle))
    report = pair_complex(program)
    program.graph.lint()
    assert report.unmatched[0].startswith("pow_1: expected an operator on pairs, got aten.pow")
    torch.testing.assert_close(program.module()(x, angle), power(x, angle))


class Squared(Decoder):
    def forward(self, tokens: Any, *rest: Any) -> torch.Tensor:
        pairs = torch.view_as_complex(self.embed(tokens).view(tokens.shape[0], -1, 2)) ** 2
        return super().forward(tokens, *rest) + torch.view_as_real(pairs).flatten(1)[rest[1].long()]


def test_a_refusal_names_what_has_no_rule(tmp_path: Path) -> None:
    with pytest.raises(kvgraph.UnsupportedError) as refused:
        compile_module(Squared(), tmp_path / "out")
    expected = "; of complex numbers: pow_1: expected an operator on pairs, got aten.pow.Tensor_Sc"
    assert expected in str(refused.value)


def test_a_complex_number_without_dims_has_no_rule() -> None:
    class Single(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.tensor(1 + 2j))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            one: Any = self.one
            return x + torch.view_as_real(one.flatten())

    report = pair_complex(export(Single(), (torch.ones(1, 2),)))
    assert any("expected a tensor with dims" in why for why in report.unmatched), report.unmatched
