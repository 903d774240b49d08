"""Writes in place become new values before the first pass: the same numbers through every pass."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram, export

from kvgraph import ops
from kvgraph.compiler.copies import expand_copies
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.passes.fold_constants import fold_constants
from kvgraph.compiler.passes.fuse_rms_norm import fuse_rms_norm
from kvgraph.compiler.passes.fuse_update_and_attend import STORE
from kvgraph.compiler.passes.pack_linear import pack_linear
from kvgraph.compiler.passes.writes import written_by
from tests.compiler.test_fuse_rope import Own, fuse, tables
from tests.support.programs import logits, own_program, packed_by, step


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.rand(32))
        self.a, self.b, self.c = (nn.Linear(32, 32) for _ in range(3))


class Normed(Parts):
    """The sum is written through a view before it is normalised."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) + self.b(x)
        h[:, :4] *= 3.0
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + h


class ByName(Parts):
    """A write of which nothing reads the result by its own name."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x) + self.b(x)
        h.mul_(3.0)
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + h


class Between(Parts):
    """Two layers read one input, which is written between them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.c(x)
        q = self.a(h)
        h[:, :8] = 0.0
        return q + 2 * self.b(h)


class Filled(Parts):
    """An empty value whose parts are written, as DeepSeek's keys are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a(x).chunk(2, dim=-1)
        h = x.new_empty(x.shape)
        h[..., :16].copy_(first)
        h[..., 16:].copy_(second.to(torch.bfloat16))
        h[0] += 1.0
        h.select(0, 1)[3:5] = 2.0
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + h


class Viewed(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h.view(-1).mul_(3.0)
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + h


class Twice(Parts):
    """A part that is read behind the write of another one, which it has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        part = h[:, :8]
        h[:, 4:] *= 3.0
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + part.sum(-1, keepdim=True)


class Dropped(Parts):
    """Without training, a dropout gives its operand itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        h = nn.functional.dropout(x, training=False)
        h += self.b(h)
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + x


class Einsum(Parts):
    """Of one operand: a view, though its schema does not say so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        torch.einsum("td->dt", h).add_(1.0)
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + h


class Broadcast(Parts):
    """The second of two operands, given as it is."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, h = self.a(x), self.b(x)
        _, second = torch.broadcast_tensors(a, h)
        second.mul_(3.0)
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + a


class Foreach(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, h = self.a(x), self.b(x)
        torch._foreach_mul_([a, h], 3.0)
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + a


class Numbers(Parts):
    """A number, and a row, over a part of a value."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h[:, 0] = 2.0
        h[:, 3:5] = 3.0
        h[:, 8:16] = self.weight[None, :8]
        return nn.functional.rms_norm(h, (32,), self.weight, 1e-6) + h


class Constant(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        t = torch.tensor([1.0, 2.0, 4.0, 8.0]).repeat(8)
        t[1:] *= 10.0
        return x * t.reciprocal()


def exported(module: nn.Module) -> ExportedProgram:
    with torch.no_grad():
        return export(module, (torch.rand(5, 32),), dynamic_shapes=({0: Dim("tokens", max=64)},))


def writes(program: ExportedProgram) -> list[str]:
    nodes = program.graph.nodes
    return [str(node.target) for node in nodes if written_by(node)]


def packed(program: ExportedProgram) -> None:
    assert packed_by(pack_linear, program, 16).applied == 3


def normed(program: ExportedProgram) -> None:
    assert fuse_rms_norm(program.graph).applied == 1


def folded(program: ExportedProgram) -> None:
    assert fold_constants(program).applied == 1


@pytest.mark.parametrize(
    ("module", "rewrite", "most"),
    [
        (Normed(), normed, 1e-6),
        (ByName(), normed, 1e-6),
        (Filled(), normed, 1e-6),
        (Viewed(), normed, 1e-6),
        (Twice(), normed, 1e-6),
        (Dropped(), normed, 1e-6),
        (Einsum(), normed, 1e-6),
        (Broadcast(), normed, 1e-6),
        (Foreach(), normed, 1e-6),
        (Numbers(), normed, 1e-6),
        (Between(), packed, 2e-2),
        (Constant(), folded, 0),
    ],
)
def test_the_same_numbers_through_a_pass(
    module: nn.Module, rewrite: Callable[[ExportedProgram], None], most: float
) -> None:
    program = without_writes(exported(module))
    assert not writes(program)
    rewrite(program)
    program.graph_module.recompile()
    x = torch.rand(7, 32)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), module(x), rtol=0, atol=most)


