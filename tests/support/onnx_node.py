"""One op as a one-node ONNX model in ONNX Runtime, with the pool bound in place."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from kvgraph.ops import OPSET_DOMAIN, OPSET_VERSION, OpSpec
from kvgraph.ops.native import library_path
from tests.support.conformance import Operands

Array = np.ndarray[Any, Any]

ELEMENT_TYPES = {
    "float32": onnx.TensorProto.FLOAT,
    "float16": onnx.TensorProto.FLOAT16,
    "bfloat16": onnx.TensorProto.BFLOAT16,
    "int8": onnx.TensorProto.INT8,
    "float8_e4m3fn": onnx.TensorProto.FLOAT8E4M3FN,
    "int32": onnx.TensorProto.INT32,
}


def run(operands: Operands) -> Array | None:
    """The result (None for an op that has none); the pool is written in place."""
    session = session_of(operands)
    binding = session.io_binding()
    values = {name: as_value(a) for name, a in operands.inputs.items() if a is not None}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in operands.spec.outputs:
        if output.alias is None:
            binding.bind_output(output.name)
        elif output.alias in values:
            binding.bind_ortvalue_output(output.name, values[output.alias])
    session.run_with_iobinding(binding)
    results = operands.spec.results
    if not results:
        return None
    dtype = operands.inputs["q"].dtype
    out = binding.get_outputs()[0]
    array = np.empty(out.shape(), dtype)
    if array.size:
        ctypes.memmove(array.ctypes.data, out.data_ptr(), array.nbytes)
    return array


def as_value(array: Array) -> ort.OrtValue:
    """Shares the array's memory."""
    element = ELEMENT_TYPES[str(array.dtype)]
    if str(array.dtype) in {"bfloat16", "float8_e4m3fn"}:
        raw = array.view({1: np.uint8, 2: np.uint16}[array.itemsize])
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(raw, element)
    return ort.OrtValue.ortvalue_from_numpy(array)


def session_of(operands: Operands) -> ort.InferenceSession:
    """A session of the one-node model that fits these operands; kept for equal ones."""
    dtypes = tuple((name, str(a.dtype)) for name, a in operands.inputs.items() if a is not None)
    return _session(operands.spec.name, dtypes, tuple(operands.attributes.items()))


@cache
def _session(
    op: str, dtypes: tuple[tuple[str, str], ...], attributes: tuple[tuple[str, float], ...]
) -> ort.InferenceSession:
    from tests.support.conformance import SPECS

    model = model_of(SPECS[op], dict(dtypes), dict(attributes))
    options = ort.SessionOptions()
    options.intra_op_num_threads = 2
    options.log_severity_level = 3
    options.register_custom_ops_library(str(library_path("onnxruntime")))
    return ort.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])


def model_of(spec: OpSpec, dtypes: dict[str, str], attributes: dict[str, float]) -> onnx.ModelProto:
    """The graph inputs are the op's given inputs with its dims by name; an absent one is ""."""
    outputs = [o for o in spec.outputs if o.alias is None or o.alias in dtypes]
    sources = {o.name: o.alias or "q" for o in outputs}
    node = onnx.helper.make_node(
        spec.name,
        [o.name if o.name in dtypes else "" for o in spec.inputs],
        [o.name for o in outputs],
        domain=OPSET_DOMAIN,
        **{a.name: attributes[a.name] for a in spec.attributes if a.name in attributes},
    )
    graph = onnx.helper.make_graph(
        [node],
        spec.name,
        [
            onnx.helper.make_tensor_value_info(o.name, ELEMENT_TYPES[dtypes[o.name]], list(o.dims))
            for o in spec.inputs
            if o.name in dtypes
        ],
        [
            onnx.helper.make_tensor_value_info(o.name, ELEMENT_TYPES[dtypes[sources[o.name]]], None)
            for o in outputs
        ],
    )
    opsets = [
        onnx.helper.make_opsetid("", 23),
        onnx.helper.make_opsetid(OPSET_DOMAIN, OPSET_VERSION),
    ]
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
