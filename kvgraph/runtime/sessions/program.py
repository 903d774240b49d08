"""A weightless program made ready for a device: weights bound, our ops replaced by launches.

Every node of ours becomes a module that knows the constants of its kernels, so a step plans grids
and launches and decides nothing else. What is launched is a `Gpu`'s matter: cubins, or Triton's
interpreter in tests.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from kvgraph.contract.dims import TensorType
from kvgraph.contract.params import KVCacheParams
from kvgraph.errors import ArtifactError
from kvgraph.kernels import launch, variants
from kvgraph.kernels.experts_plan import ExpertsShape, experts_variants, plan_experts
from kvgraph.kernels.launch import LaunchPlan, Sizes
from kvgraph.kernels.linear_plan import LinearShape, linear_variants, plan_linear
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import Variant
from kvgraph.ops import (
    FUSED_EXPERTS,
    QUANTIZED_LINEAR,
    UPDATE_AND_ATTEND,
    torch_fusions,
    torch_ops,
)
from kvgraph.ops.torch_nodes import Call
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.opening import opening
from kvgraph.runtime.sessions.pickles import require_no_pickles
from kvgraph.runtime.sessions.weights import read_weights

Operands = Mapping[str, torch.Tensor]
MUTATED = UPDATE_AND_ATTEND.mutated
"""Written in place, so never copied; sessions allocate them row-major."""


class Gpu(Protocol):
    """What launches and captures. `arch` is the one whose kernels are launched."""

    device: torch.device
    arch: str
    multiprocessors: int

    def free_memory(self) -> int | None:
        """Bytes that are not taken; None: a device that stands for one."""

    def require(self, variants: Iterable[Variant]) -> None:
        """ArtifactError unless every one of `variants` can be launched."""

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        """Enqueue `plan` on the current stream; operands by the names of kernel parameters."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `step` and record it: the result replays it over the same memory."""


def load_program(artifact: ArtifactFolder, gpu: Gpu) -> torch.fx.GraphModule:
    """`model.pt2` with its weights on the GPU's device, over inputs in the signature's order."""
    path = artifact.file("model.pt2")
    with opening(path, f"torch {torch.__version__}"):
        program = read_program(artifact, gpu.device)
        if gpu.device.type != "cpu":  # saved as a CPU graph
            program = move_to_device_pass(program, str(gpu.device))
        module = program.module(check_guards=False)  # the signature is checked before every run
        leaves = artifact.params().leaves
        _replace_ops(module, artifact.signature.inputs, leaves, gpu, path)
    return module


def read_program(artifact: ArtifactFolder, device: torch.device) -> torch.export.ExportedProgram:
    """`model.pt2`, a CPU graph, with its weights on `device`. ArtifactError for a file that would
    run code as it is read."""
    path = artifact.file("model.pt2")
    require_no_pickles(path)
    program = _load(path)
    _bind_weights(program, artifact, device)
    return program


def _bind_weights(
    program: torch.export.ExportedProgram, artifact: ArtifactFolder, device: torch.device
) -> None:
    """Before the program is moved: what is on the device already is not copied, nor held twice."""
    named = program.state_dict
    weights = read_weights(artifact, named, str(device))
    program._state_dict = {
        name: nn.Parameter(weights[name], requires_grad=False)
        if isinstance(placeholder, nn.Parameter)
        else weights[name]
        for name, placeholder in named.items()
    }


def _load(path: Path) -> torch.export.ExportedProgram:
    """Warnings of torch are kept off the screen: they are about how it reads its own file."""
    logger = logging.getLogger("torch.export.pt2_archive._package")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    finally:
        logger.setLevel(level)


def _replace_ops(
    module: torch.fx.GraphModule,
    inputs: Sequence[TensorType],
    leaves: Mapping[str, KVCacheParams],
    gpu: Gpu,
    path: Path,
) -> None:
    graph = module.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise ArtifactError(
            f"{path}: expected {len(inputs)} inputs from the manifest, got {len(placeholders)}"
        )
    symbols = dict(zip(placeholders, inputs, strict=True))
    for node in list(graph.nodes):
        launches = _launches(node, symbols, leaves, gpu)
        if launches is not None:
            gpu.require(launches.variants)
            module.add_submodule(f"kvgraph_{node.name}", launches)
            with graph.inserting_before(node):
                call = graph.call_module(f"kvgraph_{node.name}", node.args)
            call.meta = node.meta
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    module.recompile()


def _launches(
    node: torch.fx.Node,
    symbols: Mapping[torch.fx.Node, TensorType],
    leaves: Mapping[str, KVCacheParams],
    gpu: Gpu,
) -> Attention | RmsNorm | SiluMul | FusedExperts | QuantizedLinear | None:
    if node.target is torch_ops.update_and_attend.default:
        pool = symbols[node.args[1]]  # type: ignore[index]
        return Attention(node, leaves[pool.name.rpartition(".")[0]], gpu)
    if node.target is torch_fusions.rms_norm.default:
        return RmsNorm(node, gpu)
    if node.target is torch_fusions.silu_mul.default:
        return SiluMul(node, gpu)
    if node.target is torch_fusions.fused_experts.default:
        return FusedExperts(node, gpu)
    if node.target is torch_fusions.quantized_linear.default:
        return QuantizedLinear(node, gpu)
    return None


