"""Norms and gates of exported decoders become kernels' ops: counts, equal bits, refusals."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.drop_no_ops import drop_no_ops
from kvgraph.compiler.passes.fuse_rms_norm import fuse_rms_norm
from kvgraph.compiler.passes.fuse_silu_mul import fuse_silu_mul
from kvgraph.ops import RMS_NORM as RMS_OP
from kvgraph.ops import SILU_MUL as SILU_OP
from kvgraph.ops.torch_nodes import Call
from tests.support.models import layers
from tests.support.programs import program_of, step

RMS_NORM, SILU_MUL = "kvgraph.rms_norm.default", "kvgraph.silu_mul.default"
LEFT_OVER = ("aten.rsqrt.default", "aten.silu.default", "aten._assert_tensor_metadata.default")

GELU = [f"{layers('gemma2')} gates: expected aten::silu, got aten::gelu"]
# Norms of a layer, those of them that follow no sum, and the gates that are not silu's. The first
# norm of a model follows no sum, its last one does.
CASES = {
    "llama": (2, 0, []),
    "qwen3": (4, 2, []),
    "gemma2": (4, 2, GELU),
    "gemma3_text": (6, 4, GELU),
}


def counts(program: ExportedProgram) -> dict[tuple[str, int], int]:
    found: dict[tuple[str, int], int] = {}
    for node in program.graph.nodes:
        key = (str(node.target), len(node.args))
        found[key] = found.get(key, 0) + 1
    return found


def fuse(program: ExportedProgram) -> tuple[PassReport, PassReport]:
    graph = program.graph
    drop_no_ops(graph)
    reports = fuse_rms_norm(graph), fuse_silu_mul(graph)
    graph.lint()
    program.graph_module.recompile()
    return reports


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", CASES)
def test_decoders_keep_their_bits(
    model: str, dtype: str, model_folder: Callable[[str], Path]
) -> None:
    program, signature = program_of(model_folder(model), dtype)
    before = program.module()
    norms, gates = fuse(program)
    per_layer, alone, unmatched = CASES[model]
    count = layers(model)
    assert norms.applied == per_layer * count + 1
    assert norms.unmatched == []
    assert (gates.applied, gates.unmatched) == (0 if unmatched else count, unmatched)
    found = counts(program)
    assert found[RMS_NORM, 2] == alone * count + 1
    assert found[RMS_NORM, 3] == (per_layer - alone) * count
    assert not [target for target, _ in found if target in LEFT_OVER]

    after = program.module()
    for lengths in ([5, 1, 20], [1], [17, 3]):
        first, second = step(signature, dtype, lengths), step(signature, dtype, lengths)
        with torch.no_grad():
            want, got = before(*first)[0], after(*second)[0]
        assert not want.isnan().any()
        assert torch.equal(want, got)
        for expected, written in zip(first, second, strict=True):
            assert torch.equal(expected.nan_to_num(7), written.nan_to_num(7))


def test_rounding_comes_before_the_weight_or_behind_it(
    model_folder: Callable[[str], Path],
) -> None:
    program, _ = program_of(model_folder("gpt_oss"), "bfloat16")
    norms, _ = fuse(program)
    assert norms.applied == 2 * layers("gpt_oss") + 1
    nodes = [n for n in program.graph.nodes if str(n.target) == RMS_NORM]
    assert not any(n.kwargs.get("round_first") for n in nodes)
    llama, _ = program_of(model_folder("llama"), "bfloat16")
    fuse(llama)
    nodes = [n for n in llama.graph.nodes if str(n.target) == RMS_NORM]
    assert all(n.kwargs["round_first"] for n in nodes)


class Written(nn.Module):
    """A norm that is written out, changed in one place by a subclass."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.rand(32, dtype=dtype))
        self.linear = nn.Linear(32, 32, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * self.rows(x).to(x.dtype)

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)


class OverTokens(Written):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() * torch.rsqrt(x.float().pow(2).mean(0, keepdim=True) + 1e-6)


class Cubes(Written):
    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() * torch.rsqrt(x.float().pow(4).mean(-1, keepdim=True) + 1e-6)


class NoWeight(Written):
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).to(x.dtype)


class WeightInHalf(Written):
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows(x).to(x.dtype) * (1.0 + self.weight)


class WideWeight(Written):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(32))

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * self.rows(x)).to(x.dtype)


class Halves(Written):
    """Squares in half precision: the kernel's would be more exact, so other bits."""

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Columns(Written):
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return super().norm(x[:, ::2].repeat(1, 2)[:, :32].t().contiguous().t())


class Parts(Written):
    """As DeepSeek's latent: the first elements of a longer row."""

    width = 40

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        latent, _ = torch.cat([x, x], -1)[:, : self.width].split([32, self.width - 32], -1)
        return super().norm(latent)


class OneRow(Written):
    """The same for every token."""

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return super().norm(self.weight.expand(x.shape[0], 32))


