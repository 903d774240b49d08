"""Find what a program's operators write in place, and which values share memory."""

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
"""Operator that takes a part of a value -> operator that returns the value with a new part."""


def writes_are_plain(calls: Iterable[Node]) -> bool:
    """Whether later nodes read what `calls` write in place only through the node that was written.

    Then each write can be replaced by a new value of that node.
    """
    return not any(
        _is_read_later(call, base_of(written), (written, call))
        for call in calls
        for written in written_by(call)
    )


def written_by(node: Node) -> list[Node]:
    """The operands that a call writes in place, entries of lists included."""
    if node.target is aten.detach_.default:  # it writes no number
        return []
    found: list[Node] = []
    for argument, given in schema_arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            each = given if isinstance(given, list | tuple) else [given]
            found += [x for x in each if isinstance(x, Node)]
    return found


def functional_form(target: object) -> OpOverload | None:
    """The operator without the write, as `aten.mul.Tensor` for `aten.mul_.Tensor`; None: none."""
    if not isinstance(target, OpOverload) or not target._opname.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._opname[:-1], None)
    op = getattr(packet, target._overloadname, None)
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return None
    types = [[(x.name, str(x.type)) for x in each._schema.arguments] for each in (op, target)]
    return op if types[0] == types[1] else None


def write_elsewhere(call: Node, op: OpOverload) -> bool:
    """Replace an in-place `call` by `op`, which returns a new value; later nodes read that value.

    Return False, and change nothing, if the new value has another type than the written one.
    `writes_are_plain` must be true for `call`.
    """
    made = _new_value(call, op)
    if made is None:
        return False
    _take_over(call, made)
    return True


def write_part_elsewhere(call: Node, op: OpOverload) -> bool:
    """Replace an in-place `call` that writes a slice of a value by a new value with the new part.

    Return False, and change nothing, if the whole value is an input of the program, if later nodes
    read another part of it, or if the new part has another type.
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
    """The result of `op` on the operands of `call`; None if its type is not the written one."""
    (written,) = written_by(call)
    with call.graph.inserting_before(call):
        made = add_call(call.graph, op, *call.args, **call.kwargs)
    made.meta = {**call.meta, "val": made.meta["val"]}
    if typed(made) == typed(written):
        return made
    made.graph.erase_node(made)
    return None


def _take_over(call: Node, made: Node) -> None:
    """Make all nodes after `call` read `made` in place of `call` and of the written node."""
    (written,) = written_by(call)
    call.replace_all_uses_with(made)
    made.graph.erase_node(call)
    written.replace_all_uses_with(made, delete_user_cb=lambda user: made < user)


def _is_read_later(call: Node, base: Node, known: Container[Node]) -> bool:
    """Whether a node after `call` reads memory of `base` through a node from before `call` that is
    not in `known`."""
    others = [name for name in _names_of(base) if name not in known and name < call]
    return any(call < user for name in others for user in name.users)


def _names_of(base: Node) -> list[Node]:
    """The nodes that share memory with `base`, which is the first."""
    names, waiting = [base], [base]
    while waiting:
        users = waiting.pop().users
        found = [user for user in users if base_of(user) is base or _share(user, base)]
        waiting += [user for user in found if user not in names]
        names += [user for user in found if user not in names]
    return names


def base_of(node: Node) -> Node:
    """The node whose memory `node` is a part of; `node` itself if it has its own memory.

    Schemas of operators say so. For composite operators fake values say so: `einsum` of one operand
    returns a view, but its schema does not tell.
    """
    while (source := _source(node)) is not None:
        node = source
    return node


def gives_its_operand(node: Node) -> bool:
    """Whether a call returns memory of an operand although its schema does not say so."""
    is_known = any(x.alias_info is not None for x in _returns(node))
    return isinstance(node.target, OpOverload) and not is_known and _source(node) is not None


def _source(node: Node) -> Node | None:
    """The operand of which a call returns memory, or None. For an entry of a list, the operand of
    the call that returned the list."""
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
    """Whether `op` is composed of other operators, so its schema may not say that it returns a
    view."""
    key = "CompositeImplicitAutograd"
    if not isinstance(op, OpOverload):
        return False
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key))


def _share(a: Node, b: Node) -> bool:
    return not _storages(a).isdisjoint(_storages(b))


def _storages(node: Node) -> set[int]:
    """Storages of a node's fake value; views of a tensor have the tensor's storage."""
    made = node.meta.get("val")
    parts = made if isinstance(made, list | tuple) else [made]
    return {x.untyped_storage()._cdata for x in parts if isinstance(x, torch.Tensor)}


def schema_arguments(node: Node) -> Iterator[tuple[Argument, object]]:
    """The arguments of a call with their schema entries, by position or by name."""
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
