"""Names of the files of an artifact, which a compile writes and a session reads."""

from __future__ import annotations

WEIGHTS_NAME = "weights.safetensors"
ONNX_NAME, PROGRAM_NAME, ENGINE_NAME = "model.onnx", "model.pt2", "model.engine"
"""Names of the model: the graph of ONNX, the program of torch, the engine of TensorRT."""

WEIGHTS_TABLE = "model/kvgraph/weights.json"
"""Name of an entry of `model.pt2`: the dtype and shape of each tensor of the weights by name."""

KERNELS_NAME = "kernels.json"
"""Name of the file next to the cubins of one architecture: how each kernel is launched."""

PLUGINS_NAME, LIBRARY_NAME = "tensorrt.json", "libkvgraph_tensorrt.so"
"""Names of the fields of TensorRT's plugins, a file in `kernels/`, and of the plugins' library. The
fields are `kernels` (base64), which node has which, and the path of each image."""

BUILD_LOG_NAME = "build.json"
"""Name of the file with durations of a build. It differs each time, so it is not hashed."""
