"""Mixture of experts -> kvgraph.experts over packed weights (CPU targets).

transformers exports every family through one function, `batched_mm`: a row's experts are gathered
from stacked weights, their two layers are batched products, and the results are weighed and summed.
What a family adds is its gate: SiLU or GELU, with limits and an offset (gpt_oss), from halves that
follow each other or take turns. A mixture that is anything else stays as it is, and says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.packed_weights import Packed, Section, pack_in_parts, shapes
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.gates import ADDED, Gate, gate_of
from kvgraph.compiler.passes.operands import (
    UnmatchedError,
    any_node,
    erase_unused,
    expect,
    node_of,
    other_factor,
    value,
)
from kvgraph.compiler.passes.parameters import add_packed, array_of, drop_unused, held
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dims import Array
from kvgraph.ops import torch_ops

aten = torch.ops.aten
PACKED = torch_ops.experts.default
GATHERED, PRODUCT, SUM, MUL = (
    aten.index.Tensor,
    aten.bmm.default,
    aten.sum.dim_IntList,
    aten.mul.Tensor,
)
VIEWS = (aten.view.default, aten.reshape.default)


@dataclass
class _Layer:
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

    def each(self, weights: Weights) -> Iterator[tuple[Array, Array | None]]:
        """Weight and bias of one expert after the other."""
        rows = weights.values(self.name, self.weight).open()
        biases = None if self.bias is None else array_of(weights.values(*self.bias).read())
        for expert in range(len(self.weight)):
            found = rows(expert, expert + 1)[0]
            weight = array_of(found.T if self.is_transposed else found)
            yield weight, None if biases is None else biases[expert]


@dataclass
class _Mixture:
    x: Node
    ids: Node
    weights: Node
    up: _Layer
    gate: Gate
    down: _Layer
    total: Node


def pack_experts(program: ExportedProgram, bits: int | None, weights: Weights) -> PassReport:
    """Rewrite `program` in place; its packed weights are made later. `bits` None: weights stay
    float32."""
    report = PassReport("pack_experts")
    sums = [node for node in program.graph.nodes if node.target is SUM and _gathers(program, node)]
    if not sums:
        return report
    for total in sums:
        try:
            _rewrite(program, _mixture(program, total), bits or 32, weights)
            report.applied += 1
        except UnmatchedError as why:
            report.unmatched.append(f"{total.name}: {why}")
    drop_unused(program)
    program.graph.lint()
    program.graph_module.recompile()
    return report


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


def _mixture(program: ExportedProgram, total: Node) -> _Mixture:
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
    kinds = {value(node).dtype for node in (x, weights, total)}
    expect(kinds == {torch.float32}, f"expected float32, got {' and '.join(map(str, kinds))}")
    inner, width = down.inputs, value(x).shape[-1]
    fits = (up.columns, up.inputs, down.columns) == (2 * inner, width, width)
    expect(fits and len(up.weight) == len(down.weight), "expected gate, up and down of one size")
    return _Mixture(x, ids, weights, up, gate, down, total)


def _is_column(node: object) -> bool:
    return isinstance(node, Node) and value(node).dim() == 2 and value(node).shape[1] == 1


def _of_rows(node: object, what: str) -> Node:
    """`[rows, active]` of what is flat."""
    flat = node_of(node, VIEWS, f"flat {what}")
    rows = any_node(flat.args[0], what)
    expect(value(rows).dim() == 2, f"expected {what} of rows, got {value(rows).dim()} dims")
    return rows


def _layer(program: ExportedProgram, result: Node) -> _Layer:
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
    return _Layer(
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


def _rewrite(program: ExportedProgram, mixture: _Mixture, bits: int, weights: Weights) -> None:
    graph, total = program.graph, mixture.total
    up, down, inner = mixture.up, mixture.down, mixture.down.inputs
    halves = [mixture.gate.gate, mixture.gate.up]
    given = [
        *_add(program, up, [inner, inner], bits, weights, halves),
        *_add(program, down, [down.columns], bits, weights, [slice(None)]),
    ]
    packed, rest = given[::4], [x for i, x in enumerate(given) if i % 4]
    attributes: dict[str, float] = {"inner_features": inner, "bits": bits}
    with graph.inserting_before(total):
        ids = graph.call_function(aten._to_copy.default, (mixture.ids,), {"dtype": torch.int32})
        ids.meta["val"] = value(mixture.ids).to(torch.int32)
        operands = (mixture.x, ids, mixture.weights, *packed, *rest)
        whole = graph.call_function(PACKED, operands, attributes | mixture.gate.attributes)
    whole.meta["val"] = value(total)
    total.replace_all_uses_with(whole)
    erase_unused(total)


def _add(
    program: ExportedProgram,
    layer: _Layer,
    features: list[int],
    bits: int,
    weights: Weights,
    halves: list[slice],
) -> list[Node | None]:
    """New parameters of a layer whose experts are packed in these parts of their columns."""

    def make() -> Iterator[Packed]:
        for weight, bias in layer.each(weights):
            sections = [Section.of(weight[h], None if bias is None else bias[h]) for h in halves]
            yield from pack_in_parts(sections, layer.inputs, bits, interleave=len(halves) > 1)

    forms = {
        name: ((len(layer.weight), *shape), dtype)
        for name, (shape, dtype) in shapes(
            features, layer.inputs, bits, layer.bias is not None
        ).items()
    }
    return add_packed(program, weights, layer.name, forms, make)
