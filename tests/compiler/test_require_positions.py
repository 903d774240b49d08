"""A module that numbers the tokens of a step from 0 is refused; numbers that choose are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import kvgraph
from kvgraph import KVCacheParams, ops

PARAMS = KVCacheParams("float32", n_kv_heads=1, head_dim=16, num_layers=1, page_size=16)
Positions = Callable[["Model", torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Model(nn.Module):
    """One layer whose hidden states get a learned embedding of `positions`."""

    def __init__(self, positions: Positions) -> None:
        super().__init__()
        self.positions = positions
        self.embed, self.learned = nn.Embedding(32, 16), nn.Embedding(64, 16)

    def forward(
        self,
        tokens: torch.Tensor,
        input_row_offsets: torch.Tensor,
        logits_indices: torch.Tensor,
        kv_blocks: torch.Tensor,
        cache_lengths: torch.Tensor,
        lookup_table: torch.Tensor,
        max_lengths: torch.Tensor,
    ) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(self, tokens, input_row_offsets, cache_lengths)
        index = (input_row_offsets, cache_lengths, lookup_table)
        ops.store_kv(kv_blocks, x[:, None], x[:, None], *index, layer=0)
        out = ops.paged_attention(x[:, None], kv_blocks, *index, max_lengths, layer=0, scale=0.25)
        return out[logits_indices, 0] @ self.embed.weight.T


def count(tokens: torch.Tensor) -> torch.Tensor:
    return torch.arange(tokens.shape[0], dtype=torch.int32)


def of_rows(
    model: Model, tokens: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor
) -> torch.Tensor:
    row = (count(tokens)[:, None] >= offsets[None]).sum(-1) - 1
    learned: torch.Tensor = model.learned(count(tokens) - offsets[row] + lengths[row])
    return learned


def from_0(model: Model, tokens: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    learned: torch.Tensor = model.learned(count(tokens) + 2)
    return learned


def as_fractions(model: Model, tokens: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return torch.log1p(count(tokens).float())[:, None]


def chosen(model: Model, tokens: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
    return model.embed(tokens)[count(tokens)]


def compiled(positions: Positions, out: Path) -> None:
    torch.manual_seed(0)
    kvgraph.compile(Model(positions), out, params=PARAMS, vocab_size=32, max_seq_len=60)


@pytest.mark.parametrize("positions", [of_rows, chosen])
def test_positions_of_rows_and_numbers_that_choose(positions: Positions, tmp_path: Path) -> None:
    compiled(positions, tmp_path / "out")


@pytest.mark.parametrize("positions", [from_0, as_fractions])
def test_numbers_of_a_step(positions: Positions, tmp_path: Path) -> None:
    said = (
        r"^positions: expected those of cache_lengths, got numbers of arange.* at .*"
        r"test_require_positions.py:\d+: x = self.embed.*: its code numbers the tokens of a "
        "step from 0, whatever their rows$"
    )
    with pytest.raises(kvgraph.UnsupportedError, match=said):
        compiled(positions, tmp_path / "out")
    assert not (tmp_path / "out").exists()
