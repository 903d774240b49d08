"""Layers that a model calls more than once: packed once, whatever stands next to them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn

import kvgraph
from kvgraph import ops
from kvgraph.contract.safetensors import read_layout

WIDTH, HEADS, DIM, VOCAB = 64, 4, 16, 48
PARAMS = kvgraph.KVCacheParams("float32", HEADS, DIM, num_layers=2, page_size=16)


class Shared(nn.Module):
    """Two layers with one set of weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.q, self.k, self.v, self.w = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def parts(self, x: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)

    def forward(self, tokens: Any, offsets: Any, chosen: Any, pool: Any, *index: Any) -> Any:
        lengths, table, most = index
        x = self.embed(tokens)
        for layer in range(2):
            q, k, v = (each.view(-1, HEADS, DIM) for each in self.parts(x, layer))
            ops.store_kv(pool, k, v, offsets, lengths, table, layer=layer)
            out = ops.paged_attention(
                q, pool, offsets, lengths, table, most, layer=layer, scale=0.3
            )
            x = x + self.w(out.reshape(-1, WIDTH))
        return x[chosen.long()] @ self.embed.weight.T


class Mixed(Shared):
    """The second layer has the queries of the first, and other values."""

    def parts(self, x: torch.Tensor, layer: int) -> tuple[torch.Tensor, ...]:
        return self.q(x), self.k(x), (self.w if layer else self.v)(x)


@pytest.mark.parametrize("options", [{}, {"backend": "torch"}, {"target": "cuda:sm_90"}])
@pytest.mark.parametrize(("module", "nodes"), [(Shared, 2), (Mixed, 3)])
def test_each_node_of_other_layers_has_its_weights_once(
    module: type[nn.Module], nodes: int, options: dict[str, str], tmp_path: Path
) -> None:
    """Compile's own check compares the logits with the module's."""
    out = tmp_path / "a"
    devices = kvgraph.virtual_devices(options.get("target", "cpu"))
    params = replace(PARAMS, devices=devices)
    manifest = kvgraph.compile(
        module(), out, params=params, vocab_size=VOCAB, max_seq_len=64, weights="int8", **options
    )
    op = "kvgraph.quantized_linear" if "target" in options else "kvgraph.linear"
    assert manifest.ops[op] == 4 + 1  # and the head
    names = set(read_layout(out / "weights.safetensors"))
    if (out / "model.onnx").is_file():  # which holds small ones itself
        graph = onnx.load(out / "model.onnx", load_external_data=False).graph
        names |= {each.name for each in graph.initializer}
    stored = [name for name in names if name.endswith(".packed_bias")]
    assert len(stored) == nodes, names
