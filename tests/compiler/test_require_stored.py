"""What a module may do with its caches: calls, layers and params that no step could run."""

from __future__ import annotations

from dataclasses import replace
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
    """One layer. `changes`: operand -> what the cache ops get instead of it; attribute -> its
    value; `store` False: nothing is stored."""

    def __init__(self, **changes: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 32)
        self.qkv = nn.Linear(32, 64)
        self.changes = changes

    def forward(
        self, tokens: Any, offsets: Any, logits_indices: Any, pool: Any, *index: Any
    ) -> torch.Tensor:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 8).split((4, 2, 2), dim=1)
        operands = {"q": q, "k": k, "v": v, "pool": pool, "table": table}
        operands |= {n: self.changes[n](t) for n, t in operands.items() if n in self.changes}
        q, k, v, pool, table = operands.values()
        kept = {n: a for n, a in self.changes.items() if n not in (*operands, "store")}
        given = {"layer": 0, "scale": 0.3} | kept
        if self.changes.get("store", True):
            ops.store_kv(pool, k, v, offsets, lengths, table, layer=given["layer"])
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, **given)
        x = x + out.reshape(x.shape[0], -1).sum(-1, keepdim=True)
        return x[logits_indices] @ self.embed.weight.T


def compile_module(module: nn.Module, out: Path, **options: Any) -> Any:
    settings = {"params": PARAMS, "vocab_size": VOCAB, "max_seq_len": 64}
    return kvgraph.compile(module, out, **settings | options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": lambda q: q[:, :3]}, "q: dim num_heads: expected a multiple of the 2 kv .*, got 3"),
        ({"q": lambda q: q[..., :4]}, "dim head_dim: expected 4 as q has it, got 8"),
        (
            {"q": lambda q: q.half()},
            "layer 0: update_and_attend: k: expected dtype float16 of q, got",
        ),
        ({"k": lambda k: k[:, :1]}, "store_kv: k: dim num_kv_heads: expected 2 as kv_blocks has i"),
        ({"k": lambda k: k[1:], "v": lambda v: v[1:]}, "k: dim total_seq_len: expected .*, got "),
        ({"v": lambda v: v[..., :4]}, "out: dim v_head_dim: expected 4 as v has it, got 8"),
        (
            {"v": lambda v: v[..., :4], "v_head_dim": 4},
            "layer 0 of leaf '': v_head_dim: expected 8 from the cache's params, got 4 from its",
        ),
        ({"table": lambda t: t.long()}, "lookup_table: expected dtype int32, got int64"),
        ({"table": lambda t: t[0]}, "lookup_table: expected rank 2, got 1"),
        (
            {"pool": lambda p: p.clone()},
            "store_kv of layer 0: kv_blocks: expected a pool of the .*",
        ),
        ({"pool": lambda p: p[:, :1]}, r"kv_blocks: dim kv_dim: expected 2 \(K, then V\), got 1"),
        ({"pool": lambda p: p[:, :, :, ::2]}, "kv_blocks: expected a contiguous buffer to write"),
        ({"v_head_dim": 99}, "v_head_dim: expected at most head_dim 8, got 99"),
        ({"v_head_dim": -1}, "v_head_dim: expected at most head_dim 8, got -1"),
        ({"softcap": -1.0}, "softcap: expected at least 0, and finite in float32, got -1"),
        ({"scale": float("nan")}, "scale: expected a finite number in float32, got nan"),
        ({"window": -1}, "window: expected at least 0, got -1"),
        ({"causal": 2}, "causal: expected 0 or 1, got 2"),
        ({"causal": 0}, "layer 0: update_and_attend: expected causal=1, since a prompt may come"),
        ({"layer": 99}, "layer: expected one of the 1 layers of kv_blocks, got 99"),
        ({"layer": -1}, "layer: expected one of the 1 layers of kv_blocks, got -1"),
        (
            {"store": False},
            "layer 0: expected a store_kv of its new tokens before its .*, got none",
        ),
    ],
)
def test_calls_that_no_step_could_run_do_not_compile(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        compile_module(Decoder(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_line_that_calls_the_op_is_named(tmp_path: Path) -> None:
    with pytest.raises(kvgraph.UnsupportedError) as refused:
        compile_module(Decoder(window=-1), tmp_path / "out")
    sentence = "architecture 'Decoder': paged_attention: window: expected at least 0, got -1, at "
    assert str(refused.value).startswith(f"{sentence}{__file__}:")
    assert str(refused.value).endswith(": out = ops.paged_attention(q, pool, offsets, lengths, "
                                       "table, most, **given)")  # fmt: skip


def on(*devices: kvgraph.Device, **changes: Any) -> kvgraph.KVCacheParams:
    return replace(PARAMS, devices=devices, **changes)


SM_90 = kvgraph.virtual_devices("cuda:sm_90")[0]


@pytest.mark.parametrize(
    ("target", "backend", "params", "message"),
    [
        *(
            ("cuda:sm_86", backend, PARAMS, "expected devices of target 'cuda:sm_86', got cpu; pas")
            for backend in ("torch", "onnx", "tensorrt")
        ),
        ("cuda:sm_86", None, on(SM_90), r"of target 'cuda:sm_86', got virtual cuda:0\(sm_90\); "),
        ("cpu", None, on(SM_90), r"got virtual .*; pass devices=kvgraph.virtual_devices\('cpu'\)"),
        ("cpu", None, on(kvgraph.Device("cpu"), SM_90, data_parallel_degree=2), "got virtual cuda"),
        ("cpu", None, on(*[kvgraph.Device("cpu")] * 2), "one device per replica, got 2 shards"),
        (
            "cpu",
            None,
            replace(PARAMS, is_mla=True),
            "is_mla: expected False to compile or run .*, ",
        ),
        (
            "cpu",
            None,
            replace(PARAMS, page_size=65537),
            "page_size: expected 1 to 65536 tokens, got",
        ),
    ],
)
def test_params_that_the_target_cannot_bind(
    target: str, backend: str | None, params: kvgraph.KVCacheParams, message: str, tmp_path: Path
) -> None:
    trees = kvgraph.MultiKVCacheParams.from_params({"a": params, "b": params})
    for given in (params, trees):
        with pytest.raises(kvgraph.UnsupportedError, match=message):
            compile_module(
                Decoder(), tmp_path / "out", target=target, backend=backend, params=given
            )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "params",
    [on(kvgraph.Device("cpu:3")), on(*[kvgraph.Device("cpu")] * 2, data_parallel_degree=2)],
    ids=["device 3", "two replicas"],
)
def test_a_graph_is_for_one_shard_of_any_deployment(
    params: kvgraph.KVCacheParams, tmp_path: Path
) -> None:
    manifest = compile_module(Decoder(), tmp_path / "out", params=params)
    assert manifest.inputs == compile_module(Decoder(), tmp_path / "one").inputs
    assert kvgraph.Engine(tmp_path / "out", num_pages=16).generate([[1, 2, 3]])[0].token_ids


def test_a_layer_that_is_never_stored(tmp_path: Path) -> None:
    two = replace(PARAMS, num_layers=2)
    with pytest.raises(kvgraph.UnsupportedError, match="layer 1 of the cache: expected 1 calls"):
        compile_module(Decoder(), tmp_path / "out", params=two)


class Mixed(Decoder):
    """Attends over the pool of cache a by the table of cache b."""

    def forward(self, tokens: Any, offsets: Any, logits_indices: Any, *cache: Any) -> torch.Tensor:
        pool, lengths, _, most, _, _, table, _ = cache
        return super().forward(tokens, offsets, logits_indices, pool, lengths, table, most)


def test_the_table_of_another_cache(tmp_path: Path) -> None:
    params = kvgraph.MultiKVCacheParams.from_params({"a": PARAMS, "b": PARAMS})
    message = "store_kv of layer 0: lookup_table: expected 'a.lookup_table' .*, got 'b.lookup_tabl"
    with pytest.raises(kvgraph.UnsupportedError, match=message):
        compile_module(Mixed(), tmp_path / "out", params=params)


class Reader(nn.Module):
    """Writes V of a padded cache, through a view, and K only where told."""

    def __init__(self, *, k: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 8)
        self.k = k

    def forward(
        self, tokens: Any, offsets: Any, logits_indices: Any, k: Any, v: Any, *_: Any
    ) -> torch.Tensor:
        x = self.embed(tokens)
        for cache in (k, v) if self.k else (v,):
            cache.unbind()[0][0].narrow(0, 0, 1).copy_(x[:1, None].expand(1, 2, 8))
        x = x + k[0, 0, 0, 0] + v[0, 0, 0, 0]
        return x[logits_indices] @ self.embed.weight.T


def test_a_padded_cache_that_is_never_written(tmp_path: Path) -> None:
    params = replace(PARAMS, cache_strategy=kvgraph.KVCacheStrategy.PADDED)
    with pytest.raises(kvgraph.UnsupportedError, match="k_cache: expected a module that writes it"):
        compile_module(Reader(k=False), tmp_path / "out", params=params)
    options = {"backend": "torch", "check": False}  # it computes nothing of use
    compile_module(Reader(k=True), tmp_path / "out", params=params, **options)
