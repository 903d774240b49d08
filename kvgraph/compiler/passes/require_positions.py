"""Check that a program computes positions from each row's cache length."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvgraph.compiler.passes.operands import value
from kvgraph.compiler.passes.parameters import inputs_of
from kvgraph.compiler.passes.token_functions import ELEMENTWISE, LAYOUT, packet
from kvgraph.compiler.refusals import Reason
from kvgraph.compiler.sources import place
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError

aten = torch.ops.aten
OF_ROWS = ("input_row_offsets", "cache_lengths", "start_pos")
"""Ends of names of inputs that say where a row's tokens begin."""

PLAIN = (*ELEMENTWISE, *LAYOUT, aten.embedding)


def require_positions(program: ExportedProgram, signature: GraphSignature) -> None:
    """Raise UnsupportedError if a program numbers the tokens of a step from 0 and computes with
    these numbers, because positions in a second row or a later chunk do not begin there.

    Numbers that only choose elements, such as those of routed rows, are no positions.
    """
    inputs = {symbol.name: node for node, symbol in inputs_of(program, signature).items()}
    tokens = value(inputs["tokens"]).shape[0]
    of_rows = _reached(node for name, node in inputs.items() if name.endswith(OF_ROWS))
    for node in program.graph.nodes:
        if packet(node) is not aten.arange or not _is_as_long(node, tokens):
            continue
        numbers = _reached([node], lambda user: user not in of_rows and packet(user) in PLAIN)
        if any(map(_computes, numbers)):
            raise UnsupportedError(
                f"positions: expected those of cache_lengths, got numbers of {place(node)}: "
                f"{Reason.NUMBERED.said()}"
            )


def _is_as_long(node: Node, tokens: int | torch.SymInt) -> bool:
    return statically_known_true(value(node).shape[0] == tokens)


def _reached(
    begin: Iterable[Node], is_followed: Callable[[Node], bool] = lambda user: True
) -> dict[Node, None]:
    """Nodes that are computed from `begin`, through users for which `is_followed` is true."""
    found: dict[Node, None] = {}
    waiting = list(begin)
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and user not in found and is_followed(user):
                found[user] = None
                waiting.append(user)
    return found


def _computes(node: Node) -> bool:
    """Whether a node looks up table rows by its operands, or has a floating-point result."""
    return packet(node) is aten.embedding or value(node).is_floating_point()
