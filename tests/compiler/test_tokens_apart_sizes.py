"""Tokens that are moved by numbers of a step: its tokens, logits, rows, lengths and pages."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

import kvgraph
from kvgraph.compiler.export import export
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes.require_tokens_apart import require_tokens_apart
from tests.compiler.test_tokens_apart import SIGNATURE, Decoder

NAMES = "tokens", "offsets", "at", "pool", "lengths", "table", "most"
Moved = Callable[[Any, torch.Tensor], torch.Tensor]


class Given(Decoder):
    """A decoder in which `before` takes the graph's inputs by name, and the embeddings."""

    def __init__(self, before: Moved) -> None:
        super().__init__(
            lambda d, x: before(SimpleNamespace(**dict(zip(NAMES, d.given, strict=True))), x)
        )
        self.given: list[Any] = []

    def forward(self, *inputs: Any) -> torch.Tensor:
        self.given[:] = inputs
        return super().forward(*inputs)


def follow(before: Moved) -> int:
    model = Model(Given(before), "Given", (), 32, 20_000, "float32")
    return require_tokens_apart(export(model, SIGNATURE, return_buffers=False), SIGNATURE).applied


def unasked(given: Any) -> Any:
    """The number of tokens that get no logits."""
    return given.tokens.shape[0] - given.at.shape[0]


def numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[0])


BY_LOGITS: dict[str, Moved] = {
    "roll": lambda g, x: x + x.roll(unasked(g), 0),
    "index": lambda g, x: x + x[(numbers(x) - unasked(g)).clamp(min=0)],
}


@pytest.mark.parametrize("name", BY_LOGITS)
def test_a_shift_by_the_number_of_logits(name: str) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match="got other tokens through"):
        follow(BY_LOGITS[name])


def longer(x: torch.Tensor) -> torch.Tensor:
    """A buffer of a constant length above that of the long step."""
    return functional.pad(x, (0, 0, 0, 12_000))[:12_000]


FROM_A_BUFFER: dict[str, Moved] = {
    "a row": lambda g, x: x + longer(x)[9000],
    "a slice": lambda g, x: x + longer(x)[9000:9001],
    "mean of a slice": lambda g, x: x + longer(x)[9000:].mean(0),
}


@pytest.mark.parametrize("name", FROM_A_BUFFER)
def test_a_part_of_a_buffer_that_shorter_steps_do_not_reach(name: str) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match="got other tokens through"):
        follow(FROM_A_BUFFER[name])


def multiple(count: Any, of: int = 512) -> Any:
    """1 if `count` is a multiple of `of`, else 0: it is 0 in both steps of the proof."""
    return 1 - torch.sym_min(1, count % of)


def longest(given: Any) -> Any:
    """A number that is read from the lengths of all rows."""
    return given.lengths.max().item() // 700


BY_SIZES: dict[str, Moved] = {
    "roll by tokens": lambda g, x: x + x.roll(multiple(x.shape[0]), 0),
    "roll by parity": lambda g, x: x + x.roll(1 - x.shape[0] % 2, 0),
    "roll in long steps": lambda g, x: x + x.roll(torch.sym_max(x.shape[0] - 9000, 0), 0),
    "roll by rows": lambda g, x: x + x.roll((g.offsets.shape[0] - 1) // 12, 0),
    "roll by lengths": lambda g, x: x + x.roll(longest(g), 0),
    "roll by pages": lambda g, x: x + x.roll(g.table.shape[1] // 40, 0),
    "roll by both steps": lambda g, x: x + x.roll(3 * 8209, 0),
    "index": lambda g, x: x + x[(numbers(x) - multiple(x.shape[0])).clamp(min=0)],
    "index by a tensor": lambda g, x: (
        x + x[(numbers(x) - (torch.full((), x.shape[0]) % 512 == 0).long()).clamp(min=0)]
    ),
    "index by the last number": lambda g, x: (
        x + x[(numbers(x) - (numbers(x).max() % 512 == 511).long()).clamp(min=0)]
    ),
    "index by rows": lambda g, x: x + x[(numbers(x) - g.lengths.shape[0] // 12).clamp(min=0)],
    "pad": lambda g, x: x + functional.pad(x, (0, 0, multiple(x.shape[0]), 0))[: x.shape[0]],
    "slice": lambda g, x: x + functional.pad(x, (0, 0, 0, 1))[multiple(x.shape[0]) :][: x.shape[0]],
    "zeros ahead": lambda g, x: (
        x + torch.cat([torch.zeros(multiple(x.shape[0]), 32), x])[: x.shape[0]]
    ),
}


@pytest.mark.parametrize("name", BY_SIZES)
def test_a_shift_that_only_some_sizes_have(name: str) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match="got other tokens through"):
        follow(BY_SIZES[name])


def expert_rows(_: Any, x: torch.Tensor) -> torch.Tensor:
    rows = numbers(x)[:, None].expand(-1, 2).reshape(-1)
    return x[rows].view(x.shape[0], 2, 32).sum(1)


def positions(given: Any, x: torch.Tensor) -> torch.Tensor:
    row = (numbers(x)[:, None] >= given.offsets[None]).sum(1) - 1
    return x + (numbers(x) - given.offsets[row] + given.lengths[row])[:, None]


MOVED_BY_NOTHING: dict[str, Moved] = {
    "rows of experts": expert_rows,
    "positions": positions,
    "all of the step": lambda g, x: functional.pad(x, (0, 0, 0, 5))[: x.shape[0]],
    "flat and back": lambda g, x: x.reshape(-1)[: x.shape[0] * 32].view(x.shape[0], -1),
    "wide features": lambda g, x: x.repeat(1, 1000)[:, 9000:9032],
    "rows of the batch": lambda g, x: (
        x + (numbers(x)[:, None] >= g.offsets[None, : g.lengths.shape[0]]).sum(1, True)
    ),
}


@pytest.mark.parametrize("name", MOVED_BY_NOTHING)
def test_numbers_of_a_step_that_move_no_token(name: str) -> None:
    assert follow(MOVED_BY_NOTHING[name]) == 3