class Powered(nn.Module):
    """`pow_.Scalar` has the overload name of a form with a number as its base."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        y.pow_(2)
        return y


def test_an_operator_of_another_type_is_no_functional_form() -> None:
    program = without_writes(exported(Powered()))
    assert not writes(program)
    x = torch.rand(7, 32)
    torch.testing.assert_close(program.module()(x), Powered()(x))


@pytest.mark.parametrize(
    ("module", "in_place"),
    [(ByName(), True), (Normed(), True), (Filled(), True), (Viewed(), False), (Twice(), False)],
)
def test_writes_are_replaced_where_they_stand(module: nn.Module, in_place: bool) -> None:
    program = exported(module)
    assert (without_writes(program) is program) == in_place


def test_other_operators_stay() -> None:
    """Passes look for those of the module."""
    targets = {str(node.target) for node in without_writes(exported(Filled())).graph.nodes}
    assert {"aten.chunk.default", "aten.to.dtype", "aten.slice_scatter.default"} <= targets


def test_copies_have_the_extents_of_their_place() -> None:
    """ONNX's exporter has a cast for a copy, and no broadcast."""
    module = Numbers()
    program = without_writes(exported(module))
    expand_copies(program.graph)
    program.graph_module.recompile()
    targets = {str(node.target) for node in program.graph.nodes}
    assert "aten.expand.default" in targets
    assert not {"aten.copy.default", "aten.fill.Tensor"} & targets
    x = torch.rand(7, 32)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), module(x), rtol=0, atol=0)


class Scaled(Own):
    """The last pairs turn more slowly, as scaled embeddings do."""

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rates = 100.0 ** -(torch.arange(0, 8, 2) / 8)
        rates[2:] /= 8.0
        angles = 0.5 * positions[:, None] @ rates[None]
        return angles.cos(), angles.sin()


class Still(Own):
    """The last pairs do not turn."""

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = super().cos_sin(positions)
        cos[:, 2:] = 1.0
        sin[:, 2:] = 0.0
        return cos, sin


class Named(Own):
    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rates = 100.0 ** -(torch.arange(0, 8, 2) / 8)
        rates.div_(8.0)
        angles = 0.5 * positions[:, None] @ rates[None]
        return angles.cos(), angles.sin()


@pytest.mark.parametrize(("module", "count"), [(Scaled(), 1), (Still(), 0), (Named(), 1)])
def test_rotary_embeddings(module: Own, count: int) -> None:
    program, signature = own_program(module)
    assert writes(program) == ["kvgraph.update_and_attend.default"]
    expected = logits(program.module(), step(signature, "float32", [5, 1, 20]))
    assert fuse(program, signature).applied == count
    found = logits(program.module(), step(signature, "float32", [5, 1, 20]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for table in tables(program):
        at = torch.arange(len(table))
        assert torch.equal(table, torch.cat(module.cos_sin(at), -1))


class Writes(nn.Module):
    """A store and a write of one's own in a pool, and a write through a view."""

    def __init__(self, part: bool = False) -> None:
        super().__init__()
        self.part = part

    def forward(
        self,
        pool: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        offsets: torch.Tensor,
        lengths: torch.Tensor,
        table: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = k + 1, v + 1
        v[:, :1] = 2.0
        ops.store_kv(pool[1:] if self.part else pool, k, v, offsets, lengths, table, layer=0)
        pool.mul_(0.5)
        return k + v, pool


def inputs_of_writes() -> tuple[torch.Tensor, ...]:
    rows = torch.arange(48.0).reshape(3, 2, 8)
    index = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 3], [0, 0], [[0], [1]])]
    return (torch.ones(4, 2, 1, 4, 2, 8), rows, -rows, *index)


def test_writes_into_inputs_stay() -> None:
    with torch.no_grad():
        program = without_writes(export(Writes(), inputs_of_writes()))
    assert writes(program) == ["kvgraph.store_kv.default", "aten.mul_.Tensor"]
    assert [spec.kind.name for spec in program.graph_signature.output_specs] == ["USER_OUTPUT"] * 2
    given, expected = inputs_of_writes(), inputs_of_writes()
    results = zip(program.module()(*given), Writes()(*expected), strict=True)
    for found, right in [*results, (given[0], expected[0])]:
        torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_a_store_into_a_part_of_a_pool_is_left_to_its_check() -> None:
    with torch.no_grad():
        program = export(Writes(part=True), inputs_of_writes())
    assert without_writes(program) is program
    (store,) = [node for node in program.graph.nodes if node.target is STORE]
    assert store.args[0].target is torch.ops.aten.slice.Tensor
