"""Functions of ONNX Runtime's table that the CUDA ops alone use, asked of the installed runtime.

KernelContext_GetScratchBuffer is left out: it needs a stream, which a CPU's context has not. Its
slot is between two that are asked here and in the conformance matrix.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="builds a one-node model")
ort = pytest.importorskip("onnxruntime", reason="runs it")

HERE = Path(__file__).parent
PLUGINS = HERE.parents[1] / "plugins"


def test_attributes_allocators_and_streams(tmp_path: Path) -> None:
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C++ compiler to build the op with")
    library = tmp_path / "probe.so"
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror",
         f"-I{PLUGINS}", f"-I{PLUGINS / 'include'}", str(HERE / "onnxruntime_probe.cpp"),
         "-o", str(library)],
        check=True,
    )  # fmt: skip
    helper = onnx.helper
    data = onnx.numpy_helper.from_array(np.array([255, 0, 128], np.uint8))
    node = helper.make_node("probe", ["x"], ["y"], domain="probe", bytes=data, text="")
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("probe", 1)]
    graph = helper.make_graph([node], "probe", [x], [y])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library))
    session = ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )
    [answers] = session.run(None, {"x": np.zeros(1, np.float32)})
    allocates, extent, intact, streams = answers
    assert (allocates, extent, intact, streams) == (1, 3, 1, 0)
