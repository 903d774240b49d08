"""Backend `tensorrt`: build an engine with kvgraph's plugins as cache ops, without a GPU.

Decisions: the artifact keeps the functional ONNX graph, the cubins and the engine, so another
machine's TensorRT can build from the same files. Nodes become plugin nodes when the builder reads
the graph (build.py). One engine serves every architecture that is asked for. Two builds of an
engine have different bytes; the manifest lists it as nondeterministic.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.passes.lists import PASSES
from kvgraph.compiler.targets import Lowered, cuda, write_build_log
from kvgraph.compiler.targets import onnx as onnx_target
from kvgraph.compiler.targets.cuda import attention_of_nodes, compile_kernels, save_kernels
from kvgraph.compiler.targets.tensorrt.engine import (
    RTX,
    build_engine,
    profiles_of,
    require_module,
)
from kvgraph.compiler.traced import Traced
from kvgraph.contract.devices import PORTABLE
from kvgraph.contract.file_names import BUILD_LOG_NAME, ENGINE_NAME, LIBRARY_NAME, PLUGINS_NAME
from kvgraph.contract.manifest_values import MOST, require_known
from kvgraph.contract.plain import from_plain
from kvgraph.errors import UnsupportedError
from kvgraph.kernels import shapes
from kvgraph.kernels.record import pack_kernels
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.ops import OPSET_DOMAIN
from kvgraph.ops.cuda_native import plugins_path

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120", "sm_121")
"""GPU architectures for which TensorRT-RTX builds. Their kernels together run on every GPU that it
supports."""

NOTE = "engine: built and checked where no GPU is; no build of it has run on one"


def kernel_archs(archs: Sequence[str], dtype: str) -> tuple[str, ...]:
    """Architectures to compile kernels for. UnsupportedError for one that TensorRT-RTX lacks."""
    if tuple(archs) == (PORTABLE,):
        halves = dtype != "bfloat16"
        return tuple(a for a in ARCHS if halves or shapes.capability(a) >= 80)
    for arch in archs:
        if arch not in ARCHS:
            raise UnsupportedError(
                f"target: expected some of {list(ARCHS)} or {PORTABLE!r} for backend tensorrt "
                f"(TensorRT-RTX builds for no other), got {arch!r}"
            )
    return tuple(archs)


def lower(
    traced: Traced,
    folder: Path,
    *,
    archs: Sequence[str],
    bounds: tuple[int, int],
    progress: Callable[[str], None],
) -> Lowered:
    """Write `model.onnx`, `weights.safetensors`, `kernels/`, the plugins and `model.engine`.

    `bounds`: most rows and most new tokens of a step.
    """
    require_module(RTX)
    attention = attention_of_nodes(traced)
    # TensorRT's parser checks the graph. ONNX's checker refuses more, for example TopK of bfloat16.
    lowered, written = onnx_target.write(traced, folder, PASSES["cuda", "tensorrt"])
    cache_ops = [node for node in written.graph if node.domain == OPSET_DOMAIN]
    names = [str(node.outputs[0].name) for node in cache_ops]
    nodes = dict(zip(names, attention, strict=True))
    seconds = write_kernels(nodes, kernel_archs(archs, traced.model.dtype), folder, progress)
    shutil.copyfile(plugins_path(), folder / LIBRARY_NAME)

    progress("building the engine")
    start = time.perf_counter()
    lowered.engine = build_engine(
        folder,
        traced.signature,
        profiles_of(traced.signature, traced.model.max_seq_len, *bounds),
        [] if tuple(archs) == (PORTABLE,) else list(archs),
    )
    log = {"compile_seconds": seconds, "engine_seconds": round(time.perf_counter() - start, 3)}
    write_build_log(folder, log)
    lowered.nondeterministic_files += [BUILD_LOG_NAME, ENGINE_NAME]
    lowered.notes.append(NOTE)
    return lowered


def require_kernels(plan: CachePlan, archs: Sequence[str]) -> None:
    """Raise UnsupportedError if no kernel supports the cache; runs before the model is traced."""
    dtype = next(iter(plan.params.leaves.values())).dtype
    cuda.require_kernels(plan, kernel_archs(archs, dtype))


def write_kernels(
    nodes: Mapping[str, AttentionShape],
    archs: Sequence[str],
    folder: Path,
    progress: Callable[[str], None],
) -> dict[str, float]:
    """Write cubins by architecture, and a file that says which node uses which.

    `nodes`: the shape of each cache op by its first output's name, in order.
    Return compile seconds by file.
    """
    made = compile_kernels(list(nodes.values()), archs, progress)
    distinct = list(made)
    seconds: dict[str, float] = {}
    images: dict[str, str] = {}
    for arch in archs:
        compiled = [kernel for kernels in made.values() for kernel in kernels[arch]]
        images |= {k.metadata()["sha256"]: f"{arch}/{k.file_name}" for k in compiled}
        seconds |= save_kernels(compiled, arch, folder)
    described = {
        "shapes": [asdict(shape) for shape in distinct],
        "kernels": [b64encode(pack_kernels(*entry)).decode() for entry in made.items()],
        "nodes": {name: distinct.index(shape) for name, shape in nodes.items()},
        "images": images,
    }
    (folder / "kernels" / PLUGINS_NAME).write_text(
        json.dumps(described, indent=1) + "\n", encoding="utf-8"
    )
    return seconds


def shape_of(fields: Mapping[str, Any]) -> AttentionShape:
    """The AttentionShape of an entry of `shapes` in tensorrt.json; ValueError for values that no
    compile writes."""
    shape = from_plain(AttentionShape, fields)
    require_known(fields, asdict(shape))
    shape.check()
    if not math.isfinite(shape.scale):
        raise ValueError(f"scale: expected a finite number, got {shape.scale}")
    if not 0 <= shape.softcap < math.inf:
        raise ValueError(f"softcap: expected a finite number >= 0, got {shape.softcap}")
    for name, count in (("window", shape.window), ("num_layers", shape.cache.num_layers)):
        if not 0 <= count <= MOST:
            raise ValueError(f"{name}: expected 0 to {MOST}, got {count}")
    if shape.rope and not 0 < shape.rope.rotary_dim <= shape.cache.head_dim:
        raise ValueError(
            f"rotary_dim: expected 1 to {shape.cache.head_dim}, got {shape.rope.rotary_dim}"
        )
    return shape