class Attention(nn.Module):
    """update_and_attend of one layer."""

    def __init__(self, node: torch.fx.Node, leaf: KVCacheParams, gpu: Gpu) -> None:
        super().__init__()
        given = UPDATE_AND_ATTEND.arguments(node.args, node.kwargs)
        self._gpu, self._layer = gpu, int(given["layer"])
        self._names = [operand.name for operand in UPDATE_AND_ATTEND.inputs]
        self._stores = given["k"] is not None
        self._shape = AttentionShape.of(leaf, given)
        self.variants = variants.attention_variants(self._shape, gpu.arch)
        if self._stores:
            self.variants += (variants.store_variant(self._shape.cache, self._shape.rope),)

    def forward(self, *args: torch.Tensor | None) -> torch.Tensor:
        given = {n: a for n, a in zip(self._names, args, strict=False) if a is not None}
        q, table, bounds = given["q"], given["lookup_table"], given.pop("max_lengths")
        operands = {n: a if n in MUTATED else _dense(a) for n, a in given.items()}
        out = q.new_empty(q.shape[0], q.shape[1], self._shape.cache.v_width)
        longest_new, longest = bounds[0].tolist()
        positions = len(given["cos_sin"]) if "cos_sin" in given else 0
        sizes = Sizes(table.shape[0], q.shape[0], longest_new, longest, table.shape[1], positions)
        plan = launch.plan_update_and_attend(
            self._shape,
            self._gpu.arch,
            sizes,
            self._layer,
            stores=self._stores,
            multiprocessors=self._gpu.multiprocessors,
        )
        self._gpu.launch(plan, {**operands, "out": out})
        return out


class RmsNorm(nn.Module):
    """rms_norm over the last dim, alone or after the sum with a residual stream."""

    def __init__(self, node: torch.fx.Node, gpu: Gpu) -> None:
        super().__init__()
        x = node.args[0].meta["val"]  # type: ignore[union-attr]
        has_residual = len(node.args) > 2 and node.args[2] is not None
        constants: dict[str, Any] = dict(node.kwargs)
        self._gpu = gpu
        self._variant = variants.rms_norm_variant(
            str(x.dtype).removeprefix("torch."), x.shape[-1], residual=has_residual, **constants
        )
        self.variants = (self._variant,)

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = _dense(x)
        out = torch.empty_like(x)
        operands = {"x": x, "weight": weight, "out": out}
        if residual is not None:
            operands["residual"] = residual
        rows = x.numel() // x.shape[-1]
        self._gpu.launch(launch.plan_rms_norm(self._variant, rows), operands)
        return out


class SiluMul(nn.Module):
    """silu(gate) * up."""

    def __init__(self, node: torch.fx.Node, gpu: Gpu) -> None:
        super().__init__()
        gate = node.args[0].meta["val"]  # type: ignore[union-attr]
        self._gpu = gpu
        dtype = str(gate.dtype).removeprefix("torch.")
        self._variant = variants.silu_mul_variant(dtype, gate.shape[-1])
        self.variants = (self._variant,)

    def forward(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        gate, up = _dense(gate), _dense(up)
        out = torch.empty_like(gate)
        rows = gate.numel() // gate.shape[-1]
        plan = launch.plan_silu_mul(self._variant, rows)
        self._gpu.launch(plan, {"gate": gate, "up": up, "out": out})
        return out


class FusedExperts(nn.Module):
    """A mixture of experts of one layer."""

    def __init__(self, node: torch.fx.Node, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._names = [operand.name for operand in FUSED_EXPERTS.inputs]
        call = Call.of(FUSED_EXPERTS, node)
        self._shape = ExpertsShape.of(call.dtypes["x"], call.shapes, call.attributes)
        self.variants = experts_variants(self._shape, gpu.arch)

    def forward(self, *args: torch.Tensor | None) -> torch.Tensor:
        given = {n: a for n, a in zip(self._names, args, strict=False) if a is not None}
        operands = {name: _dense(tensor) for name, tensor in given.items()}
        out = torch.empty_like(operands["x"])
        plan = plan_experts(self._shape, self._gpu.arch, len(out))
        self._gpu.launch(plan, {**operands, "out": out})
        return out


class QuantizedLinear(nn.Module):
    """Linear layers of one input over small weights: a result for each output, or an empty one."""

    def __init__(self, node: torch.fx.Node, gpu: Gpu) -> None:
        super().__init__()
        self._gpu = gpu
        self._names = [operand.name for operand in QUANTIZED_LINEAR.inputs]
        call = Call.of(QUANTIZED_LINEAR, node)
        self._shape = LinearShape.of(call.dtypes["x"], call.shapes, call.attributes)
        self.variants = linear_variants(self._shape, gpu.arch)

    def forward(self, *args: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        operands = {n: a for n, a in zip(self._names, args, strict=False) if a is not None}
        operands["x"] = x = _dense(operands["x"])
        outs = [
            x.new_empty(*x.shape[:-1], features) if features else x.new_empty(0, 0)
            for features in self._shape.out_features
        ]
        operands |= dict(zip(("out", "out_1", "out_2"), outs, strict=True))
        rows = x.numel() // x.shape[-1]
        self._gpu.launch(plan_linear(self._shape, self._gpu.arch, rows), operands)
        return tuple(outs)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Row-major, at an address that kernels take: of one row a slice of columns is contiguous
    wherever it starts."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % variants.ALIGNMENT else x
