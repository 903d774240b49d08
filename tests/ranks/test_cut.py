"""Checkpoints cut into ranks, and what they are compiled to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import kvgraph
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.ranks import cut
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import ArtifactError, ParamsError, UnsupportedError
from kvgraph.kv.null import NullKVCacheManager
from tests.support.artifacts import CHECKED
from tests.support.models import make_model


@pytest.fixture(scope="module")
def tiny(model_folder: Callable[[str], Path]) -> Any:
    return huggingface.load(model_folder("tiny-llama"), "float32")


def test_ranks_together_hold_the_model(tiny: Any) -> None:
    parts = [dict(cut(tiny, 2, rank).module.named_parameters()) for rank in range(2)]
    for name, whole in tiny.module.named_parameters():
        shares = [part[name] for part in parts]
        if shares[0].shape == whole.shape:
            assert all(torch.equal(share, whole) for share in shares)
            assert "norm" in name
        else:
            dim = next(d for d in range(2) if shares[0].shape[d] != whole.shape[d])
            assert torch.equal(torch.cat(shares, dim), whole)


def test_tied_tables_stay_tied(tiny: Any) -> None:
    model = cut(tiny, 2, 1).module.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_model_itself_is_not_changed(tiny: Any) -> None:
    before = {name: p.shape for name, p in tiny.module.named_parameters()}
    cut(tiny, 4, 3)
    assert before == {name: p.shape for name, p in tiny.module.named_parameters()}


def test_packed_halves_are_cut_each(tmp_path: Path) -> None:
    model = huggingface.load(make_model("mixtral", tmp_path / "m"), "float32")
    name = "model.model.layers.0.mlp.experts.gate_up_proj"
    whole = dict(model.module.named_parameters())[name]
    own = dict(cut(model, 2, 1).module.named_parameters())[name]
    gate, up = whole.chunk(2, 1)
    assert torch.equal(own, torch.cat([gate.chunk(2, 1)[1], up.chunk(2, 1)[1]], 1))


@pytest.mark.slow
def test_gate_and_up_in_one_layer_are_cut_by_their_parts(tmp_path: Path) -> None:
    """GLM's plan gathers them; here only logits are gathered, and ranks share the graph."""
    manifest = kvgraph.compile(make_model("glm", tmp_path / "m"), tmp_path / "out", tp=2)
    assert "rank1/model.onnx" not in manifest.files
    assert manifest.ops["kvgraph.all_gather"] == 1
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")


