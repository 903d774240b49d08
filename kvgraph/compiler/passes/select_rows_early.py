"""Take the rows of `logits_indices` right behind the last cache op, not just before the logits.

Applies to all that only logits read: the output projection, the MLP or the experts of the last
layer, and the final norm. A prompt then computes them for its last token alone. Values that caches
or other layers read too keep all rows.

Decision: operators of ALIKE do the same to each row, and `require_tokens_apart` has proved that a
row that is computed from a token is computed from its own. So they need no rules here: they run
again over fewer rows, on fake values. The pass changes nothing if one of them then fails, or
returns another shape. If it fails over all rows too, that is no property of the model, since it ran
at the export: the compile stops. The proof does not cover rows that no token is in, such as
positions: they are computed for all tokens, and selected.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg
from torch.utils._pytree import tree_leaves

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.label_kinds import NORMS, RESHAPED, SAME, is_pointwise
from kvgraph.compiler.passes.operands import (
    CHECK,
    UnmatchedError,
    add_call,
    any_node,
    expect,
    value,
)
from kvgraph.compiler.passes.parameters import inputs_of, name_outputs
from kvgraph.compiler.passes.token_functions import LAYOUT, REDUCED, VIEWS, packet
from kvgraph.compiler.passes.writes import base_of, written_by
from kvgraph.compiler.quiet import first_line
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError
from kvgraph.ops import torch_ops
from kvgraph.ops.torch_nodes import is_dense

aten = torch.ops.aten
AT_DIM = {
    **dict.fromkeys((aten.index_select, aten.gather, aten.scatter, aten.scatter_), 1),
    **dict.fromkeys((aten.slice_scatter, aten.select_scatter), 2),
}
"""Operators that are given numbers of places along a dim -> the argument that is this dim."""

MADE_LIKE = (aten.zeros_like, aten.ones_like, aten.full_like, aten.new_zeros, aten.new_ones)
"""Operators that take a shape, and no number, of their operand."""

ALIKE = (
    *(*LAYOUT, *SAME, *RESHAPED, *NORMS, *REDUCED, *AT_DIM, aten.index, aten.embedding),
    *(aten.concat, aten.narrow, aten.movedim, aten.swapaxes, aten.tile, aten.expand_as),
    *(aten.linear, aten.addmm, aten.mm, aten.bmm, aten.baddbmm, aten.matmul, aten.einsum),
    *(aten.softmax, aten._softmax, aten.log_softmax, aten._log_softmax, aten.topk, aten.sort),
    *(*MADE_LIKE, aten.fill),
    *(torch_ops.all_reduce, torch_ops.all_gather),
)
"""Operators that do the same to each row of tokens, as pointwise ones do."""

FAILS = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
"""Errors of calls on fake values, of operators that refuse them and of torch itself."""

SIZED = (*LAYOUT, *RESHAPED, aten.new_zeros, aten.new_ones)
"""Operators of ALIKE that may be given the number of tokens, as an extent."""


def select_rows_early(program: ExportedProgram, signature: GraphSignature) -> PassReport:
    """Rewrite `program` in place. The report counts operators that run over fewer rows."""
    report = PassReport("select_rows_early")
    rows = _Rows(program, signature)
    try:
        moved = rows.only_for_logits()
        if not moved:
            return report
        made = rows.run_again(moved)
    except UnmatchedError as why:
        report.unmatched.append(str(why))
        return report
    rows.move(moved, made)
    report.applied = len(moved)
    name_outputs(program)
    program.graph.lint()
    return report


class _Rows:
    def __init__(self, program: ExportedProgram, signature: GraphSignature) -> None:
        inputs = {symbol.name: node for node, symbol in inputs_of(program, signature).items()}
        self._graph: Graph = program.graph
        self._asked = inputs["logits_indices"]
        self._tokens = _expression(value(inputs["tokens"]).shape[0])
        self._index = self._asked
        self._few: dict[Node, Node] = {}
        self._of_tokens = {inputs["tokens"]}
        for node in self._graph.nodes:
            if packet(node) not in MADE_LIKE and not self._of_tokens.isdisjoint(
                x for x in node.all_input_nodes if not _is_scalar(x)
            ):
                self._of_tokens.add(node)
        self._written = {base_of(x) for node in self._graph.nodes for x in written_by(node)}
        self._selects = {node: None for node in self._graph.nodes if self._is_select(node)}

    def _is_select(self, node: Node) -> bool:
        """Whether `node` takes the rows of `logits_indices` along its operand's tokens."""
        if node.target is not aten.index.Tensor:
            return False
        source, indices = node.args
        assert isinstance(source, Node)
        assert isinstance(indices, list | tuple)
        *others, index = indices
        is_asked = isinstance(index, Node) and _cast_from(index) is self._asked
        if not is_asked or any(others) or self._token_dim(source) != len(others):
            return False
        assert isinstance(index, Node)
        self._index = index
        return True

    def only_for_logits(self) -> list[Node]:
        """The calls, in order, that can run over fewer rows: only they and the selects read their
        results."""
        found = set(self._selects)
        for node in reversed(self._graph.nodes):
            if self._is_alike(node) and found.issuperset(_readers(node)):
                found.add(node)
        found.difference_update(self._selects)
        while wrong := {node for node in found if not self._can_move(node, found)}:
            found -= wrong
        return [node for node in self._graph.nodes if node in found]

    def _is_alike(self, node: Node) -> bool:
        """Whether a call returns rows of tokens, does the same to each, and does not look for rows
        by their numbers."""
        kind = packet(node)
        if node not in self._of_tokens and kind not in MADE_LIKE:
            return False
        made = [x for x in tree_leaves(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        if node.op != "call_function" or not made or not all(map(self._has_whole_rows, made)):
            return False
        if kind is aten.squeeze and len(node.args) == 1:  # it would drop a dim of one row
            return False
        if kind is aten.unflatten and -1 in node.args[2]:  # type: ignore[operator]
            return False  # torch cannot compute it for no rows
        if kind is aten.index or kind in AT_DIM:
            where = [*node.args, 0, 0][AT_DIM.get(kind, 1)]  # a dim that is left out is the first
            assert isinstance(where, int | list | tuple)
            at = [where] if isinstance(where, int) else [d for d, x in enumerate(where) if x]
            shape = value(any_node(node.args[0], "a tensor")).shape
            return not any(self._counts(shape[dim]) for dim in at)
        return kind in ALIKE or is_pointwise(node)

    def _can_move(self, node: Node, moved: set[Node]) -> bool:
        """Whether all that `node` reads and writes has fewer rows, or can have, with `moved`."""
        if not all(user in moved or user in self._selects for user in _readers(node)):
            return False
        if not all(base_of(written) in moved for written in written_by(node)):
            return False
        outside = [x for x in node.all_input_nodes if x not in moved]
        with_rows = [x for x in outside if self._has_rows(x.meta.get("val"))]
        if any(_is_scalar(x) for x in outside) and packet(node) not in SIZED:
            return False
        if any(base_of(x) in self._written for x in with_rows):
            return False
        has_rows = len(with_rows) > 0 or len(outside) < len(node.all_input_nodes)
        return has_rows and all(self._token_dim(x) is not None for x in with_rows)

    def _counts(self, extent: object) -> bool:
        """Whether an extent depends on the number of tokens."""
        return isinstance(extent, torch.SymInt) and self._tokens in extent.node.expr.free_symbols

    def _has_rows(self, found: object) -> bool:
        return isinstance(found, torch.Tensor) and any(map(self._counts, found.shape))

    def _has_whole_rows(self, found: torch.Tensor) -> bool:
        """Whether one extent counts tokens, and is a multiple of their number: no part of the rows
        was taken."""
        extents: Iterable[object] = found.shape
        symbolic = [extent for extent in extents if isinstance(extent, torch.SymInt)]
        counts = [extent.node.expr for extent in symbolic if self._counts(extent)]
        return len(counts) == 1 and (counts[0] / self._tokens).is_number

    def _token_dim(self, node: Node) -> int | None:
        """The dim of tokens; None if there is none, or if other extents depend on their number."""
        found = node.meta.get("val")
        shape = found.shape if isinstance(found, torch.Tensor) else ()
        dims = [dim for dim, extent in enumerate(shape) if self._counts(extent)]
        is_one = len(dims) == 1 and _expression(shape[dims[0]]) == self._tokens
        return dims[0] if is_one else None

    @torch.no_grad()
    def run_again(self, moved: list[Node]) -> dict[Node, object]:
        """Fake results of the calls over fewer rows. UnmatchedError: a call is not possible, or
        returns another shape. UnsupportedError: it is not possible over all rows either."""
        made: dict[Node, object] = {}

        def few(node: Node) -> object:
            found = node.meta.get("val")
            if node in made:
                return made[node]
            if (dim := self._token_dim(node)) is not None:
                return value(node).index_select(dim, value(self._asked))
            if not self._counts(found):
                return found
            if _expression(found) == self._tokens:
                return value(self._asked).shape[0]
            return _call(node, few)

        for node in moved:
            try:
                made[node] = _call(node, few)
            except FAILS as error:
                _require_whole_rows(node)
                raise UnmatchedError(f"{node.name}: {first_line(error)}") from None
            results = zip(tree_leaves(node.meta["val"]), tree_leaves(made[node]), strict=True)
            for before, after in results:
                wanted, got = list(map(self._fewer, before.shape)), list(map(str, after.shape))
                expect(wanted == got, f"{node.name}: expected rows of {wanted}, got {got}")
        for select in self._selects:
            dense = is_dense(value(select)) or select.args[0] not in made
            expect(dense, f"{select.name}: expected a dense result")
        return made

    def _fewer(self, extent: object) -> str:
        """An extent of fewer rows, as text."""
        if not isinstance(extent, torch.SymInt):
            return str(extent)
        return str(extent.node.expr.subs(self._tokens, _expression(value(self._asked).shape[0])))

    def move(self, moved: list[Node], made: dict[Node, object]) -> None:
        """Let the calls read selected rows, and remove the selects that they make needless."""
        start = next(node for node in self._graph.nodes if node.op != "placeholder")
        index = self._index
        while index is not self._asked:  # a cast may stand behind the first call
            if index is not start:
                start.prepend(index)
            start, index = index, any_node(index.args[0], "a tensor")
        for node in moved:
            for check in [user for user in node.users if user.target is CHECK]:
                self._graph.erase_node(check)
            with self._graph.inserting_before(node):
                node.args, node.kwargs = map_arg(
                    (node.args, dict(node.kwargs)),
                    lambda operand: operand if operand in made else self._with_few(operand),
                )
            node.meta["val"] = made[node]
            _say_extent(node)
        for select in self._selects:
            source = select.args[0]
            if source in made:
                assert isinstance(source, Node)
                with self._graph.inserting_before(select):
                    if not is_dense(value(source)):
                        source = add_call(self._graph, aten.contiguous.default, source)
                select.replace_all_uses_with(source)
                self._graph.erase_node(select)

    def _with_few(self, node: Node) -> Node:
        """An operand for fewer rows: a select, another number of rows, or `node` itself."""
        if node not in self._few:
            self._few[node] = self._made_with_few(node)
        return self._few[node]

    def _made_with_few(self, node: Node) -> Node:
        if (dim := self._token_dim(node)) is not None:
            return add_call(self._graph, aten.index.Tensor, node, [*[None] * dim, self._index])
        found = node.meta.get("val")
        if not self._counts(found):
            return node
        if _expression(found) == self._tokens:
            return add_call(self._graph, aten.sym_size.int, self._asked, 0)
        assert callable(node.target)
        args: tuple[Argument, ...] = map_arg(node.args, self._with_few)
        return add_call(self._graph, node.target, *args)


def _readers(node: Node) -> list[Node]:
    return [user for user in node.users if user.target is not CHECK]


def _is_scalar(node: Node) -> bool:
    return not isinstance(node.meta.get("val"), torch.Tensor | list | tuple)


def _cast_from(index: Node) -> Node:
    """The operand of the casts that `index` is the result of."""
    while index.target in (aten.to.dtype, aten._to_copy.default) and isinstance(
        index.args[0], Node
    ):
        index = index.args[0]
    return index


def _expression(extent: object) -> object:
    return extent.node.expr if isinstance(extent, torch.SymInt) else extent


def _call(node: Node, operand: object) -> object:
    """Run a call over other values of its operands."""
    assert callable(node.target)
    assert callable(operand)
    args, named = map_arg((node.args, dict(node.kwargs)), operand)
    return node.target(*args, **named)


def noted(node: Node) -> object:
    """What a node had at the export: a tensor, an extent, or several of them."""
    return node.meta.get("val")


def _require_whole_rows(node: Node) -> None:
    """Raise UnsupportedError unless a call runs over the values that it had at the export."""
    try:
        _call(node, noted)
    except FAILS as error:
        raise UnsupportedError(
            f"select_rows_early: {node.name}: expected {node.target} to run over all rows as it "
            f"did at the export, got {first_line(error)}; see that no other thread of this process "
            "traces a model, or report it"
        ) from error


def _say_extent(node: Node) -> None:
    """Replace an extent of -1 that is known: with no rows, torch could not compute it."""
    if packet(node) in (*VIEWS, aten.reshape) and isinstance(node.args[1], list | tuple):
        sizes = zip(node.args[1], value(node).shape, strict=True)
        known = [
            extent if size == -1 and isinstance(extent, int) else size for size, extent in sizes
        ]
        node.args = (node.args[0], known, *node.args[2:])