class OddRows(Parts):
    width = 33

    def norm(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.cat([x, x[:, :1]], -1)
        return super(Parts, self).norm(wide[:, :32])


def exported(module: nn.Module, x: torch.Tensor) -> ExportedProgram:
    tokens = torch.export.Dim("tokens", min=1, max=64)
    with torch.no_grad():
        return torch.export.export(module, (x,), dynamic_shapes=({0: tokens},), strict=False)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (OverTokens, "expected the last dim's mean, got"),
        (Cubes, "expected a mean of squares, got power 4"),
        (NoWeight, "expected a weight next, got output"),
        (WeightInHalf, "expected a weight plus a constant in float32"),
        (WideWeight, "expected one dtype of x, weight and result, got torch.bfloat16, torch.float"),
        (Halves, "expected squares in float32, got bfloat16["),
        (Columns, "expected rows that are equally far apart, got "),
        (OneRow, "expected rows that are equally far apart, got "),
        (OddRows, "expected rows at multiples of 16 bytes, got "),
    ],
)
def test_what_the_kernel_does_not_compute_is_left_and_named(module: Any, why: str) -> None:
    program = exported(module(), torch.rand(5, 32, dtype=torch.bfloat16))
    report, _ = fuse(program)
    assert report.applied == 0
    assert len(report.unmatched) == 1
    assert why in report.unmatched[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_the_composed_norm(dtype: torch.dtype, eps: float | None) -> None:
    torch.manual_seed(0)
    module = nn.RMSNorm(48, eps=eps, dtype=dtype)
    nn.init.normal_(module.weight)
    x = torch.randn(9, 48, dtype=dtype)
    program = exported(module, x)
    before = program.module()
    report, _ = fuse(program)
    assert (report.applied, report.unmatched) == (1, [])
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), before(x), rtol=1e-6, atol=0)


class Shifted(Written):
    """Gemma's norm of a sum: its weight is computed behind the sum."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = self.linear(x) + self.linear(x * 2)
        return torch.rms_norm(total, (32,), 1.0 + self.weight, 1e-6) + total


def test_a_weight_that_is_computed_behind_the_sum() -> None:
    module, x = Shifted(torch.float32), torch.rand(5, 32)
    program = exported(module, x)
    report, _ = fuse(program)
    assert (report.applied, report.unmatched) == (
        1,
        [
            "rms_norm: fused without the sum before it: expected a weight from before the sum, "
            "got add_1"
        ],
    )
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), module(x), rtol=1e-6, atol=1e-6)


class Stream(Written):
    """`read` says what else reads the terms of the sum: 0 nothing, 1 a later sum, 2 a view."""

    def __init__(self, read: int) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        stream = self.linear(x)
        flat = stream.view(-1)
        out = stream * 2.0 if self.read else self.linear(stream)
        other = self.linear(out) if self.read else x
        total = stream + other
        result = self.norm(total) + total
        if self.read == 1:
            result = result + stream + other
        if self.read == 2:
            result = result + flat.view(-1, 32) + other
        return result


@pytest.mark.parametrize(
    ("read", "why"),
    [
        (1, "linear is read later, by add_3 and linear_1 is read later, by add_4"),
        (2, "linear may live on in view (aten.view.default) and linear_1 is read later"),
    ],
)
def test_a_sum_whose_terms_are_read_later_keeps_them(read: int, why: str) -> None:
    x = torch.rand(5, 32, dtype=torch.bfloat16)
    program = exported(Stream(read), x)
    before = program.module()
    report, _ = fuse(program)
    assert report.applied == 1
    assert len(report.unmatched) == 1
    assert "fused without the sum before it: " in report.unmatched[0]
    assert why in report.unmatched[0]
    assert counts(program)[RMS_NORM, 2] == 1
    with torch.no_grad():
        assert torch.equal(program.module()(x), before(x))


def test_an_input_of_the_graph_is_never_written() -> None:
    x = torch.rand(5, 32, dtype=torch.bfloat16)
    program = exported(Stream(0), x)
    before, given = program.module(), x.clone()
    report, _ = fuse(program)
    assert report.unmatched == []
    norm = next(n for n in program.graph.nodes if str(n.target) == RMS_NORM)
    assert [str(n.target) for n in norm.args[2:]] == ["aten.linear.default"]
    with torch.no_grad():
        assert torch.equal(program.module()(x), before(x))
    assert torch.equal(x, given)


def test_a_norm_of_parts_of_rows() -> None:
    x = torch.rand(5, 32, dtype=torch.bfloat16)
    program = exported(Parts(), x)
    before = program.module()
    report, _ = fuse(program)
    assert (report.applied, report.unmatched) == (1, [])
    (norm,) = [n for n in program.graph.nodes if str(n.target) == RMS_NORM]
    call = Call.of(RMS_OP, norm)
    assert (call.shapes["x"], call.strides["x"]) == ((-1, 32), 64)
    assert norm.meta["val"].stride() == (32, 1)
    with torch.no_grad():
        for rows in (5, 1):
            assert torch.equal(program.module()(x[:rows]), before(x[:rows]))


def test_a_gate_of_halves() -> None:
    x = torch.rand(5, 16)
    program = exported(Gates("parts"), x)
    before = program.module()
    _, report = fuse(program)
    assert (report.applied, report.unmatched) == (1, [])
    (gate,) = [n for n in program.graph.nodes if str(n.target) == SILU_MUL]
    call = Call.of(SILU_OP, gate)
    assert (call.strides, call.shapes["up"]) == ({"gate": 64, "up": 64}, (-1, 32))
    assert gate.meta["val"].stride() == (32, 1)
    with torch.no_grad():
        assert torch.equal(program.module()(x), before(x))


class Gates(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(16, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear(x).chunk(2, -1)
        if self.kind == "odd":
            gate, up, _ = self.linear(x).split([31, 31, 2], -1)
        if self.kind in ("odd", "parts"):
            return nn.functional.silu(gate) * up
        silu = nn.functional.silu(self.linear(x))
        if self.kind == "twice":
            return silu * self.linear(x) + silu
        return silu * self.linear(x)[:, :1]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("odd", "silu: expected rows at multiples of 16 bytes, got getitem"),
        ("twice", "silu: expected one use of silu(gate), got 2"),
        ("narrow", "silu: expected one type, got float32["),
    ],
)
def test_gates_that_are_left(kind: str, why: str) -> None:
    _, report = fuse(exported(Gates(kind), torch.rand(5, 16)))
    assert report.applied == 0
    assert len(report.unmatched) == 1
    assert report.unmatched[0].startswith(why)
