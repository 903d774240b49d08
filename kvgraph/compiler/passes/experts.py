"""Match mixtures of experts as models write them, for the passes that rewrite them.

transformers exports every family but Llama 4 (`all_experts.py`) through one function, `batched_mm`:
a row's experts are gathered from stacked weights, their two layers are batched products, and the
results are weighted and summed. Families differ in the gate: SiLU or GELU, with limits and an
offset (gpt_oss), of halves that follow each other or are interleaved. Any other mixture stays as it
is, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.all_experts import mixture_of_all, runs_all
from kvgraph.compiler.passes.gates import ADDED, gate_of
from kvgraph.compiler.passes.mixtures import (
    Layer,
    MatchedExperts,
    is_column,
    is_stacked,
    require_kinds,
    require_sizes,
    weight_of,
)
from kvgraph.compiler.passes.operands import (
    VIEWS,
    UnmatchedError,
    any_node,
    erase_unused,
    expect,
    node_of,
    other_factor,
    rounded,
    value,
    with_residual,
)
from kvgraph.compiler.passes.parameters import drop_unused

aten = torch.ops.aten
GATHERED, PRODUCT, SUM, MUL = (
    aten.index.Tensor,
    aten.bmm.default,
    aten.sum.dim_IntList,
    aten.mul.Tensor,
)


def rewrite_mixtures(
    program: ExportedProgram,
    name: str,
    kinds: Collection[torch.dtype],
    replacement: Callable[[MatchedExperts], Node],
    *,
    residuals: torch.dtype | None = None,
) -> PassReport:
    """Rewrite mixtures of `program` in place, for pass `name`.

    `kinds`: dtypes of rows and weights of mixtures to rewrite.
    `replacement`: makes the node that computes a mixture, inserted before the mixture's total.
    `residuals`: a mixture with a result of this dtype takes over the addition of a residual to it.
    """
    report = PassReport(name)
    sums = [node for node in program.graph.nodes if node.target is SUM]
    gathered = {node: _mixture for node in sums if _gathers(program, node)}
    found = gathered | {node: mixture_of_all for node in sums if runs_all(program, node)}
    if not found:
        return report
    for total, matched in found.items():
        try:
            mixture = matched(program, total)
            require_kinds(mixture, kinds)
            if value(mixture.total).dtype is residuals:
                mixture.residual, mixture.total = with_residual(mixture.total)
            _replace(mixture, replacement)
            report.applied += 1
        except UnmatchedError as why:
            report.unmatched.append(f"{total.name}: {why}")
    drop_unused(program)
    program.graph.lint()
    program.graph_module.recompile()
    return report


def _replace(mixture: MatchedExperts, replacement: Callable[[MatchedExperts], Node]) -> None:
    total = mixture.total
    with total.graph.inserting_before(total):
        whole = mixture.rewritten(replacement)
    whole.meta["val"] = value(total)
    total.replace_all_uses_with(whole)
    erase_unused(total)


def _gathers(program: ExportedProgram, total: Node) -> bool:
    """Whether `total` is a sum over results of products with gathered weights."""
    waiting, seen = [total], set()
    for _ in range(8):  # nodes from the product of the second layer to the sum
        waiting = [x for node in waiting for x in node.all_input_nodes if x not in seen]
        seen.update(waiting)
    gathered = [n for n in seen if n.target is GATHERED and is_stacked(program, n.args[0])]
    return any(n.target is PRODUCT for n in seen) and bool(gathered)


def _mixture(program: ExportedProgram, total: Node) -> MatchedExperts:
    view = node_of(total.args[0], VIEWS, "a view of all slots")
    expect(total.args[1:] == ([1],), "expected a sum over a row's experts")
    weighed = node_of(view.args[0], (MUL,), "weighed results")
    scale = next((x for x in weighed.args if is_column(x)), None)
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
    require_sizes(up, down, value(x).shape[-1])
    return MatchedExperts(x, ids, weights, up, gate, down, rounded(total, value(x).dtype))


def _of_rows(node: object, what: str) -> Node:
    """The node `[rows, active]` of which `node` is a flat view."""
    flat = node_of(node, VIEWS, f"flat {what}")
    rows = any_node(flat.args[0], what)
    expect(value(rows).dim() == 2, f"expected {what} of rows, got {value(rows).dim()} dims")
    return rows


def _layer(program: ExportedProgram, result: Node) -> Layer:
    """The layer that a batched product with gathered weights, and perhaps biases, computes."""
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
    name, weight = weight_of(program, gathered.args[0], "weights")
    x = node_of(column, (aten.unsqueeze.default,), "a row of each slot").args[0]
    if bias is not None:
        expect(_ids(bias) is ids, "expected one choice for weights and biases")
    return Layer(
        any_node(x, "rows"),
        ids,
        name,
        weight,
        is_transposed,
        None if bias is None else weight_of(program, bias.args[0], "biases"),
    )


def _ids(gathered: Node) -> Node:
    indices = gathered.args[1]
    assert isinstance(indices, Sequence)
    expect(len(indices) == 1, "expected experts to be chosen by one index")
    return any_node(indices[0], "experts' ids")
