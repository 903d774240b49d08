"""Mixtures of experts on CUDA: every family becomes one op a layer; what is left says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_experts import FUSED, fuse_experts
from kvgraph.compiler.passes.fuse_rms_norm import fuse_rms_norm
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import KernelError
from kvgraph.kernels import experts_plan
from kvgraph.ops.packed import GELU, GELU_TANH
from tests.compiler.test_pack_experts import (
    FAMILIES,
    GATES,
    LEFT,
    Experts,
    exported,
    folder_of,
    logits,
    operands,
)
from tests.support.programs import packed_by, program_of

HALVES = {"float16": 0.02, "bfloat16": 0.15}


def fused(program: ExportedProgram) -> PassReport:
    drop_no_ops(program.graph)
    return packed_by(fuse_experts, program, None)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_becomes_one_node_and_computes_the_same(family: str, tmp_path: Path) -> None:
    layers, _ = FAMILIES[family]
    program, signature = program_of(folder_of(family, tmp_path), "float32")
    before = program.module()
    report = fused(program)
    assert (report.applied, report.unmatched) == (layers, [])
    assert len([node for node in program.graph.nodes if node.target is FUSED]) == layers
    assert not [n for n in program.state_dict if n.endswith(("gate_up_proj", "down_proj"))]
    found, expected = (logits(module, signature) for module in (program.module(), before))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3_moe", "bfloat16"), ("gpt_oss", "float16"), ("mixtral", "bfloat16")],
)
def test_halves_stay_near(family: str, dtype: str, tmp_path: Path) -> None:
    """Rounded once a layer where the model rounds after every operator; mixtral's sum is wide."""
    program, signature = program_of(folder_of(family, tmp_path), dtype)
    report = fused(program)
    assert (report.applied, report.unmatched) == (FAMILIES[family][0], [])
    wide, _ = program_of(folder_of(family, tmp_path), "float32")
    found = logits(program.module(), signature, dtype).float()
    expected = logits(wide.module(), signature)
    assert (found - expected).norm() < HALVES[dtype] * expected.norm()


@pytest.mark.parametrize("kind", GATES)
def test_gates_as_they_are_written(kind: type[Experts]) -> None:
    module = kind()
    program = exported(module)
    assert packed_by(fuse_experts, program, None).applied == 1
    (node,) = [node for node in program.graph.nodes if node.target is FUSED]
    assert node.kwargs == GATES[kind]
    with torch.no_grad():
        found, expected = program.module()(*operands()), module(*operands())
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert {GATES[each]["activation"] for each in GATES} == {0, GELU, GELU_TANH}


@pytest.mark.parametrize("kind", LEFT)
def test_what_does_not_match_stays_and_says_why(kind: type[Experts]) -> None:
    report = packed_by(fuse_experts, exported(kind()), None)
    assert report.applied == 0
    assert [sentence.partition(": ")[2] for sentence in report.unmatched] == [LEFT[kind]]


def test_more_experts_than_the_kernels_hold_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvgraph.compiler.passes.fuse_experts.MOST_EXPERTS", 3)
    (sentence,) = packed_by(fuse_experts, exported(Experts()), None).unmatched
    assert sentence.endswith("expected at most 3 experts, got 4")
    assert experts_plan.MOST_EXPERTS == 1024


def test_a_sum_that_is_normalised_takes_the_experts_memory(tmp_path: Path) -> None:
    program, _ = program_of(folder_of("qwen3_moe", tmp_path), "bfloat16")
    fused(program)
    report = fuse_rms_norm(program.graph)
    assert not [each for each in report.unmatched if "share its memory" in each]


def test_bad_operands_are_refused_where_a_call_is_traced() -> None:
    fused_op = torch.ops.kvgraph.fused_experts

    def call(**changes: torch.Tensor) -> None:
        given = {
            "x": torch.empty(9, 16, device="meta"),
            "indices": torch.empty(9, 2, dtype=torch.int32, device="meta"),
            "weights": torch.empty(9, 2, device="meta"),
            "up": torch.empty(4, 64, 16, device="meta"),
            "down": torch.empty(4, 16, 32, device="meta"),
            **changes,
        }
        fused_op(*given.values())

    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    call()
    for changes, sentence in (
        ({"up": meta(4, 64, 17)}, "up: dim up_depth: expected 16 for 16 inputs of x, got 17"),
        ({"up": meta(4, 63, 16)}, "up: dim up_rows: expected rows of gate and up in turn, got 63"),
        ({"down": meta(4, 16, 31)}, "down_depth: expected 32 for 32 inner features, got 31"),
        ({"down": meta(3, 16, 32)}, "down: dim num_experts: expected 4 as up has it, got 3"),
        ({"indices": meta(9, 2, dtype=torch.int64)}, "indices: expected dtype int32, got int64"),
        ({"up": meta(4, 64, 16, dtype=torch.int8)}, "up: expected float32 for bits 0 .*, got int8"),
        ({"down": meta(4, 16, 32, dtype=torch.int8)}, "down: expected float32 for .*, got int8"),
    ):
        with pytest.raises(KernelError, match=f"fused_experts: .*{sentence}"):
            call(**changes)


def test_a_compile_has_no_copies_of_experts(
    compiled: Callable[..., Path], model_folder: Callable[[str], Path]
) -> None:
    folder = compiled("gpt_oss", "torch", target="cuda:sm_80", dtype="float16")
    manifest = read_manifest(folder)
    assert manifest.ops["kvgraph.fused_experts"] == 3
    assert not [note for note in manifest.notes if note.startswith("experts:")]
    (mixture,) = manifest.mixtures
    assert (mixture.layers, mixture.experts, mixture.active) == (3, 4, 2)
    assert mixture.bytes == 2 * mixture.parameters
