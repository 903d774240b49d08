"""Target cuda: write an exported program without weights, weights by name, and cubins.

Decisions: the program is saved as a CPU graph without weights, and moved to the GPU when it is
loaded, so no GPU is needed to make or open it. Cubins come from Triton, which needs no driver and
no CUDA toolkit. A kernel's file is named after its Variant, which the runtime computes from the
operands of a call (`kernels/variants.py`), without Triton. All files except the log of compile
times are reproducible byte for byte: metadata with paths of this machine is removed from the graph.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Graph

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.export import lowering
from kvgraph.compiler.passes.fuse_update_and_attend import (
    FUSED,
    arguments,
    buffer_leaves,
)
from kvgraph.compiler.passes.lists import PASSES, run_passes
from kvgraph.compiler.targets import Lowered, write_build_log
from kvgraph.compiler.targets.torch import count_ops
from kvgraph.compiler.targets.weights import add_table, save_weights
from kvgraph.compiler.traced import Traced
from kvgraph.contract.file_names import BUILD_LOG_NAME, KERNELS_NAME, PROGRAM_NAME
from kvgraph.kernels import aot
from kvgraph.kernels.aot import Compiled
from kvgraph.kernels.experts_plan import ExpertsShape, experts_variants
from kvgraph.kernels.linear_plan import LinearShape, linear_variants
from kvgraph.kernels.route_plan import RouteShape, route_variant
from kvgraph.kernels.shapes import AttentionShape, PoolShape, check_arch
from kvgraph.kernels.variants import (
    Variant,
    increment_variant,
    rms_norm_of,
    silu_mul_of,
)
from kvgraph.ops import (
    FUSED_EXPERTS,
    QUANTIZED_LINEAR,
    RMS_NORM,
    ROUTE,
    SILU_MUL,
    UPDATE_AND_ATTEND,
    torch_fusions,
    torch_ops,
)
from kvgraph.ops.torch_nodes import Call

LOCAL_META = ("stack_trace", "nn_module_stack", "source_fn_stack", "torch_fn", "from_node")
"""Metadata of nodes in which torch.export records paths and sources of this machine."""


def require_kernels(plan: CachePlan, archs: Sequence[str]) -> None:
    """Raise UnsupportedError if no kernel supports the cache; runs before the model is traced."""
    for leaf in plan.params.leaves.values():
        shape = PoolShape.of(leaf, leaf.dtype)
        shape.check()
        for arch in archs:
            check_arch(shape, arch)


def lower(
    traced: Traced,
    folder: Path,
    *,
    archs: Sequence[str],
    progress: Callable[[str], None],
    weight_bits: int | None = None,
) -> Lowered:
    """Write `model.pt2`, `weights.safetensors` and `kernels/{arch}/` into `folder`.

    `weight_bits`: bits of weights of linear layers and experts (8, 4 or AS_STORED); None: they keep
    the model's dtype.
    """
    traced.bits, traced.weights.plain = weight_bits, traced.model.dtype
    rewrite(traced)
    program = traced.program
    shapes = list(dict.fromkeys(attention_of_nodes(traced)))
    variants = fusion_variants(program)
    save_program(traced, folder, progress)
    seconds: dict[str, float] = {}
    for arch in archs:
        progress(f"compiling kernels for {arch}")
        used = [variant for shape in shapes for variant in aot.all_attention_variants(shape, arch)]
        products = product_variants(program, arch)
        made = aot.compile_all([*used, *products, *variants], arch)
        seconds |= save_kernels(made, arch, folder)
    write_build_log(folder, {"compile_seconds": seconds})
    return Lowered(
        ops=count_ops(program),
        passes=traced.passes,
        nondeterministic_files=[BUILD_LOG_NAME],
    )


def rewrite(traced: Traced) -> None:
    """Run this target's passes over a trace, with `traced.bits`."""
    run_passes(traced, PASSES["cuda", "torch"].program)


def compile_kernels(
    attention: Sequence[AttentionShape], archs: Sequence[str], progress: Callable[[str], None]
) -> dict[AttentionShape, dict[str, list[Compiled]]]:
    """Compile the kernels that attention launches: by distinct shape in order, by architecture."""
    made: dict[AttentionShape, dict[str, list[Compiled]]] = {shape: {} for shape in attention}
    for arch in archs:
        progress(f"compiling kernels for {arch}")
        for shape, kernels in made.items():
            kernels[arch] = aot.compile_attention(shape, arch)
    return made


