"""Identity of pages: of the program that computes them and of the weights."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, tanh
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

import kvgraph
from kvgraph import ops
from kvgraph.compiler.identity import _lines
from kvgraph.contract.manifest import read_manifest
from tests.support.models import make_model

PARAMS = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1, page_size=4)
VOCAB = 32


def decoder(activation: Any) -> nn.Module:
    """Modules of one class name and equal weights, whose `forward` differs in `activation`."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(VOCAB, 32)
            self.qkv = nn.Linear(32, 64)

        def forward(self, tokens: Any, offsets: Any, at: Any, pool: Any, *index: Any) -> Any:
            lengths, table, most = index
            x = activation(self.embed(tokens))
            q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
            ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
            out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
            return (x + out.reshape(x.shape[0], -1))[at.long()] @ self.embed.weight.T

    return Decoder()


def compile_module(module: nn.Module, out: Path) -> Path:
    kvgraph.compile(module, out, params=PARAMS, vocab_size=VOCAB, max_seq_len=128)
    return out


def test_modules_of_one_class_and_weights_share_no_page(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    prompts = [random.integers(0, VOCAB, 24).tolist() for _ in range(20)]
    sampling = kvgraph.SamplingParams(max_new_tokens=8)
    first = compile_module(decoder(torch.tanh), tmp_path / "first")
    second = compile_module(decoder(torch.sin), tmp_path / "second")
    assert read_manifest(first).model.identity != read_manifest(second).model.identity
    expected = kvgraph.Engine(second, num_pages=256).generate(prompts, sampling)
    with kvgraph.Engine(first, num_pages=256, disk=tmp_path / "pages") as engine:
        engine.generate(prompts, sampling)
    with kvgraph.Engine(second, num_pages=256, disk=tmp_path / "pages") as engine:
        found = engine.generate(prompts, sampling)
        assert engine.kv.get_metrics_aggregated().disk_blocks_read == 0
    assert [done.token_ids for done in found] == [done.token_ids for done in expected]


def by_count(x: torch.Tensor) -> torch.Tensor:
    """With an operator on sizes that is a Python function, `torch.sym_float`."""
    count = torch.sym_float(x.shape[0])
    return torch.tanh(x) * (count / count)


COMPILE = """
import sys
from tests.compiler import test_identity
from pathlib import Path
activation = getattr(test_identity, sys.argv[2])
test_identity.compile_module(test_identity.decoder(activation), Path(sys.argv[1]))
"""


KINDS = """
import sys, torch, kvgraph, transformers
kinds = ["sliding_attention", "full_attention"]
config = transformers.Gemma3TextConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=16,
    num_attention_heads=2, num_key_value_heads=1, layer_types=kinds, sliding_window=8,
)
torch.manual_seed(0)
transformers.Gemma3ForCausalLM(config).save_pretrained(sys.argv[1])
kvgraph.compile(sys.argv[1], sys.argv[2], max_seq_len=64)
"""


def test_equal_in_whatever_order_a_set_is(tmp_path: Path) -> None:
    """transformers makes the rotary embeddings of Gemma's two kinds of layers in a set's order."""
    found = set()
    for seed in ("0", "1"):
        model, out = tmp_path / f"model{seed}", tmp_path / f"out{seed}"
        command = [sys.executable, "-c", KINDS, str(model), str(out)]
        environment = os.environ | {"PYTHONHASHSEED": seed}
        subprocess.run(command, check=True, timeout=300, env=environment, capture_output=True)
        found.add(read_manifest(out).model.identity)
    assert len(found) == 1


def test_the_order_of_a_read_and_a_write_counts() -> None:
    def program(*, reads_first: bool) -> str:
        def run(pool: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor]:
            if reads_first:
                found = pool.sum()
                pool.add_(x)
            else:
                pool.add_(x)
                found = pool.sum()
            return (found,)

        graph = make_fx(run)(torch.zeros(2), torch.ones(2)).graph
        return "\n".join(_lines(graph, {}, GraphModule({}, graph)))

    assert program(reads_first=True) != program(reads_first=False)


@pytest.mark.parametrize("activation", [tanh, by_count])
def test_equal_in_every_process_and_for_every_pool(activation: Any, tmp_path: Path) -> None:
    here = compile_module(decoder(activation), tmp_path / "here")
    command = [sys.executable, "-c", COMPILE, str(tmp_path / "there"), activation.__name__]
    subprocess.run(command, cwd=Path(__file__).parents[2], check=True, timeout=300)
    assert read_manifest(here).model.identity == read_manifest(tmp_path / "there").model.identity
    engines = [kvgraph.Engine(here, num_pages=pages) for pages in (8, 64)]
    assert engines[0].kv.fingerprint == engines[1].kv.fingerprint


def test_what_changes_an_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A release of transformers that computes something else; other weights."""
    from transformers.models.llama import modeling_llama

    def identity(seed: int = 0) -> str:
        folder = make_model("llama", tmp_path / f"model-{seed}", num_hidden_layers=1, seed=seed)
        kvgraph.compile(folder, tmp_path / "out", force=True)
        return read_manifest(tmp_path / "out").model.identity

    before = identity()
    assert identity() == before
    assert identity(seed=1) != before
    original = modeling_llama.LlamaRMSNorm.forward

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return original(self, x + 1e-3)

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", forward)
    assert identity() != before
