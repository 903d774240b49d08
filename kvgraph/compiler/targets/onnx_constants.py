"""Optimise an ONNX graph without losing constants that are nearly 0 or 1, or storing weights twice.

onnxscript's rules for `x + 0` and `x * 1` take a scalar up to 1e-8 for 0, and up to a relative
difference of 1e-5 for 1. So they would drop an epsilon of 1e-8 (Helium), and rsqrt of a zero row
would be infinite. They also store the transpose of a small weight next to the weight itself, where
it has another use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir
from onnxscript.optimizer import fold_constants

NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
"""Operator -> the scalar that leaves the other operand as it is."""

KEPT = "kvgraph.kept"
"""Domain of an operator while rules must not match it."""


@contextlib.contextmanager
def kept_constants(model: ir.Model) -> Iterator[None]:
    """Hide transposes of shared weights from all rules, and operators with a scalar that is nearly,
    but not exactly, neutral.

    Other constants are folded first: the scalar may be computed, as a cast is.
    """
    _hide(model, _is_shared_transpose)
    fold_constants(model)
    _hide(model, _is_nearly_neutral)
    try:
        yield
    finally:
        for node in model.graph.all_nodes():
            if node.domain == KEPT:
                node.domain = ""


def _hide(model: ir.Model, is_kept: Callable[[ir.Node], bool]) -> None:
    for node in model.graph.all_nodes():
        if node.domain == "" and is_kept(node):
            node.domain = KEPT


def _is_shared_transpose(node: ir.Node) -> bool:
    if node.op_type != "Transpose" or (weight := node.inputs[0]) is None:
        return False
    return weight.is_initializer() and len(weight.consumers()) > 1


def _is_nearly_neutral(node: ir.Node) -> bool:
    if node.op_type not in NEUTRAL:
        return False
    neutral = NEUTRAL[node.op_type]
    tensors = [ir.convenience.get_const_tensor(each) for each in node.inputs if each is not None]
    scalars = [each.numpy().item() for each in tensors if each is not None and not each.shape]
    return any(each != neutral and np.isclose(each, neutral) for each in scalars)
