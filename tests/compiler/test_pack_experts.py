"""Mixtures of experts: every family becomes one op a layer; what is left alone says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from transformers.integrations.moe import batched_mm_experts_forward

import kvgraph
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.pack_experts import PACKED, pack_experts
from kvgraph.contract.mixtures import Mixture
from kvgraph.contract.safetensors import read_layout
from kvgraph.contract.signature import GraphSignature
from kvgraph.ops import packed
from kvgraph.ops.packed import GELU, GELU_TANH
from tests.support.models import LATENT, greedy_tokens, make_model
from tests.support.programs import packed_by, program_of, step

FOUR = {"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4}
TWO = {"num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2}
SIZES = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48, "n_group": 1}
SHARED = {"n_shared_experts": 1, "topk_group": 1, "moe_num_shared_experts": 1}

# Family -> layers with experts, and what its configuration needs besides these.
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "mixtral": (2, {}),
    "qwen2_moe": (2, {}),
    "qwen3_moe": (2, {"norm_topk_prob": True}),
    "gpt_oss": (3, {}),
    "granitemoe": (2, {}),
    "phimoe": (2, {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0}),
    "olmoe": (2, {}),
    "glm4_moe": (1, {"first_k_dense_replace": 1}),
    "dots1": (1, {"first_k_dense_replace": 1}),
    "ernie4_5_moe": (1, {"moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    "hunyuan_v1_moe": (2, {}),
    "minimax_m2": (2, {"rotary_dim": 16}),
    "deepseek_v3": (1, {**LATENT, "first_k_dense_replace": 1}),
}
IN_MAKE_TEST = ("gpt_oss", "qwen3_moe")
"""Families whose compile and run are part of `make test`; the others are `slow`."""


def folder_of(family: str, folder: Path) -> Path:
    _, own = FAMILIES[family]
    return make_model(family, folder, **{**FOUR, **TWO, **SIZES, **SHARED, **own})


def logits(module: nn.Module, signature: GraphSignature, dtype: str = "float32") -> torch.Tensor:
    """Of a step of three rows."""
    with torch.no_grad():
        result: torch.Tensor = module(*step(signature, dtype, [1, 9, 25]))[0]
    return result


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_becomes_one_node_and_computes_the_same(family: str, tmp_path: Path) -> None:
    layers, _ = FAMILIES[family]
    program, signature = program_of(folder_of(family, tmp_path), "float32")
    before = program.module()
    report = packed_by(pack_experts, program, None)
    assert (report.applied, report.unmatched) == (layers, [])
    nodes = [node for node in program.graph.nodes if node.target is PACKED]
    assert len(nodes) == layers
    assert not [n for n in program.state_dict if n.endswith(("gate_up_proj", "down_proj"))]
    found, expected = (logits(module, signature) for module in (program.module(), before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("bits", "most"), [(16, 0.02), (8, 0.05), (4, 0.4)])
def test_packed_experts_stay_near(bits: int, most: float, tmp_path: Path) -> None:
    program, signature = program_of(folder_of("qwen3_moe", tmp_path), "float32")
    before = program.module()
    packed_by(pack_experts, program, bits)
    found, expected = (logits(module, signature) for module in (program.module(), before))
    assert (found - expected).abs().mean() < most * expected.abs().mean()


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(f, marks=[] if f in IN_MAKE_TEST else [pytest.mark.slow], id=f)
        for f in FAMILIES
    ],
)
def test_tokens_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16)
    prompts = [[3 + (7 * i + 5 * j) % 150 for j in range(n)] for i, n in enumerate((1, 9, 40))]
    greedy = kvgraph.SamplingParams(max_new_tokens=12, ignore_eos=True)
    with kvgraph.Engine(tmp_path / "out", num_pages=32) as engine:
        completions = engine.generate(prompts, greedy)
    for prompt, done in zip(prompts, completions, strict=True):
        assert done.token_ids == greedy_tokens(model, prompt, 12)
    assert not [note for note in manifest.notes if note.startswith("experts:")]
    applied = {entry.name: entry.applied for entry in manifest.passes}
    assert applied["fuse_router"] == (0 if family == "phimoe" else FAMILIES[family][0])
    (mixture,) = manifest.mixtures
    assert (mixture.layers, mixture.experts, mixture.active) == (FAMILIES[family][0], 4, 2)
    stored = read_layout(tmp_path / "out" / "weights.safetensors")
    packed = [at.nbytes for name, at in stored.items() if ".experts." in name]
    shared = mixture.bytes - sum(packed)  # biases of zeros: ONNX keeps them once
    assert shared > 0 if family == "gpt_oss" else shared == 0


def test_a_mixture_tells_what_a_step_reads() -> None:
    mixture = Mixture(layers=2, experts=8, active=2, parameters=8000, bytes=800)
    assert mixture.active_parameters == 2000
    assert mixture.read(1) == 200
    assert mixture.read(2) == round(800 * (1 - 0.75**2))
    assert mixture.read(1000) == 800


# -- what stays as it is


class Experts(nn.Module):
    """Experts by transformers' interface, in a module of its own."""

    has_bias, has_gate, is_transposed, has_post_expert_norm = False, True, False, False
    _is_expert_parallel, num_experts = False, 4

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Parameter(torch.randn(4, 64, 16))
        self.down_proj = nn.Parameter(torch.randn(4, 16, 32))
        self.post_expert_norm = nn.LayerNorm(16)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = batched_mm_experts_forward(self, x, ids, weights)
        return out

    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate) * up


class Gelu(Experts):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return up * functional.gelu(gate)


class GeluTanh(Experts):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        up, gate = both.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up


class Limited(Experts):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both[..., 1::2].clamp(max=2.0), both[..., ::2].clamp(-2.0, 2.0)
        return (up + 0.5) * (gate * torch.sigmoid(gate * 1.5))


