"""Chains of views become one each; what takes elements out of their order stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from kvgraph.compiler.passes.fuse_rms_norm import fuse_rms_norm
from kvgraph.ops.torch_nodes import is_dense
from kvgraph.runtime.sessions.views import join_views

Change = Callable[[torch.Tensor], torch.Tensor]


class Around(nn.Module):
    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(x * 1.0) + 1.0


def joined(change: Change) -> torch.fx.GraphModule:
    """`change` between two operators, over any number of rows, with its views joined."""
    rows = torch.export.Dim("rows", min=1, max=64)
    x = torch.zeros(1, 5, 12)
    program = torch.export.export(Around(change), (x,), dynamic_shapes=({1: rows},))
    module = program.module(check_guards=False)
    join_views(module.graph)
    module.recompile()
    return module


def kinds(module: torch.fx.GraphModule) -> list[str]:
    """Names of the operators between both."""
    calls = [n for n in module.graph.nodes if n.op in ("call_function", "call_method")]
    names = [str(n.target).removeprefix("aten.").partition(".")[0] for n in calls]
    return [name for name in names if name not in ("mul", "add", "sym_size")]


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (lambda x: x.view(1, x.shape[1], -1, 4).transpose(1, 2).transpose(1, 2)[0], ["reshape"]),
        (lambda x: x.unsqueeze(0).reshape(1, x.shape[1], -1), ["reshape"]),
        (lambda x: x, []),
        (lambda x: x.view(1, x.shape[1], -1, 4).transpose(1, 2)[0],
         ["view", "transpose", "select"]),
        (lambda x: x.view(1, -1, 3, 4).transpose(2, 3).reshape(1, x.shape[1], 12),
         ["view", "transpose", "reshape"]),
        (lambda x: x.view(x.shape[1], 3, 4).select(1, 2), ["view", "select"]),
        (lambda x: x.transpose(0, 1).reshape(-1, 12), ["reshape"]),
        (lambda x: x * torch.ones(1)[0], ["ones", "reshape"]),
    ],
    ids=["there-and-back", "reshape", "none", "transposed", "copied", "part", "of-one-row",
         "number"],
)  # fmt: skip
def test_views_are_joined_where_elements_keep_their_order(change: Change, left: list[str]) -> None:
    module = joined(change)
    assert kinds(module) == left
    for rows in (1, 7):
        x = torch.arange(12.0 * rows).view(1, rows, 12)
        assert torch.equal(module(x), Around(change)(x))


def test_a_view_that_is_read_on_its_way_stays() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        flat = x.view(x.shape[1], 12)
        return flat.view(-1, 3, 4).transpose(0, 1).sum(0) + flat.sum(1, keepdim=True)

    module = joined(change)
    assert kinds(module).count("reshape") == 1
    x = torch.arange(60.0).view(1, 5, 12)
    assert torch.equal(module(x), Around(change)(x))


class Norm(nn.Module):
    """A norm of heads that lie behind the transpose, as a module of one's own may have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads: torch.Tensor = self.norm(x.view(1, x.shape[1], 3, 4).transpose(1, 2))
        return heads * 2.0


@pytest.mark.parametrize("noted", [True, False])
def test_notes_of_how_a_view_lies_are_not_believed(noted: bool) -> None:
    """`noted`: as programs before 0.2.0 note the transpose behind a norm that was moved."""
    rows = torch.export.Dim("rows", min=1, max=64)
    module = Norm()
    program = torch.export.export(
        module, (torch.zeros(1, 5, 12),), dynamic_shapes=({1: rows},)
    ).module(check_guards=False)
    assert fuse_rms_norm(program.graph).applied == 1
    (moved,) = (n for n in program.graph.nodes if n.target is torch.ops.aten.transpose.int)
    assert not is_dense(moved.meta["val"])
    if noted:
        moved.meta["val"] = moved.meta["val"].contiguous()
    join_views(program.graph)
    program.recompile()
    assert "transpose" in kinds(program)
    for count in (1, 7):
        x = torch.arange(12.0 * count).view(1, count, 12)
        with torch.no_grad():
            torch.testing.assert_close(program(x), module(x))
