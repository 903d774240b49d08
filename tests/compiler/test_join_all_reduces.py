"""Sums over the ranks that one takes the place of, and those that stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export
from torch.fx import Interpreter

from kvgraph.compiler.passes.join_all_reduces import join_all_reduces
from kvgraph.ops import torch_ops

REDUCE = torch_ops.all_reduce.default
Rows = torch.Tensor


def summed(x: Rows) -> Rows:
    total: Rows = torch_ops.all_reduce(x, ranks=2)
    return total


def program_of(run: Callable[[Rows, Rows, Rows], object]) -> ExportedProgram:
    class Layer(nn.Module):
        def forward(self, a: Rows, b: Rows, x: Rows) -> object:
            return run(a, b, x)

    count = Dim("rows", min=2, max=64)
    given = tuple(torch.randn(6, 8) for _ in range(3))
    return export(Layer(), given, dynamic_shapes=({0: count},) * 3)


def reductions(program: ExportedProgram) -> int:
    return sum(node.target is REDUCE for node in program.graph.nodes)


def blocks(x: Rows) -> Rows:
    """`[3, T, 8]`: three blocks of rows, summed over the ranks."""
    return summed(torch.cat([x, 2 * x, 3 * x])).view(3, -1, 8)


def batch(x: Rows) -> Rows:
    return summed(x).unsqueeze(0)


JOINED: dict[str, Callable[[Rows, Rows, Rows], object]] = {
    "two terms": lambda a, b, x: summed(a) + summed(b),
    "terms of a sum": lambda a, b, x: (x + summed(a)) + summed(b),
    "terms of a sum, turned": lambda a, b, x: summed(b) + (summed(a) + x),
    "a batch": lambda a, b, x: batch(a) + summed(b).view(1, -1, 8) + x.unsqueeze(0),
    "three terms": lambda a, b, x: summed(a) + summed(b) + summed(x),
    "what each expert gives": lambda a, b, x: summed(b) + blocks(a).sum(0),
}
STAYS: dict[str, Callable[[Rows, Rows, Rows], object]] = {
    "read twice": lambda a, b, x: (lambda s: (s + summed(b), s * x))(summed(a)),
    "an inner sum that is read": lambda a, b, x: (lambda s: (s + summed(b), s))(x + summed(a)),
    "one added to itself": lambda a, b, x: (lambda s: s + s)(summed(a)),
    "scaled": lambda a, b, x: torch.add(summed(a), summed(b), alpha=2),
    "other rows": lambda a, b, x: summed(a) + summed(b[:1]),
    "other dims": lambda a, b, x: summed(a).unsqueeze(0) + summed(b).unsqueeze(1),
    "a sum of columns": lambda a, b, x: blocks(a).sum(-1),
    "a sum that keeps its dim": lambda a, b, x: blocks(a).sum([0], keepdim=True),
    "multiplied": lambda a, b, x: summed(a) * summed(b),
    "with a residual": lambda a, b, x: torch_ops.all_reduce(a, x, ranks=2) + summed(b),
}


class TwoEqualRanks(Interpreter):
    """Whose sum is twice the part of each."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is not REDUCE:
            return super().call_function(target, args, kwargs)
        return 2 * args[0] + (args[1] if len(args) == 2 else 0)


def results(program: ExportedProgram, *given: Rows) -> object:
    return TwoEqualRanks(program.graph_module).run(*given)


@pytest.mark.parametrize("name", JOINED)
def test_one_takes_the_place_of_several(name: str) -> None:
    program, given = program_of(JOINED[name]), [torch.randn(5, 8) for _ in range(3)]
    before = results(program, *given)
    report = join_all_reduces(program.graph)
    assert report.applied == 1 + (name in ("three terms", "what each expert gives"))
    assert reductions(program) == 1
    torch.testing.assert_close(results(program, *given), before)


@pytest.mark.parametrize("name", STAYS)
def test_others_stay(name: str) -> None:
    program = program_of(STAYS[name])
    before = reductions(program)
    assert join_all_reduces(program.graph).applied == 0
    assert reductions(program) == before
