"""Check that a program mixes tokens only in the cache ops.

A batch holds tokens of several requests, and a prompt comes in chunks. An operation that mixes
tokens outside of attention would leak tokens between requests, and its result would depend on where
a chunk ends. So each element of q, k and v must be computed from its own token alone, and each row
of logits from the token that `logits_indices` names for it. The rules are in `token_labels.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node

from kvgraph.compiler.cache import CachePlan, as_paged
from kvgraph.compiler.export import export, lowering
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.labels import LONG_STEP, TOKENS, everything, nothing, own
from kvgraph.compiler.passes.parameters import inputs_of
from kvgraph.compiler.passes.token_labels import TokenLabels
from kvgraph.compiler.passes.writes import base_of, writes_are_plain, written_by
from kvgraph.compiler.sources import place
from kvgraph.contract.dims import NUM_LOGITS, NUM_PAGE_SLOTS, TOTAL_SEQ_LEN, split_dim
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError
from kvgraph.ops import SPECS, OpSpec

CACHE_OPS = {f"kvgraph.{spec.name}.default": spec for spec in SPECS}


def require_model_tokens_apart(
    model: Model, program: ExportedProgram, signature: GraphSignature, plan: CachePlan
) -> PassReport:
    """Raise UnsupportedError unless only cache ops mix tokens; with a padded cache, the model is
    checked over a paged one.

    A padded cache is plain operators, in which attention cannot be distinguished from mixing. A
    user's own module has no paged form, so it is not checked then, and the report says so.
    """
    if plan.strategy is not KVCacheStrategy.PADDED:
        return require_tokens_apart(program, signature)
    if model.is_own:
        why = "the module's own attention over a padded cache is not told from mixing tokens"
        return PassReport("require_tokens_apart", unmatched=[why])
    paged = as_paged(plan)
    record = paged.params.get_symbolic_inputs()[0]
    seen = GraphSignature.of(record, model.vocab_size)
    model.place(paged)
    try:
        return require_tokens_apart(export(model, seen, return_buffers=False), seen)
    finally:
        model.place(plan)


def require_tokens_apart(program: ExportedProgram, signature: GraphSignature) -> PassReport:
    """Raise UnsupportedError unless only cache ops mix tokens. The program is not changed.

    The report counts the cache ops, and the logits, for which this was proved.
    """
    others = [node for node in program.graph.nodes if not _cache_op(node)]
    if writes_are_plain(others):
        with contextlib.suppress(UnsupportedError):
            return _followed(program, signature)
    # Decomposed: without in-place writes, and in operators that have rules.
    with lowering():
        return _followed(program.run_decompositions(), signature)


def _followed(program: ExportedProgram, signature: GraphSignature) -> PassReport:
    """Follow a program through a short step, then through a long one.

    A shift by TOKENS or more tokens does not show in the first. Their extents have nothing in
    common, so what looks like no shift in one of them shows in the other.
    """
    report = _Follower(program, signature, TOKENS, torch.arange(TOKENS), others=2).run()
    # Fewer logits than tokens, as in every step of an engine, and not in the tokens' order.
    _Follower(program, signature, LONG_STEP, torch.arange(LONG_STEP).flip(0)[::2], others=5).run()
    return report


class _Follower:
    def __init__(
        self,
        program: ExportedProgram,
        signature: GraphSignature,
        tokens: int,
        asked: torch.Tensor,
        *,
        others: int,
    ) -> None:
        """Prepare labels of the program's inputs.

        `tokens`: the number of tokens of the step.
        `asked`: the values of `logits_indices`, in any order.
        `others`: the extent of symbolic dims that do not count tokens.
        """
        sizes = {TOTAL_SEQ_LEN: tokens, NUM_LOGITS: len(asked)}
        self._asked = asked
        self._program = program
        self._report = PassReport("require_tokens_apart")
        self._mixers: dict[Node, Node] = {}  # mixed value -> node that mixed tokens first
        inputs = inputs_of(program, signature)
        extents: dict[object, int] = {}
        count: object = None
        for node, symbol in inputs.items():
            for extent, dim in zip(node.meta["val"].shape, symbol.shape, strict=True):
                if isinstance(dim, str) and not split_dim(dim)[1]:
                    extents[extent.node.expr] = sizes.get(dim, others)
                    count = extent.node.expr if dim == TOTAL_SEQ_LEN else count
        self._labels = TokenLabels(extents, count, others)
        for node in program.graph.find_nodes(op="placeholder"):
            self._labels.set(node, nothing(self._labels.shape(node)))
        for node, symbol in inputs.items():
            shape = self._labels.shape(node)
            if symbol.name == "tokens":
                self._labels.set(node, own(shape))
            elif symbol.name == "logits_indices":
                self._labels.set(node, nothing(shape), asked.int())
            elif symbol.kind == "buffer":
                self._labels.set(node, everything(shape))
        self._pools = {node for node, symbol in inputs.items() if symbol.kind == "buffer"}

    def run(self) -> PassReport:
        nodes = list(self._program.graph.nodes)
        last_users = {x: node for node in nodes for x in node.all_input_nodes}
        for node in nodes:
            if node.op == "call_function":
                self._follow(node)
            elif node.op == "output":
                self._end(node)
            for x in node.all_input_nodes:
                if last_users[x] is node:
                    self._labels.forget(x)
        return self._report

    def _follow(self, node: Node) -> None:
        cache_op = _cache_op(node)
        if cache_op is not None:
            self._meet(node, *cache_op)
            return
        self._labels.follow(node)
        if self._labels.mixes(node):
            before = [self._mixers[x] for x in node.all_input_nodes if x in self._mixers]
            self._mixers[node] = before[0] if before else node
        for written in written_by(node):
            if written not in self._pools:
                self._write(node, written)

    def _write(self, node: Node, written: Node) -> None:
        """Label `written` after `node` wrote it in place. Nothing reads its old value later."""
        base = base_of(written)
        if base.op == "placeholder" and base not in self._pools:
            self._require_empty(node, f"{base.name}, which the next step reads,")
        if isinstance(node.meta.get("val"), torch.Tensor):
            self._labels.set(written, self._labels[node])
            if node in self._mixers:
                self._mixers[written] = self._mixers[node]

    def _meet(self, node: Node, spec: OpSpec, given: Mapping[str, Any]) -> None:
        """Check a cache op, in which tokens may mix: operands with a token dim must depend on their
        own tokens, others on no token. Its result counts as each token's own."""
        for operand in spec.inputs:
            x = given.get(operand.name)
            if not isinstance(x, Node) or operand.dims[0] == NUM_PAGE_SLOTS:
                continue
            what = f"{operand.name} of {spec.name} in layer {given['layer']}"
            if operand.dims[0] == TOTAL_SEQ_LEN:
                self._require_own(x, what)
            else:
                self._require_empty(x, what)
        made = node.meta.get("val")
        if isinstance(made, list | tuple):  # the functional form returns the pools too
            shapes = [() if x is None else self._labels.shape_of(x) for x in made]
            pools = [everything(shape) for shape in shapes[1:]]
            self._labels.set(node, [own(shapes[0]) if shapes[0] else nothing(()), *pools])
        elif isinstance(made, torch.Tensor):
            self._labels.set(node, own(self._labels.shape(node)))
        self._report.applied += 1

    def _end(self, output: Node) -> None:
        results: Any = output.args[0]
        for result, spec in zip(results, self._program.graph_signature.output_specs, strict=True):
            if spec.kind is OutputKind.BUFFER_MUTATION:
                self._require_empty(result, f"{spec.target}, which the next step reads,")
        users = [
            result
            for result, spec in zip(
                results, self._program.graph_signature.output_specs, strict=True
            )
            if spec.kind is OutputKind.USER_OUTPUT
        ]
        self._require_own(users[0], "each row of logits", self._asked)
        self._report.applied += 1

    def _require_own(self, node: Node, what: str, rows: torch.Tensor | None = None) -> None:
        """Raise UnsupportedError unless row t of `node` depends on token `rows[t]` only, or on no
        token. `rows`: t itself if None."""
        found = self._labels[node].distinct()
        count, *others = self._labels.shape(node)
        expected = own([count, *[1] * len(others)], rows)
        alone = (found.high < 0) | ((found.low == expected.low) & (found.high == expected.low))
        if not bool(alone.all()):
            raise self._mixed(node, f"{what} to depend on its own token alone")

    def _require_empty(self, node: Node, what: str) -> None:
        if not self._labels[node].is_empty:
            raise self._mixed(node, f"{what} to depend on no token")

    def _mixed(self, node: Node, what: str) -> UnsupportedError:
        mixer = self._mixers.get(node, node)
        if mixer in self._labels.unknown:
            return UnsupportedError(
                f"tokens: expected {what}, got an operator that is not known to keep tokens apart: "
                f"{place(mixer)}; write it with other operators"
            )
        return UnsupportedError(
            f"tokens: expected {what}, got other tokens through {place(mixer)}; only the cache ops "
            "may mix tokens, or requests of one batch see each other's"
        )


def _cache_op(node: Node) -> tuple[OpSpec, Mapping[str, Any]] | None:
    """The spec of the cache op that a node calls, and its arguments by name; None for others."""
    if node.target is auto_functionalized_v2:
        spec = CACHE_OPS.get(str(node.args[0]))
        return None if spec is None else (spec, node.kwargs)
    spec = CACHE_OPS.get(str(node.target))
    return None if spec is None else (spec, spec.arguments(node.args, node.kwargs))
