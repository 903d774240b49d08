"""Mixtures of experts as models write them: what the passes that rewrite them match.

transformers exports every family through one function, `batched_mm`: a row's experts are gathered
from stacked weights, their two layers are batched products, and the results are weighed and summed.
What a family adds is its gate: SiLU or GELU, with limits and an offset (gpt_oss), from halves that
follow each other or take turns. A mixture that is anything else stays as it is, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.gates import ADDED, Gate, gate_of
from kvgraph.compiler.passes.operands import (
    CASTS,
    VIEWS,
    UnmatchedError,
    any_node,
    erase_unused,
    expect,
    node_of,
    other_factor,
    value,
    with_residual,
)
from kvgraph.compiler.passes.parameters import drop_unused, held
from kvgraph.compiler.values import Coded, Values, in_groups
from kvgraph.compiler.weights import Weights
from kvgraph.ops.packed import Form

aten = torch.ops.aten
GATHERED, PRODUCT, SUM, MUL = (
    aten.index.Tensor,
    aten.bmm.default,
    aten.sum.dim_IntList,
    aten.mul.Tensor,
)


@dataclass
class Layer:
    """A layer of all experts: `[experts, columns, inputs]`, biases `[experts, columns]`."""

    x: Node
    ids: Node
    name: str
    weight: torch.Tensor
    is_transposed: bool
    """`weight` is stored as `[experts, inputs, columns]`."""
    bias: tuple[str, torch.Tensor] | None

    @property
    def columns(self) -> int:
        return self.weight.shape[2 if self.is_transposed else 1]

    @property
    def inputs(self) -> int:
        return self.weight.shape[1 if self.is_transposed else 2]

    def parts(self, columns: Sequence[slice]) -> tuple[Hashable, ...]:
        """What weights of these `columns` are made of."""
        return self.name, self.bias and self.bias[0], *map(str, columns)

    def each(
        self, weights: Weights, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Weight `[columns, inputs]` and bias of one expert after the other, the weights in
        `dtype` where the checkpoint has them."""
        rows = weights.values(self.name, self.weight, dtype).open()
        biases = self._biases(weights)
        for expert in range(len(self.weight)):
            found = rows(expert, expert + 1)[0]
            weight = found.T if self.is_transposed else found
            yield weight, None if biases is None else biases[expert]

    def each_stored(
        self, weights: Weights, group: int
    ) -> Iterator[tuple[Coded, torch.Tensor | None]]:
        """As `each`, of what is kept as it is stored, as `in_groups`."""
        rows, biases = in_groups(self.source(weights), group), self._biases(weights)
        for expert in range(len(self.weight)):
            found = rows(expert, expert + 1).map(lambda part: part[0])
            yield found, None if biases is None else biases[expert]

    def source(self, weights: Weights) -> Values:
        """Its numbers."""
        return weights.values(self.name, self.weight, torch.float32)

    def _biases(self, weights: Weights) -> torch.Tensor | None:
        return None if self.bias is None else weights.values(*self.bias).read()


@dataclass
class Mixture:
    """A mixture whose result is `total`, of the dtype of its rows `x`; the residual is in it."""

    x: Node
    ids: Node
    weights: Node
    up: Layer
    gate: Gate
    down: Layer
    total: Node
    residual: Node | None = None

    def form(
        self, weights: Weights, bits: int, *, takes: Callable[[Form], bool] = lambda form: True
    ) -> tuple[Form, bool]:
        """As `Weights.form_of`, of both layers."""
        layers = self.up, self.down
        sources = [layer.source(weights) for layer in layers]
        transposed = [source.is_coded_transposed for source in sources]
        fits = transposed == [layer.is_transposed for layer in layers]
        return weights.form_of(sources, bits, can_keep=fits, takes=takes)


def rewrite_mixtures(
    program: ExportedProgram,
    name: str,
    kinds: Container[torch.dtype],
    replacement: Callable[[Mixture], Node],
    *,
    residuals: bool = False,
) -> PassReport:
    """Rewrite `program` in place, for pass `name`: each mixture whose rows and weights are of one
    of `kinds` by what `replacement` makes of it, before its total. `residuals`: a sum that only
    a mixture enters is its too."""
    report = PassReport(name)
    sums = [node for node in program.graph.nodes if node.target is SUM and _gathers(program, node)]
    if not sums:
        return report
    for total in sums:
        try:
            mixture = _mixture(program, total)
            _require_kinds(mixture, kinds)
            if residuals:
                mixture.residual, mixture.total = with_residual(mixture.total)
            _replace(mixture, replacement)
            report.applied += 1
        except UnmatchedError as why:
            report.unmatched.append(f"{total.name}: {why}")
    drop_unused(program)
    program.graph.lint()
    program.graph_module.recompile()
    return report


def _replace(mixture: Mixture, replacement: Callable[[Mixture], Node]) -> None:
    total = mixture.total
    with total.graph.inserting_before(total):
        whole = replacement(mixture)
    whole.meta["val"] = value(total)
    total.replace_all_uses_with(whole)
    erase_unused(total)


