"""What a program's operators write in place, and which of its values share memory."""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Iterator
from itertools import pairwise

import torch
from torch._C import Argument
from torch._ops import OpOverload
from torch.fx import Node

from kvgraph.compiler.passes.operands import add_call, any_node, typed

aten = torch.ops.aten
SCATTERS = {
    aten.slice.Tensor: aten.slice_scatter.default,
    aten.select.int: aten.select_scatter.default,
}
"""What takes a part of a value -> the value with another part there."""


def writes_are_plain(calls: Iterable[Node]) -> bool:
    """Whether what `calls` write in place is read later by the name that was written alone.

    Then a write is no more than a new value of that name.
    """
    return not any(
        _is_read_later(call, base_of(written), (written, call))
        for call in calls
        for written in written_by(call)
    )


def written_by(node: Node) -> list[Node]:
    """The operands whose numbers a call writes in place, those of lists too."""
    if node.target is aten.detach_.default:  # writes no number
        return []
    found: list[Node] = []
    for argument, given in schema_arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            each = given if isinstance(given, list | tuple) else [given]
            found += [x for x in each if isinstance(x, Node)]
    return found


def write_elsewhere(call: Node, op: OpOverload) -> bool:
    """Compute what `call` writes in place by `op`, as a new value, which all that follows reads.

    Whether the new value has the type of what was written. Right where `writes_are_plain` is.
    """
    made = _new_value(call, op)
    if made is None:
        return False
    _take_over(call, made)
    return True


def write_part_elsewhere(call: Node, op: OpOverload) -> bool:
    """The same for a write into slices of a value, which becomes a new one around the new part.

    Whether it is one: of a value of the program itself, of which no other part is read later.
    """
    (written,) = written_by(call)
    parts = [written]
    while parts[-1].target in SCATTERS:
        parts.append(any_node(parts[-1].args[0], "a tensor"))
    base = parts[-1]
    if base is not base_of(written) or base.op == "placeholder":
        return False
    if _is_read_later(call, base, (base, written, call)):
        return False
    made = _new_value(call, op)
    if made is None:
        return False
    whole = made
    with call.graph.inserting_before(call):
        for part, source in pairwise(parts):
            scatter = SCATTERS[part.target]  # type: ignore[index]
            whole = add_call(call.graph, scatter, source, whole, *part.args[1:], **part.kwargs)
            whole.meta = {**call.meta, "val": whole.meta["val"]}
    _take_over(call, made)
    base.replace_all_uses_with(whole, delete_user_cb=lambda user: whole < user)
    return True


def _new_value(call: Node, op: OpOverload) -> Node | None:
    """What `op` makes of the operands of `call`; None where that is not of the written type."""
    (written,) = written_by(call)
    with call.graph.inserting_before(call):
        made = add_call(call.graph, op, *call.args, **call.kwargs)
    made.meta = {**call.meta, "val": made.meta["val"]}
    if typed(made) == typed(written):
        return made
    made.graph.erase_node(made)
    return None


def _take_over(call: Node, made: Node) -> None:
    """All that follows `call` reads `made` by the name that was written."""
    (written,) = written_by(call)
    call.replace_all_uses_with(made)
    made.graph.erase_node(call)
    written.replace_all_uses_with(made, delete_user_cb=lambda user: made < user)


def _is_read_later(call: Node, base: Node, known: Container[Node]) -> bool:
    """Whether memory of `base` is read behind `call` by a name from before it, but for `known`."""
    others = [name for name in _names_of(base) if name not in known and name < call]
    return any(call < user for name in others for user in name.users)


def _names_of(base: Node) -> list[Node]:
    """The values that share its memory, itself first."""
    names, waiting = [base], [base]
    while waiting:
        users = waiting.pop().users
        found = [user for user in users if base_of(user) is base or _share(user, base)]
        waiting += [user for user in found if user not in names]
        names += [user for user in found if user not in names]
    return names


def base_of(node: Node) -> Node:
    """The value whose memory `node` is a part of, as the operators say, or fake values where they
    are composite: `einsum` of one operand gives a view, and its schema does not say so."""
    while (source := _source(node)) is not None:
        node = source
    return node


def gives_its_operand(node: Node) -> bool:
    """Whether a call gives memory of an operand, and its operator does not say so."""
    is_known = any(x.alias_info is not None for x in _returns(node))
    return isinstance(node.target, OpOverload) and not is_known and _source(node) is not None


def _source(node: Node) -> Node | None:
    """The operand that a call gives memory of; of a part of a list, the one of what made it."""
    maker = node.args[0] if node.target is operator.getitem else node
    if not isinstance(maker, Node):
        return None
    source = maker.args[0] if maker.args else None
    if isinstance(source, Node) and any(x.alias_info is not None for x in _returns(maker)):
        return source
    if not is_composite(maker.target):
        return None
    return next((x for x in maker.all_input_nodes if _share(x, node)), None)


def is_composite(op: object) -> bool:
    """Whether its result is that of other operators: a view of them where they give one."""
    key = "CompositeImplicitAutograd"
    if not isinstance(op, OpOverload):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _share(a: Node, b: Node) -> bool:
    return not _storages(a).isdisjoint(_storages(b))


def _storages(node: Node) -> set[int]:
    """Of a node's fake value: views of a tensor have its storage."""
    made = node.meta.get("val")
    parts = made if isinstance(made, list | tuple) else [made]
    return {x.untyped_storage()._cdata for x in parts if isinstance(x, torch.Tensor)}


def schema_arguments(node: Node) -> Iterator[tuple[Argument, object]]:
    """What a call passes, in place or by name."""
    schema = node.target._schema if isinstance(node.target, torch._ops.OpOverload) else None
    for i, argument in enumerate(schema.arguments if schema else ()):
        if i < len(node.args):
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]


def _returns(node: Node) -> list[Argument]:
    return (
        list(node.target._schema.returns) if isinstance(node.target, torch._ops.OpOverload) else []
    )
