"""Mixtures of which each rank has a share of the experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvgraph
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.rank_plan import plan_of
from kvgraph.compiler.frontends.ranks import cut
from kvgraph.compiler.plan import plan_deployment
from kvgraph.contract.manifest import read_manifest
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import UnsupportedError
from tests.support.artifacts import CHECKED
from tests.support.models import greedy_tokens, make_model, sizes_of

EXPERTS = "model.model.layers.0.mlp.experts"
ATTENTION = "model.model.layers.0.self_attn"


def plan(folder: Path, ranks: int = 2) -> dict[str, str]:
    model: Any = huggingface.load(folder, "float32", weightless=True)
    return dict(plan_of(model.module, model.architecture, ranks))


@pytest.fixture(scope="module")
def gpt_oss(model_folder: Callable[[str], Path]) -> Any:
    return huggingface.load(model_folder("gpt_oss"), "float32")


def test_each_rank_has_whole_experts_and_its_heads(gpt_oss: Any) -> None:
    whole = dict(gpt_oss.module.named_parameters())
    for rank in range(2):
        module = cut(gpt_oss, 2, rank).module
        own = dict(module.named_parameters())
        for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
            expected = whole[f"{EXPERTS}.{name}"].chunk(2)[rank]
            assert torch.equal(own[f"{EXPERTS}.{name}"], expected)
        for name, dim in (("sinks", 0), ("q_proj.bias", 0), ("k_proj.weight", 0)):
            expected = whole[f"{ATTENTION}.{name}"].chunk(2, dim)[rank]
            assert torch.equal(own[f"{ATTENTION}.{name}"], expected)
        expected = whole[f"{ATTENTION}.o_proj.weight"].chunk(2, 1)[rank]
        assert torch.equal(own[f"{ATTENTION}.o_proj.weight"], expected)
        router = "model.model.layers.0.mlp.router.weight"
        assert torch.equal(own[router], whole[router])
        table = dict(module.named_buffers())[f"{EXPERTS}.own_experts"][:, 0]
        assert table.tolist() == ([0, 1, -1, -1] if rank == 0 else [-1, -1, 0, 1])


def test_ranks_share_the_graph(compiled: Callable[..., Path]) -> None:
    manifest = read_manifest(compiled("gpt_oss", tp=2))
    assert "rank1/weights.safetensors" in manifest.files
    assert "rank1/model.onnx" not in manifest.files
    assert manifest.ops["kvgraph.experts"] == manifest.ops["kvgraph.route"] == 3
    (mixture,) = manifest.mixtures
    assert (mixture.experts, mixture.active) == (4, 2)  # of all ranks
    assert mixture.parameters == 3 * 2 * (3 * 64 * 96 + 96 + 96 + 64)  # of one


@pytest.mark.parametrize(
    "architecture",
    ["gpt_oss", *(pytest.param(name, marks=pytest.mark.slow) for name in ("granitemoe", "phimoe"))],
)
def test_the_check_compares_with_the_whole_model(architecture: str, tmp_path: Path) -> None:
    """Attention that transformers' plan leaves whole is four projections here."""
    folder = make_model(architecture, tmp_path / "m")
    manifest = kvgraph.compile(folder, tmp_path / "out", tp=2, page_size=16)
    assert manifest.notes[-1] == CHECKED
    assert "rank1/model.onnx" not in manifest.files


@pytest.mark.slow
def test_an_inner_width_that_ranks_do_not_divide(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_model("mixtral", tmp_path / "m", intermediate_size=33, num_local_experts=4)
    manifest = kvgraph.compile(folder, tmp_path / "out", tp=2, page_size=16, weights="fp32")
    assert manifest.notes[-1] == CHECKED
    # Its other implementations ask for strides of 16 bytes.
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager")
    prompt = np.random.default_rng(3).integers(3, 160, 40).tolist()
    greedy = kvgraph.SamplingParams(max_new_tokens=24, ignore_eos=True)
    with kvgraph.Engine(tmp_path / "out", num_pages=64) as engine:
        found = engine.generate([prompt], greedy)[0].token_ids
    assert found == greedy_tokens(model, prompt, 24)


def test_the_inner_width_comes_first(tmp_path: Path) -> None:
    """By expert, a step of few tokens waits for the rank that has most of their experts."""
    folder = make_model("mixtral", tmp_path / "even", num_local_experts=4)
    assert plan(folder)["model.layers.*.mlp.experts.gate_up_proj"] == "packed_colwise"
    odd = make_model("mixtral", tmp_path / "odd", intermediate_size=33, num_local_experts=4)
    assert plan(odd)["model.layers.*.mlp.experts.gate_up_proj"] == "grouped_gemm"


def test_a_plan_counts_a_rank_s_experts(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path]
) -> None:
    made = plan_deployment(
        model_folder("gpt_oss"),
        target="cpu",
        memory=1 << 30,
        max_seq_len=None,
        max_batch_size=8,
        dtype=None,
        cache_dtype=None,
        page_size=16,
        tp=2,
    )
    stored = read_layout(compiled("gpt_oss", tp=2) / "weights.safetensors")
    assert made.weights == pytest.approx(sum(at.nbytes for at in stored.values()), rel=0.02)
    assert made.warnings == []
    (first, *_) = sizes_of(model_folder("gpt_oss"), 2).experts
    assert (first.count, first.held, first.active) == (4, 2, 2)


def test_what_is_not_cut_by_expert(gpt_oss: Any, tmp_path: Path) -> None:
    three = make_model("gpt_oss", tmp_path / "three", num_local_experts=3)
    model = huggingface.load(three, "float32")
    sentence = "tp: expected ranks that divide the 3 experts of model.layers.0.mlp.experts, got 2"
    with pytest.raises(UnsupportedError, match=sentence):
        cut(model, 2, 0)
    # Neither the inner width nor the experts: the plan for tensor parallelism names what it cuts.
    odd = make_model("mixtral", tmp_path / "odd", intermediate_size=33, num_local_experts=3)
    sentence = "ranks that divide the 33 rows or columns of .*experts.gate_up_proj, got 2"
    with pytest.raises(UnsupportedError, match=sentence):
        cut(huggingface.load(odd, "float32"), 2, 0)
