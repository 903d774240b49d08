"""Match mixtures that run all experts on all rows, scaled by 0 for all but one expert (Llama 4).

A score is the sigmoid of the chosen expert's logit, and of -infinity for other experts. Each expert
gets all rows times their scores for it, and the results are summed over experts. No layer has a
bias, so rows of zeros give zeros, and the chosen expert alone gives the same sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.passes.gates import gate_of
from kvgraph.compiler.passes.mixtures import (
    Layer,
    MatchedExperts,
    is_column,
    is_stacked,
    require_sizes,
    weight_of,
)
from kvgraph.compiler.passes.operands import (
    CASTS,
    VIEWS,
    add_call,
    any_node,
    cast,
    expect,
    node_of,
    other_factor,
    value,
)

aten = torch.ops.aten
PRODUCT, REPEATED = (aten.bmm.default,), (aten.repeat.default,)


@dataclass
class MatchedAllExperts(MatchedExperts):
    """A mixture that scales the experts' inputs, not their results; `weights` are chosen logits."""

    score_dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32)
    """dtype in which the sigmoid is computed, and dtype to which it is rounded."""

    def rewritten(self, replacement: Callable[[MatchedExperts], Node]) -> Node:
        """Scale rows by their scores, and give the op weights of 1: see `MatchedExperts`."""
        graph, (computed, rounded) = self.x.graph, self.score_dtypes
        score = cast(add_call(graph, aten.sigmoid.default, cast(self.weights, computed)), rounded)
        rows = add_call(graph, aten.mul.Tensor, self.x, score)
        ones = add_call(graph, aten.full_like.default, score, 1, dtype=torch.float32)
        return replacement(replace(self, x=rows, weights=ones))


def runs_all(program: ExportedProgram, total: Node) -> bool:
    """Whether `total` is a sum over the products of all experts."""
    product = _unviewed(total.args[0])
    is_product = product.target in PRODUCT and is_stacked(program, product.args[1])
    return is_product and total.args[1:] == ([0],)


def mixture_of_all(program: ExportedProgram, total: Node) -> MatchedExperts:
    """The mixture that ends in the sum `total`, for which `runs_all` is true.

    UnmatchedError if it is any other mixture.
    """
    each = any_node(total.args[0], "results of experts")
    product = node_of(_unviewed(each), PRODUCT, "a product of all experts")
    expect(value(product).shape == value(each).shape, "expected a sum over experts")
    gate = gate_of(any_node(product.args[0], "a gate"))
    wide = node_of(gate.both, PRODUCT, "a product of all experts")
    weighed = any_node(wide.args[0], "rows of all experts")
    scaled = node_of(_unviewed(weighed), (aten.mul.Tensor,), "rows times their scores")
    found = (node for node in scaled.args if isinstance(node, Node) and node.target in REPEATED)
    repeated = node_of(next(found, None), REPEATED, "all rows for each expert")
    x = any_node(repeated.args[0], "rows")
    expect(value(x).dim() == 2, f"expected rows, got {value(x).dim()} dims")
    rows, width = value(x).shape
    scores, ids, logits, computed = _chosen(other_factor(scaled, repeated))
    up, down = (
        Layer(x, ids, *weight_of(program, node.args[1], "weights"), is_transposed=True, bias=None)
        for node in (wide, product)
    )
    count, active = len(up.weight), value(ids).shape[1]
    expect(active == 1, f"expected one expert of a row, got {active}")
    expect(repeated.args[1] == [count, 1], "expected all rows once for each expert")
    expect(value(weighed).shape == (count, rows, width), "expected the rows of each expert")
    expect(value(scores).shape == (rows, count), "expected a score of each expert")
    require_sizes(up, down, width)
    dtypes = computed, value(scores).dtype
    return MatchedAllExperts(x, ids, logits, up, gate, down, total, score_dtypes=dtypes)


def _chosen(column: Node) -> tuple[Node, Node, Node, torch.dtype]:
    """Scores by row, the chosen experts, their logits, and the dtype of the sigmoid."""
    expect(is_column(column), "expected a score of each row")
    turned = node_of(_unviewed(column), (aten.transpose.int,), "scores by expert")
    expect(set(turned.args[1:]) == {0, 1}, "expected scores by expert")
    scores = any_node(turned.args[0], "scores")
    sigmoid = node_of(_uncast(scores), (aten.sigmoid.default,), "a sigmoid of logits")
    logits = node_of(_uncast(sigmoid.args[0]), (aten.scatter.src,), "the chosen logits")
    rest, dim, ids, values = logits.args
    rest = node_of(rest, (aten.full_like.default,), "-inf for what is not chosen")
    least = rest.args[1]
    is_least = isinstance(least, float) and least == -inf
    expect(is_least, f"expected -inf for what is not chosen, got {least}")
    expect(isinstance(dim, int) and dim in (1, -1), "expected logits of a row's experts")
    parts = [node_of(part, (operator.getitem,), "a choice of experts") for part in (values, ids)]
    topk = node_of(parts[0].args[0], (aten.topk.default,), "a choice of experts")
    expect([part.args for part in parts] == [(topk, 0), (topk, 1)], "expected one choice")
    return scores, parts[1], parts[0], value(sigmoid).dtype


def _unviewed(node: object) -> Node:
    found = any_node(node, "a tensor")
    return _unviewed(found.args[0]) if found.target in VIEWS else found


def _uncast(node: object) -> Node:
    """The operand of a cast, or `node` itself if it is no cast."""
    found = any_node(node, "a tensor")
    return any_node(found.args[0], "a tensor") if found.target in CASTS else found
