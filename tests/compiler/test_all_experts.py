"""Llama 4's mixtures, which run all experts: the chosen one alone is run; others say why not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from transformers import AutoModelForCausalLM

import kvgraph
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_experts import FUSED, fuse_experts
from kvgraph.compiler.passes.pack_experts import PACKED, pack_experts
from tests.compiler.test_pack_experts import logits
from tests.support.models import greedy_tokens, make_model
from tests.support.programs import packed_by, program_of

SIZES = {
    "num_hidden_layers": 3,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "attention_chunk_size": 8,
    "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
    "no_rope_layers": [1, 0, 1],
}
OPS: dict[Callable[..., PassReport], object] = {pack_experts: PACKED, fuse_experts: FUSED}


def llama4(folder: Path, **changes: Any) -> Path:
    return make_model("llama4_text", folder, **SIZES | changes)


def rewritten(program: ExportedProgram, by: Callable[..., PassReport]) -> PassReport:
    drop_no_ops(program.graph)
    return packed_by(by, program, None)


@pytest.mark.parametrize(
    ("by", "dtype", "limit"),
    [
        (pack_experts, "float32", 1e-5),
        (pack_experts, "bfloat16", 0.05),
        (fuse_experts, "float32", 1e-5),
        (fuse_experts, "bfloat16", 0.05),
    ],
)
def test_only_the_chosen_expert_is_run(
    by: Callable[..., PassReport], dtype: str, limit: float, tmp_path: Path
) -> None:
    program, signature = program_of(llama4(tmp_path), dtype)
    before = program.module()
    report = rewritten(program, by)
    assert (report.applied, report.unmatched) == (1, [])
    assert len([node for node in program.graph.nodes if node.target is OPS[by]]) == 1
    assert not [name for name in program.state_dict if name.endswith("experts.down_proj")]
    found, expected = (
        logits(module, signature, dtype).float() for module in (program.module(), before)
    )
    assert (found - expected).norm() <= limit * expected.norm()


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = llama4(tmp_path / "model")
    manifest = kvgraph.compile(folder, tmp_path / "out", dtype="float32", page_size=16)
    assert manifest.ops["kvgraph.experts"] == 1
    (mixture,) = manifest.mixtures
    assert (mixture.layers, mixture.experts, mixture.active) == (1, 4, 1)
    prompts = [[5], [*range(3, 40)], [7, 9, 11]]
    with kvgraph.Engine(tmp_path / "out") as engine:
        sampling = kvgraph.SamplingParams(max_new_tokens=8, ignore_eos=True)
        found = [each.token_ids for each in engine.generate(prompts, sampling)]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert found == [greedy_tokens(model, prompt, 8) for prompt in prompts]


class OfAll(nn.Module):
    """As Llama 4 has it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.both = nn.Parameter(torch.randn(4, 16, 24))
        self.down = nn.Parameter(torch.randn(4, 12, 16))

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        values, ids = torch.topk(logits, 1, dim=1)
        return torch.full_like(logits, -torch.inf).scatter(1, ids, values).sigmoid()

    def each(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return x.repeat(4, 1) * scores.transpose(0, 1).reshape(-1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.each(x, self.scores(x)).view(4, -1, 16)
        gate, up = torch.bmm(rows, self.both).chunk(2, dim=-1)
        each = torch.bmm(nn.functional.silu(gate) * up, self.down)
        return x + each.view(-1, 16).reshape(4, -1, 16).sum(dim=0)


class Two(OfAll):
    def scores(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        values, ids = torch.topk(logits, 2, dim=1)
        return torch.full_like(logits, -torch.inf).scatter(1, ids, values).sigmoid()


class OthersCount(OfAll):
    """The sigmoid of 0 is a half."""

    def scores(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        values, ids = torch.topk(logits, 1, dim=1)
        return torch.full_like(logits, 0.0).scatter(1, ids, values).sigmoid()


class Softmax(OfAll):
    def scores(self, x: torch.Tensor) -> torch.Tensor:
        return self.router(x).softmax(-1)


class OtherChoice(OfAll):
    def scores(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.router(x)
        _, ids = torch.topk(logits, 1, dim=1)
        values, _ = torch.topk(-logits, 1, dim=1)
        return torch.full_like(logits, -torch.inf).scatter(1, ids, values).sigmoid()


class RowsInTurn(OfAll):
    """Rows of an expert do not lie side by side, so others meet it."""

    def each(self, x: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return x.repeat_interleave(4, 0) * scores.transpose(0, 1).reshape(-1, 1)


LEFT: dict[type[OfAll], str] = {
    Two: "expected one expert of a row, got 2",
    OthersCount: "expected -inf for what is not chosen, got 0.0",
    Softmax: "expected a sigmoid of logits, got aten.softmax.int",
    OtherChoice: "expected one choice",
    RowsInTurn: "expected all rows for each expert, got None",
}


@pytest.mark.parametrize("by", OPS)
@pytest.mark.parametrize("kind", [OfAll, *LEFT])
def test_what_is_another_mixture_stays_and_says_why(
    kind: type[OfAll], by: Callable[..., PassReport]
) -> None:
    module = kind()
    x = torch.randn(12, 16, generator=torch.Generator().manual_seed(0))
    rows = 4 * torch.export.Dim("quarter", min=1, max=64)
    program = torch.export.export(module, (x,), dynamic_shapes=[{0: rows}])
    report = rewritten(program, by)
    why = LEFT.get(kind)
    assert [each.partition(": ")[2] for each in report.unmatched] == ([why] if why else [])
    assert report.applied == (0 if why else 1)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), module(x), rtol=1e-4, atol=1e-3)
