"""Large weights of linear layers, tables and experts are read in pieces, to the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import embedding, linear

from kvgraph.compiler import streamed, values
from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.values import Converted

WIDTH, ROWS = 8, 100


class Layers(nn.Module):
    """A table and a linear layer of many rows; `call` uses them."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, WIDTH)
        self.head = nn.Linear(WIDTH, ROWS)
        self.call = call

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.call(self, ids)
        return made


CALLS = {
    "modules": lambda m, ids: m.head(m.table(ids)),
    "functions": lambda m, ids: linear(embedding(ids, m.table.weight), m.head.weight),
    "keywords": lambda m, ids: linear(m.table(ids), m.head.weight, bias=m.head.bias),
    "transpose": lambda m, ids: m.table(ids) @ m.head.weight.T + m.head.bias,
    "norms": lambda m, ids: embedding(ids, m.table.weight, max_norm=0.5),
}


@pytest.mark.parametrize("call", CALLS)
def test_results_are_those_of_whole_weights(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, ids = Layers(CALLS[call]), torch.tensor([[3, 99, 0, 3], [50, 7, 98, 1]])
    stored = {name: each.detach().clone() for name, each in model.named_parameters()}
    sources = {
        name: Converted(name, each.shape, each.dtype, lambda each=each: each)  # type: ignore[misc]
        for name, each in stored.items()
    }
    with torch.no_grad():
        expected = model(ids)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for part in (model.table, model.head):
            for name, each in list(part._parameters.items()):
                assert each is not None
                part._parameters[name] = nn.Parameter(mode.from_tensor(each.detach()))
    monkeypatch.setattr(streamed, "LARGE", 1 << 10)
    monkeypatch.setattr(values, "PIECE_BYTES", 7 * 4 * WIDTH)
    with streamed.Streamed(Checkpoint(sources)).within(model), torch.inference_mode():
        torch.testing.assert_close(model(ids), expected, rtol=1e-6, atol=1e-6)


def test_an_id_without_a_row_is_refused_by_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Layers(CALLS["modules"])
    table = model.table.weight.detach()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model.table.weight = nn.Parameter(mode.from_tensor(table))
    monkeypatch.setattr(streamed, "LARGE", 1 << 10)
    source = Converted("table", table.shape, table.dtype, lambda: table)
    reads = streamed.Streamed(Checkpoint({"table.weight": source}))
    with reads.within(model), torch.no_grad(), pytest.raises(IndexError):
        model(torch.tensor([ROWS]))


class Experts(nn.Module):
    """Weights of four experts, `[4, WIDTH, WIDTH]`; `call` uses them."""

    def __init__(self, call: Any) -> None:
        super().__init__()
        self.stacked = nn.Parameter(torch.randn(4, WIDTH, WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.call = call

    def forward(self, x: torch.Tensor, chosen: list[Any]) -> torch.Tensor:
        made: torch.Tensor = self.call(self, x * self.scale, chosen)
        return made


EXPERTS = {
    "one after the other": lambda m, x, chosen: sum(x @ m.stacked[each] for each in chosen),
    "gathered": lambda m, x, chosen: (x @ m.stacked[torch.as_tensor(chosen)]).sum(0),
    "from the end": lambda m, x, chosen: sum(x @ m.stacked[each - 4] for each in chosen),
    "all, twice": lambda m, x, _: (x @ m.stacked).sum(0) - torch.bmm(m.stacked, m.stacked).sum(),
}
READS = {
    "one after the other": [(3, 4), (0, 1), (3, 4)],
    "gathered": [(0, 4)],
    "from the end": [(0, 4)],
    "all, twice": [(0, 4)],
}
"""Rows that a call of each of EXPERTS reads, for experts 3, 0 and 3."""


class Counted(values.Values):
    """A tensor in memory that notes how often it is opened, and which rows are read."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.where, self.shape, self.dtype = "experts", tuple(whole.shape), whole.dtype
        self.whole, self.opened, self.read_rows = whole, 0, list[tuple[int, int]]()

    def open(self) -> values.Rows:
        self.opened += 1
        return self._rows

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        self.read_rows.append((start, stop))
        return self.whole[start:stop]


@pytest.mark.parametrize("as_tensors", [False, True])
@pytest.mark.parametrize("call", EXPERTS)
def test_an_expert_is_read_alone(
    call: str, as_tensors: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x, chosen = Experts(EXPERTS[call]), torch.randn(3, WIDTH), [3, 0, 3]
    indices: list[Any] = [torch.tensor(each) for each in chosen] if as_tensors else chosen
    sources = {name: Counted(each.detach().clone()) for name, each in model.named_parameters()}
    with torch.no_grad():
        expected = model(x, indices)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for name, each in list(model._parameters.items()):
            assert each is not None
            model._parameters[name] = nn.Parameter(mode.from_tensor(each.detach()))
    monkeypatch.setattr(streamed, "LARGE", 1 << 9)
    stacked = sources["stacked"]
    with streamed.Streamed(Checkpoint(sources)).within(model), torch.inference_mode():
        for calls in (1, 2):
            torch.testing.assert_close(model(x, indices), expected, rtol=1e-6, atol=1e-6)
            assert stacked.opened == calls  # nothing of the call before is kept
            assert stacked.read_rows == READS[call] * calls
