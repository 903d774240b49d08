"""Transpose weights of an ONNX graph as they are written.

The exporter makes a linear layer of a transpose and a product. Its optimiser would fold the
transposes into constants, and all weights of a model would be in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from kvgraph.compiler.values import Turned
from kvgraph.compiler.weights import Make, Piece, Weights

MATRIX = 2
"""Number of dims of a weight that is transposed."""


def transposed_later(model: ir.Model, weights: Weights) -> Weights:
    """Replace the transpose of each weight of a checkpoint by the weight in its other order.

    Return `weights` with these values, under the weights' own names. A weight with another use
    keeps its transpose: else it would be stored twice.
    """
    made: dict[str, Make] = {}
    for node in list(model.graph):
        weight = _only_transposed(node)
        if weight is None or not weights.is_stored(name := str(weight.name)):
            continue
        before = weight.const_value
        assert before is not None
        assert weights.checkpoint is not None
        dtype = ir.tensor_adapters.to_torch_dtype(before.dtype)
        source = Turned(weights.checkpoint.get(name, dtype))
        made[name] = partial(_pieces, name, source)
        read = partial(_read, source)
        weight.shape = ir.Shape(source.shape)
        weight.const_value = ir.LazyTensor(read, dtype=before.dtype, shape=weight.shape, name=name)
        ir.convenience.replace_all_uses_with(node.outputs[0], weight)
        model.graph.remove(node, safe=True)
    return replace(weights, made=weights.made | made)


def _only_transposed(node: ir.Node) -> ir.Value | None:
    """The weight whose transpose `node` is, if that is its only use; else None."""
    weight = node.inputs[0] if node.op_type == "Transpose" and node.domain == "" else None
    if weight is None or not weight.is_initializer() or len(weight.uses()) > 1:
        return None
    is_matrix = weight.shape is not None and len(weight.shape) == MATRIX
    order = node.attributes.get("perm")
    is_turned = order is None or list(order.as_ints()) == [1, 0]
    return weight if is_matrix and is_turned and not node.outputs[0].is_graph_output() else None


def _pieces(name: str, source: Turned) -> Iterator[Piece]:
    return ((name, piece) for piece in source.pieces())


def _read(source: Turned) -> ir.TensorProtocol:
    return ir.tensor_adapters.TorchTensor(source.read())
