"""What a compile says of the memory that a step will ask for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import kvgraph
from kvgraph.compiler import step_memory
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_experts import fuse_experts
from kvgraph.compiler.passes.pack_experts import pack_experts
from kvgraph.contract.devices import HOST
from kvgraph.contract.dims import TensorType
from tests.compiler.test_all_experts import llama4
from tests.support.programs import packed_by, program_of


def test_a_step_that_gathers_experts_is_named(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token of mixtral has two experts, each with a gate and an up projection in one."""
    monkeypatch.setattr(step_memory, "LARGE", 32 << 20)
    folder = model_folder("mixtral")
    program, signature = program_of(folder, "float32")
    config = json.loads((folder / "config.json").read_text())
    layers, count = config["num_hidden_layers"], config["num_local_experts"]
    expert = 4 * config["intermediate_size"] * config["hidden_size"]
    stored, copied = (
        layers * count * 3 * expert,
        layers * config["num_experts_per_tok"] * 3 * expert,
    )
    experts, memory = step_memory.notes_of(program, signature)
    assert experts == (
        f"experts: {stored / 2**20:,.1f} MiB of their weights are kept as the model has them, and "
        f"{copied / 2**20:,.1f} MiB are copied for each token, since the backend has no kernel for "
        "them"
    )
    nbytes = 2048 * config["num_experts_per_tok"] * 2 * expert
    assert f"a tensor of {nbytes / 2**30:.1f} GiB (aten.index.Tensor); an engine" in memory
    unmatched = [PassReport("pack_experts", 0, ["sum_1: expected a SiLU or GELU gate"])]
    experts, _ = step_memory.notes_of(program, signature, unmatched)
    assert experts.endswith("are copied for each token, as pass pack_experts says")
    report = packed_by(pack_experts, program, 8)
    assert report.applied == layers
    assert step_memory.notes_of(program, signature, [report]) == []


@pytest.mark.parametrize(
    ("active", "by", "why"),
    [
        (2, pack_experts, "as pass pack_experts says"),
        (2, fuse_experts, "as pass fuse_experts says"),
        (1, None, "since the backend has no kernel for them"),
        (1, pack_experts, ""),
        (1, fuse_experts, ""),
    ],
)
def test_a_step_that_computes_all_experts_is_named(
    active: int, by: Callable[..., PassReport] | None, why: str, tmp_path: Path
) -> None:
    """A layer of Llama 4 has 4 experts, each with gate, up and down of 64 x 96."""
    program, signature = program_of(llama4(tmp_path, num_experts_per_tok=active), "float32")
    drop_no_ops(program.graph)
    reports = [packed_by(by, program, None)] if by else []
    assert step_memory.notes_of(program, signature, reports) == bool(why) * [
        f"experts: {4 * 4 * 3 * 64 * 96 / 2**20:,.1f} MiB of their weights are kept as the model "
        f"has them, and all are computed for each token, {why}"
    ]


def test_a_compile_without_kernels_for_experts_names_them(tmp_path: Path) -> None:
    manifest = kvgraph.compile(
        llama4(tmp_path / "model"),
        tmp_path / "out",
        target="cuda:sm_90",
        backend="onnx",
        page_size=16,
        check=False,
    )
    assert [note for note in manifest.notes if "all are computed for each token" in note]


def test_a_model_without_experts_has_no_note(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "LARGE", 32 << 20)
    assert step_memory.notes_of(*program_of(model_folder("tiny-llama"), "float32")) == []


class Fixed(nn.Module):
    """Makes a tensor of its weight alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(64, 1 << 16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + (self.weight.T * 2).sum()


class Viewed(Fixed):
    """Views its weight, which takes no memory."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.weight.T[:2].sum()


class Spread(Fixed):
    """Makes a tensor with a row for each entry of `values`."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + (values[:, None] * torch.ones(1 << 16)).sum()


@pytest.mark.parametrize(
    ("module", "dim", "expected"),
    [
        (Fixed, "total_seq_len", "memory: each step .*, with any number of tokens"),
        (Spread, "total_seq_len", "memory: a step of 2048 .* a smaller max_batch_tokens .*"),
        (Spread, "num_logits", "memory: a step of 2048 .* a smaller max_batch_tokens .*"),
        (Spread, "batch_size", "memory: a step of 2048 .* a smaller max_batch_size .*"),
        (Viewed, "total_seq_len", ""),
    ],
)
def test_the_advice_fits_what_the_tensor_depends_on(
    module: type[nn.Module], dim: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_memory, "LARGE", 2 << 20)
    rows = {0: torch.export.Dim("rows", min=2, max=4096)}
    program = torch.export.export(module(), (torch.ones(5),), dynamic_shapes=(rows,))
    signature = SimpleNamespace(inputs=[TensorType("values", "float32", (dim,), HOST)])
    notes = step_memory.notes_of(program, signature)  # type: ignore[arg-type]
    assert len(notes) == bool(expected)
    assert re.fullmatch(expected, "".join(notes))
