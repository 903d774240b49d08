"""Norms of the heads of q and k go into update_and_attend: equal logits and caches, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_head_norms import fuse_head_norms
from kvgraph.compiler.passes.fuse_rope import fuse_rope
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED, arguments
from kvgraph.contract.signature import GraphSignature
from kvgraph.ops import UPDATE_AND_ATTEND
from tests.support.models import layers, make_model
from tests.support.programs import (
    HEAD,
    HEADS,
    STEPS,
    OneLayer,
    compare,
    logits,
    own_program,
    program_of,
    step,
)

POSITIONS = 512
RATE = torch.ops.aten.rsqrt.default


def fuse(program: ExportedProgram, signature: GraphSignature) -> PassReport:
    fuse_rope(program, signature, POSITIONS)
    drop_no_ops(program.graph)
    report = fuse_head_norms(program.graph)
    program.graph_module.recompile()
    return report


def attentions(program: ExportedProgram) -> list[dict[str, Any]]:
    nodes = [n for n in program.graph.nodes if n.target is FUSED]
    return [arguments(UPDATE_AND_ATTEND, node) for node in nodes]


def rates(program: ExportedProgram) -> int:
    return sum(node.target is RATE for node in program.graph.nodes)


# Per architecture: offset of the norms' weights, None without norms of heads; whether the rotation
# is in the op too.
CASES: dict[str, tuple[float | None, bool]] = {
    "qwen3": (0.0, True),
    "gemma3_text": (1.0, True),
    "hunyuan_v1_dense": (0.0, False),  # the norm follows the rotation, which stays
    "olmo2": (None, True),  # one norm of all heads
    "llama": (None, True),
}


@pytest.mark.parametrize("name", CASES)
def test_decoders(name: str, tmp_path: Path) -> None:
    offset, rotates = CASES[name]
    folder = make_model(name, tmp_path / name)
    plain, fused = {}, {}
    for dtype in ("float32", "bfloat16"):
        program, signature = program_of(folder, dtype)
        plain[dtype], before = program.module(), rates(program)
        report = fuse(program, signature)
        fused[dtype] = program.module()
        expected = 0 if offset is None else layers(name)
        assert (report.applied, report.unmatched) == (expected, [])
        assert before - rates(program) == 2 * expected
        for given in attentions(program):
            found = {given["q_norm"] is not None, given["k_norm"] is not None}
            assert found == {bool(expected)}
            assert given["norm_offset"] == (offset or 0.0)
            assert (given["norm_epsilon"] > 0) == bool(expected)
            assert (given["cos_sin"] is not None) == rotates
    compare(plain, fused, signature)


# ---- a module of one's own ----------------------------------------------------------------------


class Own(OneLayer):
    """Heads without positions."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = (nn.RMSNorm(HEAD, eps=1e-5) for _ in range(2))
        nn.init.normal_(self.q_norm.weight)
        nn.init.normal_(self.k_norm.weight)

    def normal(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q), self.k_norm(k)

    def values(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return v

    def prepared(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: Any, lengths: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k = self.normal(q, k)
        return q, k, self.values(k, v)


class HeadsFirst(Own):
    """The norm is over heads that are moved before it and after it."""

    def normal(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().normal(q.transpose(0, 1), k.permute(1, 0, 2))
        return q.permute(1, 0, 2), k.transpose(-3, -2)


class Turned(Own):
    """A head's elements are those of other heads: no move of whole heads."""

    def normal(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().normal(q, k)
        return q[:, :, :HEADS].transpose(1, 2).repeat(1, 1, 2)[:, :HEADS], k


class OnlyQ(Own):
    def normal(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q), k


class OnlyK(Own):
    def normal(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return q, self.k_norm(k)


class OtherEpsilon(Own):
    def __init__(self) -> None:
        super().__init__()
        self.k_norm.eps = 1e-3


class ReadTwice(Own):
    def normal(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = super().normal(q, k)
        return q, k * q.mean()


class KeysAreValues(Own):
    def values(self, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return k


def same(plain: ExportedProgram, fused: ExportedProgram, signature: GraphSignature) -> None:
    for lengths in STEPS:
        first, second = (step(signature, "float32", lengths) for _ in range(2))
        got, expected = logits(fused.module(), second), logits(plain.module(), first)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("module", [Own, HeadsFirst])
def test_another_spelling(module: type[Own]) -> None:
    (plain, signature), (fused, _) = (own_program(module()) for _ in range(2))
    assert fuse(fused, signature) == PassReport("fuse_head_norms", 1)
    (given,) = attentions(fused)
    assert given["norm_epsilon"] == 1e-5
    same(plain, fused, signature)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (OnlyQ, "expected a norm of k, as q has one, got none"),
        (OnlyK, "expected a norm of q, as k has one, got none"),
        (OtherEpsilon, "expected one epsilon and offset, got (1e-05, 0.0) and (0.001, 0.0)"),
        (ReadTwice, "expected one use of the normalised heads, got 2"),
        (KeysAreValues, "expected q and k of their own, got one value twice"),
        (Turned, "expected a norm of q, as k has one, got none"),
    ],
)
def test_left_and_named(module: type[Own], why: str) -> None:
    (plain, signature), (fused, _) = (own_program(module()) for _ in range(2))
    assert fuse(fused, signature).unmatched == [f"update_and_attend_default: {why}"]
    assert attentions(fused)[0]["q_norm"] is None
    same(plain, fused, signature)
