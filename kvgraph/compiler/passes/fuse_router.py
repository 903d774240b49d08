"""Replace a router's softmax or sigmoid, its top-k and the operators after it by kvgraph.route.

Applies to the router of a `kvgraph.experts` or `kvgraph.fused_experts`: scores by softmax or
sigmoid, a bias for the choice only, a choice of groups first (DeepSeek), weights divided by their
sum, a scale; or a softmax over the chosen logits (gpt_oss, GraniteMoE). The product before it stays
as it is. Weights stay in float32, even if the model rounds them to its dtype. Any other router, or
one that chooses among rounded scores, stays, and the report says why.
"""

from __future__ import annotations

import operator
from math import inf

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import (
    CASTS,
    KINDS,
    VIEWS,
    UnmatchedError,
    add_call,
    any_node,
    cast,
    erase_unused,
    expect,
    node_of,
    other_factor,
    value,
)
from kvgraph.compiler.passes.parameters import name_outputs
from kvgraph.errors import KernelError
from kvgraph.ops import ROUTE as ROUTE_SPEC
from kvgraph.ops import torch_fusions, torch_ops
from kvgraph.ops._route import SIGMOID, SOFTMAX, SOFTMAX_OF_CHOSEN

aten = torch.ops.aten
ROUTE = torch_ops.route.default
EXPERTS = (torch_ops.experts.default, torch_fusions.fused_experts.default)
SOFTMAXES, SIGMOIDS, TOPK = (aten.softmax.int,), (aten.sigmoid.default,), (aten.topk.default,)
ADD, GATHER, SUM = (aten.add.Tensor,), (aten.gather.default,), (aten.sum.dim_IntList,)
STEPS = 6
"""Most nodes from the choice of experts to their op; a rank's table of its experts lies between."""

Attributes = dict[str, int | float]


def fuse_router(program: ExportedProgram) -> PassReport:
    """Rewrite `program` in place, after `drop_no_ops`, and `pack_experts` or `fuse_experts`."""
    report, graph = PassReport("fuse_router"), program.graph
    for experts in [node for node in graph.nodes if node.target in EXPERTS]:
        try:
            own, weights = _of_all_ranks(any_node(experts.args[2], "weights"))
            if not _is_routed(weights):  # else other experts share this router, which is done
                router = _Router(weights)
                expect(_chooses(router.topk, experts), "expected experts and weights of one choice")
                weights = _fuse(router, weights)
                report.applied += 1
            _give(experts, weights, own)
        except UnmatchedError as why:
            report.unmatched.append(f"{experts.name}: {why}")
    name_outputs(program)
    graph.lint()
    program.graph_module.recompile()
    return report


