"""Insert a cast to float32 before an RMSNormalization of 16-bit values with a float32 scale.

Applies where the exporter folded a model's own cast into the operator, as in Gemma's norms. ONNX
allows different dtypes of input and scale, but its shape inference gives the result the input's
dtype. ONNX's checker and ONNX Runtime refuse such a graph. The CUDA kernels of ONNX Runtime take
one dtype for both.
"""

from __future__ import annotations

import onnx

from kvgraph.compiler.passes import PassReport


def cast_norms(onnx_graph: onnx.GraphProto) -> PassReport:
    """Rewrite `onnx_graph` in place; its `value_info` must have the dtypes of its values."""
    report = PassReport("cast_norms")
    dtypes = {
        v.name: v.type.tensor_type.elem_type for v in [*onnx_graph.input, *onnx_graph.value_info]
    }
    dtypes |= {weight.name: weight.data_type for weight in onnx_graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in onnx_graph.node:
        if node.op_type == "RMSNormalization":
            nodes += _cast(node, dtypes, report)
        nodes.append(node)
    del onnx_graph.node[:]
    onnx_graph.node.extend(nodes)
    return report


def _cast(node: onnx.NodeProto, dtypes: dict[str, int], report: PassReport) -> list[onnx.NodeProto]:
    """Make `node` read a cast of its input if dtypes differ; return the cast, or an empty list."""
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
