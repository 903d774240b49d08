"""The batch dim of 1 goes: equal logits and caches, nothing that copies left, refusals."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim, export

from kvgraph.compiler.passes.drop_batch_dim import drop_batch_dim
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from tests.support.models import make_model
from tests.support.programs import program_of, step

aten = torch.ops.aten
POSITIONS = 512
STEPS: tuple[list[int], ...] = ([5, 1, 20], [1], [17, 3])
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "phi3"]
BATCHED = {"gpt_oss"}
"""Whose experts make rows of the tokens themselves."""


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_decoders(name: str, tmp_path: Path) -> None:
    program, signature = program_of(make_model(name, tmp_path / name), "float32")
    before = program.module()
    fuse_rope(program, signature, POSITIONS)
    drop_no_ops(program.graph)
    report = drop_batch_dim(program.graph)
    program.graph.lint()
    program.graph_module.recompile()
    after: Any = program.module()
    targets = Counter(node.target for node in program.graph.nodes)
    assert report.applied > 20
    assert not targets[aten.select.int]
    assert report.unmatched == []
    if name not in BATCHED:
        assert not targets[aten.unsqueeze.default]
    for lengths in STEPS:
        first, second = (step(signature, "float32", lengths) for _ in range(2))
        with torch.no_grad():
            expected, found = before(*first)[0], after(*second)[0]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        for mine, theirs in zip(second, first, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5, equal_nan=True)


class Rows(nn.Module):
    """Something done to `[1, tokens, 8]` between two known operations."""

    def __init__(self, what: Any) -> None:
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x.unsqueeze(0))
        return torch.tanh(self.what(y) + 1.0)


CASES: dict[str, tuple[Any, str | None]] = {
    "mean of the last dim": (lambda y: y.mean(-1, keepdim=True), None),
    "mean by its place": (lambda y: y.mean(2, keepdim=True), "a dim counted from the front"),
    "slice of features": (lambda y: y[..., 2:5], None),
    "softmax": (lambda y: y.softmax(-1), None),
    "heads": (lambda y: y.view(1, -1, 2, 4).transpose(1, 2), None),
    "the dim moves": (lambda y: y.transpose(0, 1).transpose(0, 1), None),
    "other operations": (lambda y: y.cumsum(1), "not known to keep rows apart"),
    "a product with batched rows": (lambda y: y * y.cumsum(1), "not known to keep rows apart"),
}


@pytest.mark.parametrize("case", CASES)
def test_operations(case: str) -> None:
    what, why = CASES[case]
    module = Rows(what)
    x = torch.randn(6, 8)
    program = export(module, (x,), dynamic_shapes=({0: Dim("tokens", min=2)},), strict=False)
    report = drop_batch_dim(program.graph)
    program.graph.lint()
    program.graph_module.recompile()
    for rows in (x, torch.randn(11, 8)):
        torch.testing.assert_close(program.module()(rows), module(rows))
    if why is None:
        assert report.unmatched == []
    else:
        assert any(why in sentence for sentence in report.unmatched), report.unmatched
