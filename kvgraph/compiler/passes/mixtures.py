"""The parts of a matched mixture of experts, for the passes that rewrite it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.joined_forms import Takes
from kvgraph.compiler.kept_rows import in_groups
from kvgraph.compiler.passes.gates import Gate
from kvgraph.compiler.passes.operands import UnmatchedError, expect, expect_dtype, value
from kvgraph.compiler.passes.parameters import held
from kvgraph.compiler.values import Coded, Values
from kvgraph.compiler.weights import Weights
from kvgraph.ops.packed import Form


@dataclass
class Layer:
    """One linear layer of all experts: weight `[experts, columns, inputs]`, bias `[experts,
    columns]`."""

    x: Node
    ids: Node
    name: str
    weight: torch.Tensor
    is_transposed: bool
    """Whether `weight` is stored as `[experts, inputs, columns]`."""
    bias: tuple[str, torch.Tensor] | None

    @property
    def columns(self) -> int:
        return self.weight.shape[2 if self.is_transposed else 1]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 2]

    def parts(self, columns: Sequence[slice]) -> tuple[Hashable, ...]:
        """A key that is equal for packed weights of the same tensors and `columns`."""
        return self.name, self.bias and self.bias[0], *map(str, columns)

    def each(
        self, weights: Weights, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Weight `[columns, inputs]` and bias of each expert in order.

        `dtype`: dtype in which weights are read from the checkpoint; None: the layer's.
        """
        rows = weights.values(self.name, self.weight, dtype).open()
        biases = self._biases(weights)
        for expert in range(len(self.weight)):
            found = rows(expert, expert + 1)[0]
            weight = found.T if self.is_transposed else found
            yield weight, None if biases is None else biases[expert]

    def each_stored(
        self, weights: Weights, group: int
    ) -> Iterator[tuple[Coded, torch.Tensor | None]]:
        """Weight as stored and bias of each expert in order, in groups of `group` inputs."""
        rows, biases = in_groups(self.source(weights), group), self._biases(weights)
        for expert in range(len(self.weight)):
            found = rows(expert, expert + 1).map(lambda part: part[0])
            yield found, None if biases is None else biases[expert]

    def form(self, weights: Weights, bits: int, *, takes: Takes) -> tuple[Form, bool]:
        """The form of its weights, and whether they keep it as stored; see `Weights.form_of`."""
        source = self.source(weights)
        fits = source.is_coded_transposed == self.is_transposed
        return weights.form_of([source], bits, can_keep=fits, takes=takes)

    def source(self, weights: Weights) -> Values:
        """The source of the whole weight's values, in float32."""
        return weights.values(self.name, self.weight, torch.float32)

    def _biases(self, weights: Weights) -> torch.Tensor | None:
        return None if self.bias is None else weights.values(*self.bias).read()


@dataclass
class MatchedExperts:
    """A matched mixture of experts over rows `x`. Its result `total` has the dtype of `x`, and
    includes `residual` if there is one."""

    x: Node
    ids: Node
    weights: Node
    up: Layer
    gate: Gate
    down: Layer
    total: Node
    residual: Node | None = None

    def rewritten(self, replacement: Callable[[MatchedExperts], Node]) -> Node:
        """The node that computes `total`, made by `replacement` at the graph's insertion point."""
        return replacement(self)


def require_kinds(mixture: MatchedExperts, kinds: Collection[torch.dtype]) -> None:
    """Raise UnmatchedError unless rows, weights and result have one dtype, which is in `kinds`."""
    dtype = value(mixture.x).dtype
    expect_dtype(dtype, kinds)
    found = {dtype, value(mixture.total).dtype, mixture.up.weight.dtype, mixture.down.weight.dtype}
    expect(len(found) == 1, f"expected one dtype, got {' and '.join(sorted(map(str, found)))}")


def require_sizes(up: Layer, down: Layer, width: int) -> None:
    """Raise UnmatchedError unless `up` (gate and up) maps rows of `width` to twice the inputs of
    `down`, and `down` maps back to `width`."""
    inner = down.inputs
    fits = (up.columns, up.inputs, down.columns) == (2 * inner, width, width)
    expect(fits and len(up.weight) == len(down.weight), "expected gate, up and down of one size")


def weight_of(program: ExportedProgram, node: object, what: str) -> tuple[str, torch.Tensor]:
    """Name and tensor of a weight of the model. UnmatchedError if `node` is computed."""
    found = held(program, node)
    if found is None:
        raise UnmatchedError(f"expected {what} of the model, got computed ones")
    return found[0], found[1].detach()


def is_stacked(program: ExportedProgram, node: object) -> bool:
    """Whether `node` is a weight of all experts: a parameter with three dims."""
    found = held(program, node)
    return found is not None and found[1].dim() == 3


def is_column(node: object) -> bool:
    """Whether `node` has the shape `[rows, 1]`."""
    return isinstance(node, Node) and value(node).dim() == 2 and value(node).shape[1] == 1
