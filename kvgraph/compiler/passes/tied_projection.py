"""Replace a MatMul by the transpose of a shared weight by a Gemm with transB.

Applies to tied embeddings: the table is used for a gather and for the output projection, so a
transposed copy would store it twice. The exporter has already transposed weights with one use.
"""

from __future__ import annotations

import onnx_ir as ir

from kvgraph.compiler.passes import PassReport


def tied_projection(onnx_model: ir.Model) -> PassReport:
    """Rewrite `onnx_model` in place."""
    report = PassReport("tied_projection")
    for node in list(onnx_model.graph):
        if node.op_type == "Transpose" and _is_weight(node.inputs[0]):
            for use in list(node.outputs[0].uses()):
                _rewrite(onnx_model.graph, node, use.node, report)
            if not node.outputs[0].uses():
                onnx_model.graph.remove(node, safe=True)
    return report


def _is_weight(value: ir.Value | None) -> bool:
    return value is not None and value.is_initializer() and len(value.shape or ()) == 2


def _rewrite(graph: ir.Graph, transpose: ir.Node, use: ir.Node, report: PassReport) -> None:
    weight, activation = transpose.inputs[0], use.inputs[0]
    assert weight is not None
    rank = len(activation.shape) if activation is not None and activation.shape else None
    if use.op_type != "MatMul" or use.inputs[1] is not transpose.outputs[0] or rank != 2:
        report.unmatched.append(
            f"{weight.name}: expected a MatMul of a matrix by its transpose, "
            f"got {use.op_type} of rank {rank}"
        )
        return
    result = use.outputs[0]
    gemm = ir.node(
        "Gemm",
        [activation, weight],
        {"transB": 1},
        outputs=[ir.Value(name=result.name, type=result.type, shape=result.shape)],
    )
    graph.insert_before(use, gemm)
    ir.convenience.replace_all_uses_with(result, gemm.outputs[0], replace_graph_outputs=True)
    graph.remove(use, safe=True)
    report.applied += 1
