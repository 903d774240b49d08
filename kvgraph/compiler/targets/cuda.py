"""Target cuda: a weightless exported program, weights by name, and cubins for each architecture.

Decisions: the program is saved as a CPU graph without weights and retargeted where it is loaded,
so it needs no GPU to make and none to open; cubins come from Triton, which needs no driver and no
CUDA toolkit. Everything is reproducible byte for byte: the graph's nodes lose what names this
machine's folders.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.export import export, symbolic_batch
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes.fuse_update_and_attend import (
    FUSED,
    arguments,
    buffer_leaves,
    fuse_update_and_attend,
    require_fused,
)
from kvgraph.compiler.targets import Lowered
from kvgraph.compiler.targets.torch import MODEL_NAME, count_ops, save_weights
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError
from kvgraph.kernels import aot
from kvgraph.kernels.shapes import AttentionShape, CacheShape, check_dtypes
from kvgraph.ops import UPDATE_AND_ATTEND

KERNELS_NAME = "kernels.json"
LOCAL_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
"""What torch.export notes of the machine and the sources that a node came from."""


def require_kernels(plan: CachePlan, archs: Sequence[str]) -> None:
    """UnsupportedError for a cache that no kernel supports, before the model is traced."""
    for leaf in plan.params.leaves.values():
        shape = _cache_shape(leaf, leaf.dtype)
        shape.check()
        for arch in archs:
            check_dtypes(shape, arch)


def lower(
    model: Model,
    signature: GraphSignature,
    plan: CachePlan,
    folder: Path,
    *,
    archs: Sequence[str],
    progress: Callable[[str], None],
) -> Lowered:
    """Write `model.pt2`, `weights.safetensors` and `kernels/{arch}/` into `folder`."""
    program = export(model, signature, return_buffers=False)
    report = fuse_update_and_attend(program.graph)
    require_fused(program, report, signature, plan)
    shapes = attention_shapes(program, signature, plan)
    save_weights(program, folder)
    _save_program(program, folder / MODEL_NAME)
    for arch in archs:
        progress(f"compiling kernels for {arch}")
        _save_kernels(shapes, arch, folder / "kernels" / arch)
    return Lowered(
        ops=count_ops(program),
        passes=[report],
        tools=("torch", "transformers", "triton"),
    )


def attention_shapes(
    program: ExportedProgram, signature: GraphSignature, plan: CachePlan
) -> list[AttentionShape]:
    """The distinct constants of the program's attention, in the order of its layers."""
    leaf_of = buffer_leaves(program, signature)
    shapes = []
    for node in program.graph.nodes:
        if node.target is FUSED:
            given = arguments(UPDATE_AND_ATTEND, node)
            query = given["q"].meta["val"]
            dtype = str(query.dtype).removeprefix("torch.")
            leaf = plan.params.leaves[leaf_of[given["kv_blocks"].name]]
            shapes.append(
                AttentionShape(
                    cache=_cache_shape(leaf, dtype),
                    heads=query.shape[1],
                    scale=given["scale"],
                    window=given["window"],
                    softcap=given["softcap"],
                    causal=bool(given["causal"]),
                    sinks=given["sinks"] is not None,
                )
            )
    return list(dict.fromkeys(shapes))


def _cache_shape(leaf: KVCacheParams, dtype: str) -> CacheShape:
    return CacheShape(
        dtype=dtype,
        pool_dtype=leaf.pool_dtype,
        kv_heads=leaf.n_kv_heads_per_device,
        head_dim=leaf.head_dim,
        page_size=leaf.page_size,
        num_layers=leaf.num_layers,
        v_head_dim=leaf.v_head_dim if leaf.v_head_dim != leaf.head_dim else 0,
        granularity=leaf.scale_granularity if leaf.quantization else 0,
    )


def _save_program(program: ExportedProgram, path: Path) -> None:
    """The program with fake parameters: names, shapes and dtypes, no values."""
    mode = FakeTensorMode()
    program._state_dict = {k: mode.from_tensor(v) for k, v in program.state_dict.items()}
    program._example_inputs = None
    _forget_sources(program.graph)
    program.graph_module.recompile()
    with symbolic_batch():
        torch.export.save(program, path)


def _forget_sources(graph: Graph) -> None:
    for node in graph.nodes:
        for name in LOCAL_META:
            node.meta.pop(name, None)


def _save_kernels(shapes: Sequence[AttentionShape], arch: str, folder: Path) -> None:
    """A cubin per kernel, and `kernels.json`: what a launcher needs of each, and its resources."""
    folder.mkdir(parents=True)
    described: dict[str, dict[str, Any]] = {}
    for shape in shapes:
        for kernel in aot.compile_attention(shape, arch):
            described[kernel.file_name] = kernel.metadata()
            (folder / kernel.file_name).write_bytes(kernel.cubin)
    if not described:
        raise UnsupportedError("target cuda: expected at least one attention layer, got none")
    text = json.dumps([described[name] for name in sorted(described)], indent=1)
    (folder / KERNELS_NAME).write_text(text + "\n")
