"""What is rewritten into core ATen in place is what torch's decomposition makes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

import kvgraph
from kvgraph.compiler.targets import core_aten, onnx

to_core_aten = core_aten.to_core_aten


def calls_of(program: ExportedProgram) -> list[object]:
    """Each call and its result, with operands by place, and arguments that were left out.

    Extents are told by what they are: where they are read of an input, and when, does not matter.
    """
    specs = program.graph_signature.input_specs
    names: dict[Node, str] = {}
    found: list[object] = []
    for node, spec in zip(program.graph.nodes, specs, strict=False):
        names[node] = spec.target or spec.arg.name
    for node in list(program.graph.nodes)[len(specs) :]:
        if isinstance(extent := node.meta.get("val"), torch.SymInt):
            names[node] = str(extent)
            continue
        given, named = map_arg((node.args, node.kwargs), names.__getitem__)
        arguments: Any = given
        if schema := getattr(node.target, "_schema", None):
            passed = dict(zip([a.name for a in schema.arguments], given, strict=False)) | named
            arguments = {a.name: passed.get(a.name, a.default_value) for a in schema.arguments}
        result = node.meta.get("val")
        kind = (result.dtype, result.dim()) if isinstance(result, torch.Tensor) else None
        names[node] = f"%{len(found)}"
        found.append((str(node.target), str(arguments), kind))
    return found


@pytest.mark.parametrize(
    ("model", "options", "in_place"),
    [
        ("tiny-llama", {"weights": "int8"}, True),
        ("gpt_oss", {}, True),  # softmax in another dtype, biases
        ("mixtral", {}, True),  # routing weights are divided in place
        ("gemma2", {"target": "cuda:sm_90", "backend": "onnx"}, True),  # products of three dims
        ("phi3", {}, True),  # chunks
        ("gpt_oss", {"cache": "padded"}, True),  # writes into inputs, masks
        ("stablelm", {}, True),  # layer norms, parts of one size
        ("phimoe", {}, False),  # masks
    ],
)
def test_rewritten_as_torch_does(
    model: str,
    options: dict[str, Any],
    in_place: bool,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def both(program: ExportedProgram) -> ExportedProgram:
        with monkeypatch.context() as patch:
            patch.setattr(core_aten, "_rewrite", lambda program, rules: False)
            expected = to_core_aten(program)
        made = to_core_aten(program)
        assert calls_of(made) == calls_of(expected)
        seen.append(made is program)
        return made

    monkeypatch.setattr(onnx, "to_core_aten", both)
    kvgraph.compile(model_folder(model), tmp_path / "out", check=False, **options)
    assert seen == [in_place]


class OneName(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        before = y.sum(0)
        y.add_(x)
        y.div_(before)
        return y * y


class TwoNames(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, :2].add_(1)
        return y * y


class State(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(1, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state.mul_(2)  # type: ignore[operator]
        return x * self.state


class AnotherDtype(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.half()
        y.add_(x)
        return y * 2


@pytest.mark.parametrize(
    ("module", "in_place"),
    [(OneName, True), (TwoNames, False), (State, False), (AnotherDtype, False)],
)
def test_what_is_written_in_place(module: type[nn.Module], in_place: bool) -> None:
    x = torch.arange(6.0).reshape(2, 3) + 1
    program = torch.export.export(module(), (x,))
    made = to_core_aten(program)
    assert (made is program) == in_place
    assert torch.equal(made.module()(x), module()(x))
    mutable = [n for n in made.graph.nodes if getattr(n.target, "_schema", None)]
    assert not any(n.target._schema.is_mutable for n in mutable)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(5, bias=False)
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole = self.linear(self.norm(x)[None]).contiguous()[0]
        first, second = whole.chunk(2, -1)
        a, b, c = whole.split(2, dim=1)
        joined = torch.concat([second, first, c, b, a], dim=-1).square().double()
        return torch.matmul(joined, joined.T).type_as(x)


class OfFourDims(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[None, None])  # type: ignore[no-any-return]


@pytest.mark.parametrize(("module", "in_place"), [(Parts, True), (OfFourDims, False)])
def test_operators_of_several_forms(module: type[nn.Module], in_place: bool) -> None:
    """`x` has a dynamic extent."""
    x = torch.arange(15.0).reshape(3, 5)
    own = module()
    dims = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(own, (x,), dynamic_shapes=dims, strict=False)
    made = to_core_aten(program)
    assert (made is program) == in_place
    for rows in (x, x[:2]):
        torch.testing.assert_close(made.module()(rows), own(rows))
    assert not any(core_aten._is_composite(node.target) for node in made.graph.nodes)