class Relu(Experts):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.relu(gate) * up


class OneLimit(Experts):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return functional.silu(gate.clamp(max=2.0)) * up


class Twice(Experts):
    def _apply_gate(self, both: torch.Tensor) -> torch.Tensor:
        gate, _ = both.chunk(2, dim=-1)
        return functional.silu(gate) * gate


class Normed(Experts):
    has_post_expert_norm = True


class Scaled(Experts):
    """Weights that are computed are not the model's own."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        doubled = self.gate_up_proj * 2
        gathered = torch.bmm(doubled[ids.reshape(-1)], x.repeat_interleave(2, 0).unsqueeze(-1))
        inner = self._apply_gate(gathered.squeeze(-1))
        out = torch.bmm(self.down_proj[ids.reshape(-1)], inner.unsqueeze(-1)).squeeze(-1)
        return (out * weights.reshape(-1).unsqueeze(-1)).view(-1, 2, 16).sum(1)


def exported(module: nn.Module) -> torch.export.ExportedProgram:
    rows = torch.export.Dim("rows", min=2)
    return torch.export.export(module, operands(), dynamic_shapes=[{0: rows}] * 3)


def operands() -> tuple[torch.Tensor, ...]:
    random = np.random.default_rng(0)
    ids = np.stack([random.permutation(4)[:2] for _ in range(9)])
    x = random.standard_normal((9, 16)).astype(np.float32)
    weights = random.random((9, 2)).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(ids), torch.from_numpy(weights)


GATES = {
    Experts: {"activation": 0},
    Gelu: {"activation": GELU},
    GeluTanh: {"activation": GELU_TANH},
    Limited: {"activation": 0, "alpha": 1.5, "limit": 2.0, "up_offset": 0.5},
}


@pytest.mark.parametrize("kind", GATES)
def test_gates_as_they_are_written(kind: type[Experts]) -> None:
    module = kind()
    program = exported(module)
    assert packed_by(pack_experts, program, None).applied == 1
    (node,) = [node for node in program.graph.nodes if node.target is PACKED]
    assert node.kwargs == {"inner_features": 32, "up_bits": 32, "down_bits": 32, **GATES[kind]}
    with torch.no_grad():
        found, expected = program.module()(*operands()), module(*operands())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


LEFT: dict[type[Experts], str] = {
    Relu: "expected a SiLU or GELU gate",
    OneLimit: "expected one limit of both",
    Twice: "expected gate and up to be all of it",
    Normed: "expected a product of each slot, got aten.layer_norm.default",
    Scaled: "expected weights of the model, got computed ones",
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_does_not_match_stays_and_says_why(kind: type[Experts]) -> None:
    program = exported(kind())
    report = packed_by(pack_experts, program, 8)
    assert report.applied == 0
    assert [sentence.partition(": ")[2] for sentence in report.unmatched] == [LEFT[kind]]


class Added(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x * 2 + super().forward(x, ids, weights)


class AddedToRows(Experts):
    """One bias for all rows is no residual."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, ids, weights) + self.post_expert_norm.weight


class AlsoRead(Experts):
    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = super().forward(x, ids, weights)
        return (x + out) * out


@pytest.mark.parametrize(("kind", "is_taken"), [(Added, 1), (AddedToRows, 0), (AlsoRead, 0)])
def test_a_sum_that_only_a_mixture_enters_is_its_too(kind: type[Experts], is_taken: int) -> None:
    module = kind()
    program = exported(module)
    drop_no_ops(program.graph)
    packed_by(pack_experts, program, None)
    (node,) = [node for node in program.graph.nodes if node.target is PACKED]
    assert (node.args[-1] is not None) == is_taken
    sums = [n for n in program.graph.nodes if n.target is torch.ops.aten.add.Tensor]
    assert len(sums) == 1 - is_taken
    with torch.no_grad():
        found, expected = program.module()(*operands()), module(*operands())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Experts, Added])
def test_rows_in_bfloat16_are_computed_in_float32_over_the_same_weights(
    kind: type[Experts],
) -> None:
    module = kind().to(torch.bfloat16)
    x, ids, weights = operands()
    given = (x.bfloat16(), ids, weights.bfloat16())
    program = torch.export.export(module, given)
    report = packed_by(pack_experts, program, None)
    assert (report.applied, report.unmatched) == (1, [])
    (node,) = (node for node in program.graph.nodes if node.target is PACKED)
    assert node.kwargs["up_bits"] == node.kwargs["down_bits"] == 16
    assert node.args[-1] is None  # the model rounds the mixture's result, then adds
    with torch.no_grad():
        found = program.module()(*given)
        exact = kind().to(torch.bfloat16).float()(*(x.bfloat16().float(), ids, weights.bfloat16()))
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(
        found.float(), exact, rtol=0.02, atol=0.02 * exact.abs().max().item()
    )


def test_other_activations_stay() -> None:
    module = Experts().to(torch.float16)
    x, ids, weights = operands()
    program = torch.export.export(module, (x.half(), ids, weights.half()))
    (sentence,) = packed_by(pack_experts, program, 16).unmatched
    assert sentence.endswith("expected torch.float32 or torch.bfloat16, got torch.float16")


@pytest.mark.parametrize(("most", "expected"), [(32, (8, 8)), (31, (8, 16)), (15, (16, 16))])
def test_more_inputs_than_int32_sums_are_kept_in_bfloat16(
    most: int, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "MOST_SUMMED", most)
    program = exported(Experts())
    packed_by(pack_experts, program, 8)
    (node,) = (node for node in program.graph.nodes if node.target is PACKED)
    assert (node.kwargs["up_bits"], node.kwargs["down_bits"]) == expected
