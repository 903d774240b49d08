"""Store token tables that are only gathered from in 16 bits, and cast their rows to float32.

Applies to parameters of an ONNX graph, as half_embeddings.py does to a program. It runs after
ONNX's optimiser, which does not recognise a normalisation after a Cast.
"""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch.export import ExportedProgram

from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.weights import Weights

SIZES = ("Shape", "Size")
"""ONNX operators that read no element of their input."""


def half_tables(onnx_model: ir.Model, program: ExportedProgram, weights: Weights) -> PassReport:
    """Rewrite `onnx_model`, which was made of `program`, in place."""
    report = PassReport("half_tables")
    parameters = set(program.graph_signature.parameters)
    for name, table in list(onnx_model.graph.initializers.items()):
        if (
            name not in parameters
            or table.dtype != ir.DataType.FLOAT
            or len(table.shape or ()) != 2
        ):
            continue
        uses = list(table.uses())
        if not uses or any((use.node.op_type, use.idx) != ("Gather", 0) for use in uses):
            continue
        if not all(_inputs_of(use.node.inputs[1]) == {"tokens"} for use in uses):
            continue
        assert table.const_value is not None
        dtype = weights.half_of(name, program.state_dict[name])
        table.const_value = _halved(table.const_value, name, dtype)
        table.dtype = table.const_value.dtype
        for use in uses:
            _cast_rows(onnx_model.graph, use.node, table.const_value.dtype)
        report.applied += 1
    return report


def _inputs_of(index: ir.Value | None) -> set[str | None]:
    """Names of the graph's inputs from whose elements `index` is computed."""
    reached, waiting = {index}, [index]
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        given = node.inputs if node is not None and node.op_type not in SIZES else ()
        waiting += [each for each in given if each not in reached]
        reached.update(given)
    return {value.name for value in reached if value is not None and value.is_graph_input()}


def _halved(table: ir.TensorProtocol, name: str, dtype: torch.dtype) -> ir.LazyTensor:
    """The table in `dtype`, computed only when it is written."""

    def compute() -> ir.TensorProtocol:
        values = torch.from_numpy(table.numpy())
        return ir.tensor_adapters.TorchTensor(values.to(dtype), name=name)

    shape = ir.Shape(table.shape.numpy())
    stored = ir.tensor_adapters.from_torch_dtype(dtype)
    return ir.LazyTensor(compute, dtype=stored, shape=shape, name=name)


def _cast_rows(graph: ir.Graph, gather: ir.Node, dtype: ir.DataType) -> None:
    rows = gather.outputs[0]
    whole = ir.Value(name=rows.name, type=rows.type, shape=rows.shape)
    rows.name, rows.type = f"{rows.name}_stored", ir.TensorType(dtype)
    cast = ir.node("Cast", [rows], {"to": int(ir.DataType.FLOAT)}, outputs=[whole])
    graph.insert_after(gather, cast)
    ir.convenience.replace_all_uses_with(rows, whole)
    cast.replace_input_with(0, rows)