def attention_of_nodes(traced: Traced) -> list[AttentionShape]:
    """The shape (compile-time constants) of each update_and_attend, in the program's order."""
    leaf_of = buffer_leaves(traced.program, traced.signature)
    shapes = []
    for node in traced.program.graph.nodes:
        if node.target is FUSED:
            given = arguments(UPDATE_AND_ATTEND, node)
            leaf = traced.plan.params.leaves[leaf_of[given["kv_blocks"]]]
            shapes.append(AttentionShape.of(leaf, given))
    return shapes


def fusion_variants(program: ExportedProgram) -> list[Variant]:
    """Kernels for the program's norms, gates and routers, and the one that runs between steps."""
    variants = []
    for node in program.graph.nodes:
        if node.target is torch_fusions.rms_norm.default:
            call = Call.of(RMS_NORM, node)
            given = call.dtypes["x"], call.shapes, call.strides
            variants.append(rms_norm_of(*given, call.attributes))
        elif node.target is torch_fusions.silu_mul.default:
            call = Call.of(SILU_MUL, node)
            variants.append(silu_mul_of(call.dtypes["gate"], call.shapes, call.strides))
        elif node.target is torch_ops.route.default:
            call = Call.of(ROUTE, node)
            shape = RouteShape.of(call.dtypes["logits"], call.shapes, call.attributes)
            variants.append(route_variant(shape))
    return [*variants, increment_variant()]


def product_variants(program: ExportedProgram, arch: str) -> list[Variant]:
    """Kernels for the program's experts and for its linear layers with quantised weights."""
    found: dict[Variant, None] = {}
    for node in program.graph.nodes:
        if node.target is torch_fusions.fused_experts.default:
            call = Call.of(FUSED_EXPERTS, node)
            experts = ExpertsShape.of(call.dtypes["x"], call.shapes, call.attributes)
            found |= dict.fromkeys(experts_variants(experts, arch))
        elif node.target is torch_fusions.quantized_linear.default:
            call = Call.of(QUANTIZED_LINEAR, node)
            linear = LinearShape.of(call.dtypes["x"], call.shapes, call.attributes)
            found |= dict.fromkeys(linear_variants(linear, arch))
    return list(found)


def save_program(traced: Traced, folder: Path, progress: Callable[[str], None]) -> None:
    """Write `weights.safetensors`, and `model.pt2` with fake parameters: names, shapes and dtypes,
    no values.

    The largest parameter comes first, because torch.export takes fake tensors of a dtype for views
    of the first one's memory.
    """
    program = traced.program
    if traced.model.checkpoint is not None:
        progress("copying weights")
    save_weights(program, folder, traced.weights)
    mode = FakeTensorMode()
    by_size = sorted(program.state_dict.items(), key=lambda item: -item[1].numel())
    program._state_dict = {name: mode.from_tensor(value) for name, value in by_size}
    program._example_inputs = None
    _forget_sources(program.graph)
    program.graph_module.recompile()
    with lowering():
        torch.export.save(program, folder / PROGRAM_NAME)
    add_table(program, folder / PROGRAM_NAME)


def _forget_sources(graph: Graph) -> None:
    for node in graph.nodes:
        for name in LOCAL_META:
            node.meta.pop(name, None)


def save_kernels(made: Sequence[Compiled], arch: str, folder: Path) -> dict[str, float]:
    """Write each kernel's cubin and PTX, and `kernels.json` with launch metadata and resources.

    Return compile seconds by file; they differ between builds, so they are logged elsewhere.
    """
    kernels = folder / "kernels" / arch
    kernels.mkdir(parents=True)
    distinct = {kernel.file_name: kernel for kernel in made}
    made = [distinct[name] for name in sorted(distinct)]
    for kernel in made:
        (kernels / kernel.file_name).write_bytes(kernel.cubin)
        (kernels / kernel.ptx_name).write_bytes(kernel.packed_ptx())
    described = json.dumps([kernel.metadata() for kernel in made], indent=1)
    (kernels / KERNELS_NAME).write_text(described + "\n", encoding="utf-8")
    return {f"kernels/{arch}/{kernel.file_name}": round(kernel.seconds, 3) for kernel in made}
