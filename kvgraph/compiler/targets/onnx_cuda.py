"""Backend `onnx` for CUDA: write a functional ONNX graph with kernels in the nodes of cache ops.

Decisions: kernels are attributes of the graph's nodes (`kernels` and `images`, tensors of bytes,
because ONNX's strings are text), with the same content as the fields of TensorRT's plugins. So
model.onnx is complete: it needs only the weights and the library of custom ops to run, and the
manifest hashes it as one file. Equal cubins are stored once, in the first node that needs them. CPU
ops do not read these attributes, so a float32 graph also runs on a CPU.
Activations keep the checkpoint's dtype: ONNX Runtime's CUDA provider has kernels for 16-bit floats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper

from kvgraph.compiler.passes import report_of
from kvgraph.compiler.passes.lists import PASSES, run_passes
from kvgraph.compiler.targets import Lowered, write_build_log
from kvgraph.compiler.targets import onnx as onnx_target
from kvgraph.compiler.targets.cuda import attention_of_nodes, compile_kernels
from kvgraph.compiler.traced import Traced
from kvgraph.contract.file_names import BUILD_LOG_NAME, ONNX_NAME
from kvgraph.kernels.aot import Compiled
from kvgraph.kernels.record import images_of, new_images, pack_images, pack_kernels
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.ops import UPDATE_AND_ATTEND

NOTE = "onnxruntime: no machine at hand had its CUDA provider; nothing of this has run on a GPU"


def lower(
    traced: Traced,
    folder: Path,
    *,
    archs: Sequence[str],
    progress: Callable[[str], None],
) -> Lowered:
    """Write `model.onnx`, with kernels for each of `archs` in it, and `weights.safetensors`."""
    attention = attention_of_nodes(traced)
    passes = PASSES["cuda", "onnx"]
    lowered, written = onnx_target.write(traced, folder, passes)
    made = compile_kernels(attention, archs, progress)
    onnx_model = traced.onnx_proto = ir.to_proto(written)
    run_passes(traced, passes.written)
    casts = report_of(lowered.passes, "cast_norms").applied
    lowered.ops["Cast"] = lowered.ops.get("Cast", 0) + casts
    embed_kernels(onnx_model.graph, attention, made)
    data = onnx_model.SerializeToString(deterministic=True)
    (folder / ONNX_NAME).write_bytes(data)
    onnx_target.require_valid(folder)
    seconds = {
        f"{arch}/{kernel.file_name}": round(kernel.seconds, 3)
        for kernels in made.values()
        for arch, compiled in kernels.items()
        for kernel in compiled
    }
    write_build_log(folder, {"compile_seconds": seconds})
    lowered.nondeterministic_files.append(BUILD_LOG_NAME)
    lowered.notes.append(NOTE)
    return lowered


def embed_kernels(
    graph: onnx.GraphProto,
    attention: Sequence[AttentionShape],
    made: dict[AttentionShape, dict[str, list[Compiled]]],
) -> None:
    """Add the compiled kernels `made` to the cache ops of `graph`, as attributes.

    `attention`: the shape of each cache op, in the graph's order.
    """
    nodes = [node for node in graph.node if node.op_type == UPDATE_AND_ATTEND.name]
    records = {shape: pack_kernels(shape, kernels) for shape, kernels in made.items()}
    images = images_of(
        kernel for kernels in made.values() for compiled in kernels.values() for kernel in compiled
    )
    carried: set[str] = set()
    for node, shape in zip(nodes, attention, strict=True):
        new = new_images(records[shape], carried)
        _set(node, "kernels", records[shape])
        if new:
            _set(node, "images", pack_images(images[digest] for digest in new))


def _set(node: onnx.NodeProto, name: str, data: bytes) -> None:
    value = numpy_helper.from_array(np.frombuffer(data, np.uint8))
    node.attribute.append(onnx.helper.make_attribute(name, value))
