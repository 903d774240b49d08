"""RMSNormalization of halves with a float32 scale -> a cast to float32 before it.

Applies where the exporter folded a model's own cast into the operator, as in Gemma's norms. ONNX
then lets input and scale differ, but its shape inference gives the result the input's dtype, for
which ONNX Runtime refuses the graph; and its CUDA kernels take one dtype for both.
"""

from __future__ import annotations

import onnx

from kvgraph.compiler.passes import PassReport


def cast_norms(graph: onnx.GraphProto) -> PassReport:
    """Rewrite `graph` in place; it says the dtypes of its values."""
    report = PassReport("cast_norms")
    dtypes = {v.name: v.type.tensor_type.elem_type for v in [*graph.input, *graph.value_info]}
    dtypes |= {weight.name: weight.data_type for weight in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        if node.op_type == "RMSNormalization":
            nodes += _cast(node, dtypes, report)
        nodes.append(node)
    del graph.node[:]
    graph.node.extend(nodes)
    return report


def _cast(node: onnx.NodeProto, dtypes: dict[str, int], report: PassReport) -> list[onnx.NodeProto]:
    """The cast that `node` then reads, or none."""
    x, scale = (dtypes.get(name) for name in node.input)
    if x is None or scale is None:
        report.unmatched.append(
            f"{node.output[0]}: expected dtypes of {list(node.input)}, got none"
        )
    if x is None or scale is None or x == scale:
        return []
    cast = f"{node.output[0]}_input"
    made = onnx.helper.make_node("Cast", [node.input[0]], [cast], name=f"node_{cast}", to=scale)
    node.input[0] = cast
    report.applied += 1
    return [made]