def test_fewer_kv_heads_than_ranks_are_copied(model_folder: Callable[[str], Path]) -> None:
    model = huggingface.load(model_folder("llama"), "float32")
    whole = dict(model.module.named_parameters())
    heads = whole["model.model.layers.0.self_attn.k_proj.weight"].chunk(2)
    for rank in range(4):
        own = dict(cut(model, 4, rank).module.named_parameters())
        assert torch.equal(own["model.model.layers.0.self_attn.k_proj.weight"], heads[rank // 2])
        queries = whole["model.model.layers.0.self_attn.q_proj.weight"].chunk(4)
        assert torch.equal(own["model.model.layers.0.self_attn.q_proj.weight"], queries[rank])


def test_files(compiled: Callable[..., Path]) -> None:
    folder = compiled("tiny-llama", tp=2)
    manifest = read_manifest(folder)
    names = {"model.onnx", "weights.safetensors", "rank1/weights.safetensors"}
    assert names <= set(manifest.files)
    assert "rank1/model.onnx" not in manifest.files  # ranks share the graph
    assert manifest.ops["kvgraph.all_reduce"] == 9
    said = [(c.op, c.count, c.rows, c.bytes) for c in manifest.collectives]
    assert said == [
        ("all_reduce", 7, "tokens", 512),
        ("all_reduce", 2, "logits", 512),
        ("all_gather", 1, "logits", 4096),
    ]
    fused = next(entry for entry in manifest.passes if entry.name == "fuse_all_reduce")
    assert (fused.applied, fused.unmatched) == (8, [])


@pytest.mark.slow
def test_same_bytes_again(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    for name in ("a", "b"):
        kvgraph.compile(model_folder("llama"), tmp_path / name, tp=2, page_size=16, check=False)
    a, b = (read_manifest(tmp_path / name) for name in ("a", "b"))
    assert a == b
    assert not a.nondeterministic_files


@pytest.mark.parametrize("model", ["tiny-llama", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_symbols_of_every_rank_are_the_null_managers(
    model: str, compiled: Callable[..., Path]
) -> None:
    artifact = kvgraph.load(compiled(model, tp=2))
    params = artifact.params()
    null = NullKVCacheManager(
        params,
        max_batch_size=1,
        max_seq_len=64,
        num_layers=None,
        devices=params.devices,
        session=None,
        available_cache_memory=0,
        page_size=params.page_size,
    )
    records = null.get_symbolic_inputs()
    assert len(records) == 2
    for rank, record in enumerate(records):
        for mine, theirs in zip(artifact.signature.inputs[3:], record, strict=True):
            assert (mine.name, mine.dtype, mine.shape) == (theirs.name, theirs.dtype, theirs.shape)
            assert theirs.device.index in (rank, 0)  # max_lengths is on the host


@pytest.mark.slow
def test_check_compares_with_the_whole_model(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    manifest = kvgraph.compile(model_folder("gemma2"), tmp_path / "out", tp=2, page_size=16)
    assert manifest.notes[-1] == CHECKED


def refused(error: type[Exception], sentence: str, model: Any, out: Path, **options: Any) -> None:
    with pytest.raises(error, match=sentence):
        kvgraph.compile(model, out, **options)
    assert not out.exists()


def test_ranks_that_no_model_has(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    out, model = tmp_path / "out", model_folder("llama")
    for tp in (0, 65):
        refused(UnsupportedError, f"tp: expected 1 to 64 ranks, got {tp}", model, out, tp=tp)
    sentence = "the 2 kv heads of 'llama', or a multiple of them, got 3"
    refused(UnsupportedError, sentence, model, out, tp=3)
    sentence = "tp: expected ranks that divide the 4 attention heads of 'llama', got 8"
    refused(UnsupportedError, sentence, model, out, tp=8)
    sentence = "cache: expected 'paged' for 2 ranks, got 'padded'"
    refused(UnsupportedError, sentence, model, out, tp=2, cache="padded")
    for backend in ("onnx", "tensorrt"):
        sentence = f"tp: expected 1 for backend {backend} on cuda, which has no collectives yet"
        refused(UnsupportedError, sentence, model, out, tp=2, target="cuda:sm_90", backend=backend)
    one = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=16, num_layers=2, page_size=16)
    sentence = r"params.devices: expected 2 devices per replica \(tp\), got 1 shards"
    refused(UnsupportedError, sentence, model, out, tp=2, params=one)


def test_models_that_cannot_be_cut(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    sentence = "tp: expected a plan for tensor parallelism in .* 'gpt2', or .*, got neither"
    refused(UnsupportedError, sentence, model_folder("gpt2"), out, tp=2)
    odd = make_model("llama", tmp_path / "odd", intermediate_size=97)
    sentence = "ranks that divide the 97 rows or columns of .*layers.0.mlp.gate_proj.weight, got 2"
    refused(UnsupportedError, sentence, odd, out, tp=2)
    model = huggingface.load(model_folder("llama"), "float32")
    plan = dict(model.module.model.tp_plan) | {"model.layers.*.mlp.up_proj": "by_token"}
    monkeypatch.setattr(type(model.module.model), "tp_plan", plan)
    with pytest.raises(UnsupportedError, match=r"layers.0.mlp.up_proj of 'llama': .*'by_token'"):
        cut(model, 2, 0)


def test_modules_of_another_layout_are_refused(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = huggingface.load(model_folder("llama"), "float32")
    plan = dict(model.module.model.tp_plan) | {"model.layers.*.input_layernorm": "colwise"}
    monkeypatch.setattr(type(model.module.model), "tp_plan", plan)
    sentence = r"layers.0.input_layernorm of 'llama': expected a Linear to cut 'colwise', got Llama"
    with pytest.raises(UnsupportedError, match=sentence):
        cut(model, 2, 0)


def test_a_module_of_ones_own_has_no_plan(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, tokens: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
            return tokens[:, None].float().expand(-1, 8)

    devices = kvgraph.virtual_devices("cpu", 2)
    params = kvgraph.KVCacheParams(
        "float32", n_kv_heads=2, head_dim=16, num_layers=1, devices=tuple(devices)
    )
    sentence = "tp: expected a checkpoint folder.* got an nn.Module"
    options = {"params": params, "vocab_size": 8, "max_seq_len": 16, "tp": 2}
    refused(UnsupportedError, sentence, Own(), tmp_path / "out", **options)


@pytest.mark.parametrize("shards", [0, 65, "2", None])
def test_a_manifest_of_impossible_ranks_is_refused(
    shards: Any, compiled: Callable[..., Path], tmp_path: Path
) -> None:
    from kvgraph.contract.plain import to_json
    from kvgraph.contract.shards import shards_of

    layout = json.loads((compiled("tiny-llama", tp=2) / "manifest.json").read_bytes())["layout"]
    with pytest.raises(ParamsError, match="n_shards: expected 1 to 64 from the layout, got"):
        shards_of(layout | {"n_shards": shards})
    from kvgraph.contract.layouts import require_layout

    with pytest.raises(ValueError, match="n_shards"):
        require_layout("layout", json.loads(to_json(layout | {"n_shards": shards})))


def test_a_rank_without_weights_is_refused(compiled: Callable[..., Path], tmp_path: Path) -> None:
    import shutil

    folder = tmp_path / "copy"
    shutil.copytree(compiled("tiny-llama", tp=2), folder)
    (folder / "rank1" / "weights.safetensors").unlink()
    with pytest.raises(ArtifactError, match=r"rank1/weights.safetensors: expected .* got none"):
        kvgraph.load(folder)
