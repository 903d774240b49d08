"""Routers: every family's becomes one op a layer; what is left alone says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_experts import fuse_experts
from kvgraph.compiler.passes.fuse_router import ROUTE, fuse_router
from kvgraph.compiler.passes.pack_experts import PACKED, pack_experts
from kvgraph.compiler.passes.pack_linear import pack_linear
from kvgraph.ops._route import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN
from tests.compiler.test_pack_experts import FAMILIES, folder_of, logits
from tests.support.models import LATENT, make_model
from tests.support.programs import packed_by, program_of
from tests.support.routers import (
    LEFT,
    MaskedByZero,
    OfTwoRanks,
    ReadsValues,
    Routed,
    Twice,
    TwoMixtures,
    TwoMixturesInHalves,
)

TOPK = torch.ops.aten.topk.default

ATTRIBUTES: dict[str, dict[str, float]] = {
    "mixtral": {"scores": SOFTMAX, "normalize": 1},
    "qwen2_moe": {"scores": SOFTMAX},
    "qwen3_moe": {"scores": SOFTMAX, "normalize": 1},
    "gpt_oss": {"scores": SOFTMAX_OF_CHOSEN},
    "granitemoe": {"scores": SOFTMAX_OF_CHOSEN},
    "olmoe": {"scores": SOFTMAX},
    "glm4_moe": {"scores": SIGMOID, "normalize": 1, "epsilon": 1e-20, "scale": 1.0},
    "dots1": {"scores": SIGMOID, "scale": 1.0},
    "ernie4_5_moe": {"scores": SOFTMAX, "normalize": 1, "least_total": 1e-12},
    "hunyuan_v1_moe": {"scores": SOFTMAX, "normalize": 1},
    "minimax_m2": {"scores": SIGMOID, "normalize": 1},
    "deepseek_v3": {"scores": SIGMOID, "normalize": 1, "epsilon": 1e-20, "scale": 2.5},
}
"""Of `route` in each family that has it; 2 experts are chosen. phimoe has two choices in turn."""


def routed(program: ExportedProgram) -> PassReport:
    drop_no_ops(program.graph)
    packed_by(pack_experts, program, None)
    return fuse_router(program)


def routes(program: ExportedProgram) -> list[torch.fx.Node]:
    return [node for node in program.graph.nodes if node.target is ROUTE]


@pytest.mark.parametrize("family", FAMILIES)
def test_each_router_becomes_one_node_and_chooses_the_same(family: str, tmp_path: Path) -> None:
    layers, _ = FAMILIES[family]
    program, signature = program_of(folder_of(family, tmp_path), "float32")
    before = program.module()
    report = routed(program)
    if family in ATTRIBUTES:
        assert (report.applied, report.unmatched) == (layers, [])
        expected_attributes = {"num_active": 2, **ATTRIBUTES[family]}
        assert [node.kwargs for node in routes(program)] == [expected_attributes] * layers
        assert not [node for node in program.graph.nodes if node.target is TOPK]
    else:
        why = "expected what is chosen, got aten.concat.default"
        assert [each.partition(": ")[2] for each in report.unmatched] == [why] * layers
    found, expected = (logits(module, signature) for module in (program.module(), before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


WIDENED = ("glm4_moe", "dots1", "ernie4_5_moe", "hunyuan_v1_moe", "deepseek_v3")
"""Whose routers multiply in float32; of the others logits are rounded, and the op widens them."""


@pytest.mark.parametrize("family", ATTRIBUTES)
def test_routers_in_bfloat16_on_a_gpu(family: str, tmp_path: Path) -> None:
    """Weights are not rounded to bfloat16, as families do that do not ask for float32."""
    layers, _ = FAMILIES[family]
    program, signature = program_of(folder_of(family, tmp_path), "bfloat16")
    drop_no_ops(program.graph)
    packed_by(fuse_experts, program, None)
    before = program.module()
    report = fuse_router(program)
    assert (report.applied, report.unmatched) == (layers, [])
    nodes = routes(program)
    assert [node.kwargs for node in nodes] == [{"num_active": 2, **ATTRIBUTES[family]}] * layers
    read = {node.args[0].meta["val"].dtype for node in nodes}  # type: ignore[union-attr]
    assert read == {torch.float32 if family in WIDENED else torch.bfloat16}
    assert not [node for node in program.graph.nodes if node.target is TOPK]
    found, expected = (
        logits(module, signature, "bfloat16").float() for module in (program.module(), before)
    )
    assert (found - expected).norm() <= 0.02 * expected.norm()


GROUPS: dict[str, tuple[dict[str, Any], dict[str, float]]] = {
    "deepseek_v3": ({}, {"scores": SIGMOID, "normalize": 1, "epsilon": 1e-20, "group_best": 2}),
    "deepseek_v2": ({"topk_method": "group_limited_greedy"}, {"scores": SOFTMAX, "group_best": 1}),
}


@pytest.mark.parametrize("family", GROUPS)
def test_groups_of_experts(family: str, tmp_path: Path) -> None:
    own, attributes = GROUPS[family]
    sizes = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    }
    folder = make_model(family, tmp_path, **{**LATENT, **sizes, **own})
    program, signature = program_of(folder, "float32")
    before = program.module()
    assert routed(program).unmatched == []
    (node,) = routes(program)
    counts = {"num_active": 3, "scale": 1.5, "num_groups": 4, "active_groups": 2}
    assert node.kwargs == {**counts, **attributes}
    found, expected = (logits(module, signature) for module in (program.module(), before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# -- routers as they are written


def exported(module: nn.Module) -> ExportedProgram:
    rows = torch.export.Dim("rows", min=2)
    return torch.export.export(module, (rows_of(9),), dynamic_shapes=[{0: rows}])


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, 16, generator=torch.Generator().manual_seed(0))


MATCHED = (Routed, MaskedByZero, Twice, TwoMixtures, ReadsValues, OfTwoRanks)


@pytest.mark.parametrize("kind", [*MATCHED, *LEFT])
def test_computes_the_same_and_says_why_it_does_not_match(kind: type[Routed]) -> None:
    module = kind()
    program = exported(module)
    report = routed(program)
    why = LEFT.get(kind)
    assert [each.partition(": ")[2] for each in report.unmatched] == ([why] if why else [])
    assert len(routes(program)) == (0 if why else 1)
    assert [node for node in program.graph.nodes if node.target is PACKED]
    with torch.no_grad():
        found, expected = program.module()(rows_of(9)), module(rows_of(9))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_two_mixtures_with_weights_of_their_own_take_one_choice() -> None:
    module = TwoMixturesInHalves()
    program = exported(module)
    report = routed(program)
    assert (report.applied, report.unmatched) == (1, [])
    assert not [node for node in program.graph.nodes if node.target is TOPK]
    with torch.no_grad():
        found, expected = program.module()(rows_of(9)), module(rows_of(9))
    assert (found - expected).norm() <= 1e-3 * expected.norm()


class RoundedOfTwoRanks(OfTwoRanks):
    """As a rank of two has them where activations are halves."""

    def choose(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights, ids = super().choose(logits.half().float())
        return weights.half(), ids


def test_weights_of_a_rank_stay_in_float32() -> None:
    module = RoundedOfTwoRanks()
    program = exported(module)
    report = routed(program)
    assert (report.applied, report.unmatched) == (1, [])
    (node,) = routes(program)
    assert node.args[0].meta["val"].dtype == torch.float16  # type: ignore[union-attr]
    (experts,) = [node for node in program.graph.nodes if node.target is PACKED]
    assert experts.args[2].target is torch.ops.aten.where.ScalarOther
    with torch.no_grad():
        found, expected = program.module()(rows_of(9)), module(rows_of(9))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


class AfterALayer(Routed):
    """A linear layer whose result reaches a choice of experts, through another router alone."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(nn.functional.layer_norm(x + self.before(x), (16,)))


def test_a_layer_before_a_router_is_packed() -> None:
    program = exported(AfterALayer())
    assert routed(program).applied == 1
    report = packed_by(pack_linear, program, 8)
    assert report.applied == 1
    assert [each.partition(": ")[2] for each in report.unmatched] == [
        "a router, which keeps its weights"
    ]