def _gathers(program: ExportedProgram, total: Node) -> bool:
    """Whether `total` sums what products with gathered weights gave."""
    waiting, seen = [total], set()
    for _ in range(8):  # nodes from the product of the second layer to the sum
        waiting = [x for node in waiting for x in node.all_input_nodes if x not in seen]
        seen.update(waiting)
    gathered = [n for n in seen if n.target is GATHERED and _stacked(program, n.args[0])]
    return any(n.target is PRODUCT for n in seen) and bool(gathered)


def _stacked(program: ExportedProgram, node: object) -> bool:
    found = held(program, node)
    return found is not None and found[1].dim() == 3


def _mixture(program: ExportedProgram, total: Node) -> Mixture:
    view = node_of(total.args[0], VIEWS, "a view of all slots")
    expect(total.args[1:] == ([1],), "expected a sum over a row's experts")
    weighed = node_of(view.args[0], (MUL,), "weighed results")
    scale = next((x for x in weighed.args if _is_column(x)), None)
    column = node_of(scale, (aten.unsqueeze.default,), "a weight of each slot")
    weights = _of_rows(column.args[0], "weights")
    down = _layer(program, other_factor(weighed, column))
    gate = gate_of(down.x)
    up = _layer(program, gate.both)
    ids = _of_rows(up.ids, "experts' ids")
    expect(_of_rows(down.ids, "experts' ids") is ids, "expected one choice for both layers")
    repeated = node_of(up.x, (aten.repeat_interleave.self_int,), "each row once an expert")
    x = any_node(repeated.args[0], "rows")
    active = value(ids).shape[1]
    expect(list(repeated.args[1:]) == [active, 0], "expected each row once an expert")
    expect(value(weights).shape[1] == active, "expected a weight for each expert of a row")
    inner, width = down.inputs, value(x).shape[-1]
    fits = (up.columns, up.inputs, down.columns) == (2 * inner, width, width)
    expect(fits and len(up.weight) == len(down.weight), "expected gate, up and down of one size")
    return Mixture(x, ids, weights, up, gate, down, _rounded(total, value(x).dtype))


def _rounded(total: Node, dtype: torch.dtype) -> Node:
    """A sum in float32, cast to the rows' dtype, where that is all that follows."""
    user = next(iter(total.users), total)
    is_cast = user.target in CASTS and value(user).dtype == dtype != value(total).dtype
    return user if len(total.users) == 1 and is_cast else total


def _require_kinds(mixture: Mixture, kinds: Container[torch.dtype]) -> None:
    dtype = value(mixture.x).dtype
    expect(dtype in kinds, f"expected float32, got {dtype}")
    found = {dtype, value(mixture.total).dtype, mixture.up.weight.dtype, mixture.down.weight.dtype}
    expect(len(found) == 1, f"expected one dtype, got {' and '.join(sorted(map(str, found)))}")


def _is_column(node: object) -> bool:
    return isinstance(node, Node) and value(node).dim() == 2 and value(node).shape[1] == 1


def _of_rows(node: object, what: str) -> Node:
    """`[rows, active]` of what is flat."""
    flat = node_of(node, VIEWS, f"flat {what}")
    rows = any_node(flat.args[0], what)
    expect(value(rows).dim() == 2, f"expected {what} of rows, got {value(rows).dim()} dims")
    return rows


def _layer(program: ExportedProgram, result: Node) -> Layer:
    """What a batched product with gathered weights, and perhaps biases, computes."""
    bias = None
    if result.target in ADDED:
        biases = [x for x in result.args if isinstance(x, Node) and x.target is GATHERED]
        expect(len(biases) == 1, "expected a bias of each expert")
        bias, result = biases[0], other_factor(result, biases[0])
    flat = node_of(result, (aten.squeeze.dim,), "a product of each slot")
    product = node_of(flat.args[0], (PRODUCT,), "a batched product")
    first, second = (any_node(x, "a factor") for x in product.args)
    is_transposed = second.target is GATHERED  # rows times [inputs, columns]
    gathered, column = (second, first) if is_transposed else (first, second)
    node_of(gathered, (GATHERED,), "gathered weights")
    ids = _ids(gathered)
    name, weight = _held(program, gathered, "weights")
    x = node_of(column, (aten.unsqueeze.default,), "a row of each slot").args[0]
    if bias is not None:
        expect(_ids(bias) is ids, "expected one choice for weights and biases")
    return Layer(
        any_node(x, "rows"),
        ids,
        name,
        weight,
        is_transposed,
        None if bias is None else _held(program, bias, "biases"),
    )


def _ids(gathered: Node) -> Node:
    indices = gathered.args[1]
    assert isinstance(indices, Sequence)
    expect(len(indices) == 1, "expected experts to be chosen by one index")
    return any_node(indices[0], "experts' ids")


def _held(program: ExportedProgram, gathered: Node, what: str) -> tuple[str, torch.Tensor]:
    found = held(program, gathered.args[0])
    expect(found is not None, f"expected {what} of the model, got computed ones")
    assert found is not None
    return found[0], found[1].detach()
