"""A module of a user's own: what it returns, and does to the pool, is checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvgraph
from kvgraph import ops

PARAMS = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1, page_size=4)
VOCAB = 32


class Decoder(nn.Module):
    """One layer; `between` runs after the store and before the attention."""

    def __init__(self, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, 32, dtype=dtype)
        self.qkv = nn.Linear(32, 64, dtype=dtype)

    def between(self, pool: torch.Tensor) -> None: ...

    def forward(
        self, tokens: Any, offsets: Any, logits_indices: Any, pool: Any, *index: Any
    ) -> torch.Tensor:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        self.between(pool)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return (x + out.reshape(x.shape[0], -1))[logits_indices.long()] @ self.embed.weight.T


class Meddler(Decoder):
    def between(self, pool: torch.Tensor) -> None:
        pool.mul_(2)


def compile_module(module: nn.Module, out: Path, **options: Any) -> Any:
    settings = {"params": PARAMS, "vocab_size": VOCAB, "max_seq_len": 64}
    return kvgraph.compile(module, out, **settings | options)  # type: ignore[arg-type]


def test_it_generates(tmp_path: Path) -> None:
    compile_module(Decoder(), tmp_path / "out")
    tokens = kvgraph.Engine(tmp_path / "out", num_pages=16).generate([[1, 2, 3, 4, 5]])[0].token_ids
    assert len(tokens) == 59


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Decoder(VOCAB + 1), {}, r"logits: expected float32 \['num_logits', 32\] .*, 33\] from"),
        (
            Decoder(dtype=torch.bfloat16),
            {"backend": "torch", "params": None},
            "params: expected KVCacheParams to compile an nn.Module, got None",
        ),
        (
            Decoder(dtype=torch.bfloat16),
            {"backend": "torch"},
            r"logits: expected float32 .*got bfl",
        ),
        (Decoder(dtype=torch.bfloat16), {}, "expected float32 activations .*, got bfloat16"),
        (Decoder(), {"vocab_size": None}, "vocab_size: expected a value .*, got None"),
        (Decoder(), {"dtype": "bfloat16"}, "dtype: expected float32 from the module's .*bfloat16"),
        (Meddler(), {}, "store_kv of layer 0: expected a paged_attention .* right behind it"),
    ],
)
def test_what_does_not_fit_is_said(
    module: nn.Module, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        compile_module(module, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
