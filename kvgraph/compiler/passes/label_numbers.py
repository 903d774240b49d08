"""Tell which numbers of a program are known in every step from their values in two steps.

A number may be computed from the sizes of a step, or read from its inputs. What moves tokens by
another number than these may move them in a third step only.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.utils._pytree import tree_leaves

from kvgraph.compiler.passes.label_kinds import MADE, PADS, RESHAPED, SAME, is_pointwise
from kvgraph.compiler.passes.labels import LONG_STEP
from kvgraph.compiler.passes.token_functions import packet

aten = torch.ops.aten
JOINED = (aten.cat, aten.concat)
TURNED = (aten.unsqueeze, aten.squeeze, aten.expand, aten.expand_as, aten.transpose, aten.permute)
KEPT = (*MADE, *SAME, *RESHAPED, *TURNED, aten.t, aten.cumsum)
"""Operators whose elements depend on their places, not on the size of the step, if the elements of
their operands do so. Elementwise operators are such, too."""


def is_settled(number: object, count: object, *, is_size: bool = False) -> bool:
    """Whether two steps show what `number` is in every step; `count` is the symbol for the tokens
    of a step.

    It is at most LONG_STEP or no number, or linear in `count`. A size may be a multiple of another
    symbol, too.
    """
    if isinstance(number, torch.SymFloat | torch.SymBool):
        return False
    if not isinstance(number, torch.SymInt):
        return not isinstance(number, int) or abs(number) <= LONG_STEP or number >= sys.maxsize
    added, rest = number.node.expr.expand().as_coeff_Add()
    factor, symbol = rest.as_coeff_Mul()
    if not rest:
        return is_settled(int(added), count)
    if not (symbol.is_Symbol and factor.is_Integer):
        return False
    return bool(abs(added) <= LONG_STEP if symbol == count else is_size and not added)


def moves_settled(node: Node, count: object, held: Callable[[Node], Sequence[int]]) -> bool:
    """Whether all numbers by which a call moves elements are settled.

    `held`: the dims of an operand that have several tokens along them. Along others, constants may
    have any size.
    """
    given, kind, made = _tensors(node), packet(node), node.meta["val"]
    numbers = [x.meta["val"] for x in node.all_input_nodes if x not in given]
    for dim in (named_dims(node, "dim") or [0]) if kind in JOINED else []:
        numbers += [x.meta["val"].shape[dim] for x in given if x.meta["val"].shape]
    numbers = [x for x in numbers if not isinstance(x, int)]
    sizes = [size for part in tree_leaves(made) for size in part.shape if not isinstance(size, int)]
    is_size = kind in (*RESHAPED, *TURNED)
    return (
        all(is_settled(size, count, is_size=True) for size in sizes)
        and all(is_settled(number, count, is_size=is_size) for number in numbers)
        and all(
            is_settled(number, count)
            or not {dim % max(1, x.meta["val"].dim()) for dim in dims} & {*held(x)}
            for x in given
            for number, dims in _constants(node, x)
        )
    )


def _tensors(node: Node) -> list[Node]:
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), torch.Tensor)]


def _constants(node: Node, given: Node) -> Iterator[tuple[int, Sequence[int]]]:
    """The constants by which a call moves elements of `given`, and the dims along which."""
    kind = packet(node)
    if kind in PADS:
        for place, size in enumerate(tree_leaves(node.args[1])):
            yield size, [-1 - place // 2]
    elif kind in JOINED:
        dims = named_dims(node, "dim") or [0]
        yield from ((given.meta["val"].shape[dim], dims) for dim in dims)
    elif kind not in (*RESHAPED, *TURNED):
        dims = named_dims(node, "dim") or named_dims(node, "dims") or [0]
        numbers = tree_leaves((node.args, node.kwargs))
        yield from ((number, dims) for number in numbers if type(number) is int)


def named_dims(node: Node, name: str) -> list[int] | None:
    """The dims in argument `name` of a call, or its default; None if there is none."""
    target = node.target
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else []
    for place, argument in enumerate(arguments):
        if argument.name == name:
            given: Any = argument.default_value if argument.has_default_value() else None
            given = node.args[place] if place < len(node.args) else node.kwargs.get(name, given)
            return given if given is None else [given] if isinstance(given, int) else list(given)
    return None


def is_known_by_place(node: Node, count: object) -> bool:
    """Whether each element of a call's result is a function of its place alone, the same in every
    step, if the elements of its operands are."""
    given = _tensors(node)
    made = node.meta["val"]
    sizes = [n for x in [*(x.meta["val"] for x in given), made] for n in x.shape]
    numbers = [x for x in tree_leaves((node.args, node.kwargs)) if type(x) in (int, float)]
    if not all(-LONG_STEP <= x <= LONG_STEP or x >= sys.maxsize for x in numbers):
        return False
    if not all(is_settled(n, count, is_size=True) for n in sizes if not isinstance(n, int)):
        return False
    is_fixed = all(isinstance(n, int) for n in sizes)
    kind = packet(node)
    values = [x for x in _values(node) if isinstance(x, Node) and x not in given]
    return not values and (is_fixed or kind in KEPT or is_pointwise(node))


def _values(node: Node) -> Sequence[object]:
    """The arguments of a call that are no sizes of its result."""
    kind, given = packet(node), list(node.args)
    if kind is aten.arange:
        return [*given[:-1]] if len(given) < 3 else [given[0], given[2]]
    if kind in (aten.full, aten.full_like):
        return given[1:]
    if kind is aten.scalar_tensor or kind not in (*MADE, *RESHAPED, *TURNED):
        return tree_leaves((given, node.kwargs))
    return []
