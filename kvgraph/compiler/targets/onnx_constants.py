"""Optimise an ONNX graph without losing constants that are nearly 0 or 1.

onnxscript's rules for `x + 0` and `x * 1` take a scalar up to 1e-8 for 0, and up to a relative
difference of 1e-5 for 1. So they would drop an epsilon of 1e-8 (Helium), and rsqrt of a zero row
would be infinite.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnxscript.optimizer import fold_constants

NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
"""Operator -> the scalar that leaves the other operand as it is."""

KEPT = "kvgraph.kept"
"""Domain of an operator while rules must not match it."""


@contextlib.contextmanager
def kept_constants(model: ir.Model) -> Iterator[None]:
    """Hide operators with a scalar that is nearly, but not exactly, neutral from all rules.

    Constants are folded first: the scalar may be computed, as a cast is.
    """
    fold_constants(model)
    for node in model.graph.all_nodes():
        if node.domain == "" and node.op_type in NEUTRAL and _is_nearly_neutral(node):
            node.domain = KEPT
    try:
        yield
    finally:
        for node in model.graph.all_nodes():
            if node.domain == KEPT:
                node.domain = ""


def _is_nearly_neutral(node: ir.Node) -> bool:
    neutral = NEUTRAL[node.op_type]
    tensors = [ir.convenience.get_const_tensor(each) for each in node.inputs if each is not None]
    scalars = [each.numpy().item() for each in tensors if each is not None and not each.shape]
    return any(each != neutral and np.isclose(each, neutral) for each in scalars)