class _Router:
    """A router that computes `weights`, matched backwards from there; UnmatchedError if unknown."""

    def __init__(self, weights: Node) -> None:
        self.attributes: Attributes = {}
        self.bias: Node | None = None
        chosen = self._before_division(self._before_scale(weights))
        if chosen.target in SOFTMAXES:
            _require_last_dim(chosen)
            self.topk = _topk_of(chosen.args[0], 0)
            kinds = (torch.float32, value(any_node(chosen.args[0], "logits")).dtype)
            expect(value(chosen).dtype in kinds, "expected a softmax of logits as they are")
            self.logits = _narrow(any_node(self.topk.args[0], "logits"))
            self.attributes["scores"] = SOFTMAX_OF_CHOSEN
        else:
            is_gathered = chosen.target in GATHER
            if is_gathered:
                _require_last_dim(chosen)
            self.topk = _topk_of(chosen.args[2] if is_gathered else chosen, int(is_gathered))
            scores = any_node(chosen.args[0], "scores") if is_gathered else None
            self.logits = self._scored(self._before_bias(self._all_groups(scores), scores))
        expect(value(self.logits).dim() == 2, "expected rows of logits")
        self.attributes["num_active"] = _best_of(self.topk)

    def _before_scale(self, weights: Node) -> Node:
        if weights.target is not aten.mul.Tensor or not isinstance(weights.args[1], int | float):
            return weights
        self.attributes["scale"] = float(weights.args[1])
        return any_node(weights.args[0], "weights")

    def _before_division(self, weights: Node) -> Node:
        if weights.target is not aten.div.Tensor:
            return weights
        chosen, total = (any_node(x, "weights divided by their sum") for x in weights.args)
        self.attributes["normalize"] = 1
        if total.target is aten.clamp.default:
            expect(len(total.args) == 2 and not total.kwargs, "expected a least sum alone")
            self.attributes["least_total"] = _number(total.args[1], "a least sum")
            total = any_node(total.args[0], "a sum of weights")
        if total.target in ADD:
            expect(not total.kwargs, "expected a number added to a sum as it is")
            self.attributes["epsilon"] = _number(total.args[1], "what is added to a sum")
            total = any_node(total.args[0], "a sum of weights")
        node_of(total, SUM, "weights divided by their sum")
        expect(total.args[0] is chosen, "expected weights divided by their own sum")
        expect(list(total.args[1:]) == [[-1], True], "expected a sum over a row's experts")
        expect(not total.kwargs, "expected a sum in its own dtype")
        return chosen

    def _all_groups(self, scores: Node | None) -> Node:
        """The scores from which experts are chosen, before other groups' experts are masked."""
        masked = any_node(self.topk.args[0], "scores")
        if masked.target is not aten.masked_fill.Scalar:
            return masked
        keys = any_node(masked.args[0], "scores")
        left_out = node_of(masked.args[1], (aten.bitwise_not.default,), "other groups")
        flat = node_of(_marks(left_out.args[0]), VIEWS, "experts of groups")
        each = node_of(flat.args[0], (aten.expand.default,), "each group's experts")
        column = node_of(each.args[0], (aten.unsqueeze.default,), "each group")
        expect(column.args[1] in (-1, 2), "expected groups of experts that lie side by side")
        marks = node_of(column.args[0], (aten.scatter.value,), "marked groups")
        zeros = node_of(marks.args[0], (aten.zeros_like.default,), "groups without a mark")
        expect((marks.args[1], marks.args[3]) in ((1, 1), (-1, 1)), "expected marks of 1")
        topk = _topk_of(marks.args[2], 1)
        best = any_node(topk.args[0], "a score of each group")
        expect(zeros.args[0] is best, "expected a mark of each group")
        groups, active = value(each).shape[1], _best_of(topk)
        group_best = _best_of_groups(best, keys, groups)
        if active < groups:
            # 0 is as good as -infinity if the masked scores are also the weights, and none is
            # below 0: a masked expert that is chosen then has weight 0.
            least = (-inf, 0) if scores is None else (-inf,)
            expect(masked.args[2] in least, f"expected -inf of other groups, got {masked.args[2]}")
            found = {"num_groups": groups, "active_groups": active, "group_best": group_best}
            self.attributes |= found
        return keys

    def _before_bias(self, keys: Node, scores: Node | None) -> Node:
        if scores is None or keys is scores:
            return keys
        self.bias = other_factor(node_of(keys, ADD, "a bias of scores"), scores)
        expect(not keys.kwargs, "expected a bias as it is")
        bias = self.bias.meta["val"]
        fits = isinstance(bias, torch.Tensor) and bias.shape == value(scores).shape[-1:]
        expect(fits and bias.dtype in KINDS, "expected a bias of each expert")
        return scores

    def _scored(self, scores: Node) -> Node:
        node_of(scores, SOFTMAXES + SIGMOIDS, "softmax or sigmoid")
        if scores.target in SOFTMAXES:
            _require_last_dim(scores)
        expect(value(scores).dtype == torch.float32, "expected a choice among scores in float32")
        self.attributes["scores"] = SOFTMAX if scores.target in SOFTMAXES else SIGMOID
        return _narrow(any_node(scores.args[0], "logits"))


def _fuse(router: _Router, weights: Node) -> Node:
    """Insert kvgraph.route and replace the router's results. Return the op's float32 weights."""
    graph, topk = weights.graph, router.topk
    _require_rules(router)
    with graph.inserting_before(topk):
        bias = router.bias if router.bias is None else cast(router.bias, torch.float32)
        whole = add_call(graph, ROUTE, router.logits, bias, **router.attributes)
        indices, weighed = (add_call(graph, operator.getitem, whole, i) for i in (0, 1))
        weights.replace_all_uses_with(cast(weighed, value(weights).dtype))
    erase_unused(weights)
    for found in list(topk.users):
        _replace(found, indices)
    return weighed


def _replace(found: Node, indices: Node) -> None:
    """Replace `found`, a top-k's values or indices, by those of the op's choice, for all users."""
    graph, topk, is_index = found.graph, any_node(found.args[0], "top-k"), found.args[1] == 1
    for user in list(found.users) if is_index else []:
        if user.target is aten._to_copy.default and user.kwargs == {"dtype": torch.int32}:
            user.replace_all_uses_with(indices)
            graph.erase_node(user)
    if found.users:  # for example with ranks that each have some of the experts
        with graph.inserting_before(topk):
            ids = cast(indices, torch.int64)
            given = ids if is_index else add_call(graph, *GATHER, topk.args[0], -1, ids)
        found.replace_all_uses_with(given)
    erase_unused(found)


def _give(experts: Node, weights: Node, own: Node | None) -> None:
    """Give `experts` these weights; `own`: weights of experts that the rank lacks become 0."""
    given = any_node(experts.args[2], "weights")
    if given.args == (own, weights, 0):
        return
    if own is not None:
        with experts.graph.inserting_before(experts):
            weights = add_call(experts.graph, aten.where.ScalarOther, own, weights, 0)
    experts.update_arg(2, weights)
    erase_unused(given)


@torch.no_grad()
def _require_rules(router: _Router) -> None:
    """Raise UnmatchedError if the op refuses the router's operands or attributes."""
    bias = None if router.bias is None else value(router.bias).float()
    try:
        torch_ops.fake(ROUTE_SPEC)(value(router.logits), bias, **router.attributes)
    except KernelError as why:
        raise UnmatchedError(str(why)) from why


def _of_all_ranks(given: Node) -> tuple[Node | None, Node]:
    """Mask of the chosen experts that the rank has (None: it has all), and the router's weights.

    The weights are those before rounding, and before weights of other ranks' experts become 0.
    """
    weights = _unrounded(given)
    if weights.target is not aten.where.ScalarOther or weights.args[2] != 0:
        return None, weights
    own, weights = (any_node(x, "own experts and weights") for x in weights.args[:2])
    return own, _unrounded(weights)


def _unrounded(weights: Node) -> Node:
    """The weights before any casts between dtypes of activations."""
    while (source := _source_of_cast(weights)) is not None:
        weights = source
    return weights


def _narrow(logits: Node) -> Node:
    """The logits before a cast to float32, if there is one."""
    source = _source_of_cast(logits)
    return logits if source is None or value(logits).dtype != torch.float32 else source


def _source_of_cast(node: Node) -> Node | None:
    """The operand of a cast between dtypes of activations; None for any other node."""
    is_cast = node.target in CASTS or (
        node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}
    )
    if not is_cast or value(node).dtype not in KINDS:
        return None
    source = any_node(node.args[0], "what is cast")
    return source if value(source).dtype in KINDS else None


def _chooses(topk: Node, experts: Node) -> bool:
    """Whether the indices that `experts` gets are those of `topk`, or places computed from them."""
    reached = [any_node(experts.args[1], "experts' ids")]
    for _ in range(STEPS):
        if any(node.target is operator.getitem and node.args == (topk, 1) for node in reached):
            return True
        reached = [source for node in reached for source in node.all_input_nodes]
    return False


def _is_routed(weights: Node) -> bool:
    source = weights.args[0] if weights.target is operator.getitem else None
    return isinstance(source, Node) and source.target is ROUTE


def _marks(given: object) -> Node:
    """The operand of a cast to bool."""
    cast_to = node_of(given, CASTS, "marks as true and false")
    expect(value(cast_to).dtype == torch.bool, "expected marks as true and false")
    return any_node(cast_to.args[0], "marks")


def _require_last_dim(node: Node) -> None:
    last = value(node).dim() - 1
    expect(node.args[1] in (-1, last), f"expected experts in the last dim of {node.name}")


def _topk_of(given: object, result: int) -> Node:
    """The top-k whose values (0) or indices (1) are `given`."""
    part = node_of(given, (operator.getitem,), "what is chosen")
    what = ("values", "indices")[result]
    expect(part.args[1:] == (result,), f"expected {what} of what is chosen")
    topk = node_of(part.args[0], TOPK, "top-k")
    _best_of(topk)
    return topk


def _best_of(topk: Node) -> int:
    """The k of a top-k; UnmatchedError unless it takes the largest values of the last dim."""
    _, count, *rest = topk.args
    dim, largest = (*rest, *(-1, True)[len(rest) :])[:2]
    expect(isinstance(count, int), f"expected a number of experts, got {count}")
    last = value(any_node(topk.args[0], "scores")).dim() - 1
    fits = (dim, largest) in ((-1, True), (last, True)) and topk.kwargs.keys() <= {"sorted"}
    expect(bool(fits), f"expected the largest of the last dim, got {topk.args[1:]}")
    assert isinstance(count, int)
    return count


def _best_of_groups(best: Node, keys: Node, groups: int) -> int:
    """Number of best experts that a group's score sums."""
    if best.target in SUM:
        is_plain = list(best.args[1:]) in ([[-1]], [[-1], False]) and not best.kwargs
        expect(is_plain, "expected a sum over a group, in its own dtype")
        topk = _topk_of(best.args[0], 0)
        count, source = _best_of(topk), topk.args[0]
    elif best.target is operator.getitem:
        greatest = node_of(best.args[0], (aten.max.dim,), "the best expert of a group")
        expect((best.args[1], *greatest.args[1:]) == (0, -1), "expected a group's best")
        count, source = 1, greatest.args[0]
    else:
        greatest = node_of(best, (aten.amax.default,), "a score of each group")
        expect(list(greatest.args[1:]) == [[-1]], "expected a group's best")
        count, source = 1, greatest.args[0]
    view = node_of(source, VIEWS, "scores in groups")
    expect(view.args[0] is keys, "expected groups of the scores that are chosen from")
    expect(value(view).dim() == 3 and value(view).shape[1] == groups, "expected scores in groups")
    return count


def _number(given: object, what: str) -> float:
    if not isinstance(given, int | float) or not 0 <= given < inf:
        raise UnmatchedError(f"expected {what}, got {given}")
    return float(given)
