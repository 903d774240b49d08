"""A weightless program made ready for a device: weights bound, our ops replaced by launches.

Every node of ours becomes a function that knows its weights and the constants of its kernels, so a
step plans grids and launches and decides nothing else: what Python does between two launches, the
device may wait for. What is launched is a `Gpu`'s matter: cubins, or Triton's interpreter in tests.
"""

from __future__ import annotations

import logging
import operator
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
from kvgraph.kernels.launch import LaunchPlan, Sizes, plans_by_rows
from kvgraph.kernels.linear_plan import LinearShape, linear_variants, plan_linear
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import Variant
from kvgraph.ops import (
    FUSED_EXPERTS,
    QUANTIZED_LINEAR,
    RMS_NORM,
    SILU_MUL,
    UPDATE_AND_ATTEND,
    torch_fusions,
    torch_ops,
)
from kvgraph.ops.spec import OpSpec
from kvgraph.ops.torch_nodes import Call
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.opening import opening
from kvgraph.runtime.sessions.pickles import require_no_pickles
from kvgraph.runtime.sessions.views import join_views
from kvgraph.runtime.sessions.weights import read_weights

Operands = Mapping[str, torch.Tensor]
MUTATED = UPDATE_AND_ATTEND.mutated
"""Written in place, so never copied; sessions allocate them row-major."""

READ_BY_VIEWS = (
    torch.ops.aten.sym_size.int,
    operator.add,
    operator.floordiv,
    operator.getitem,
    operator.mul,
    operator.sub,
)
"""Sizes, and results of several; of numbers, which change nothing."""

OUTS = tuple(operand.name for operand in QUANTIZED_LINEAR.outputs)


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
        module = program.module(check_guards=False)
        leaves = artifact.params().leaves
        _replace_ops(module, artifact.signature.inputs, leaves, gpu, path)
        # Without torch's own checks of inputs: the signature is checked before every run.
        return torch.fx.GraphModule(module, module.graph)


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
    shared = _Shared(graph)
    for node in list(graph.nodes):
        launches = _launches(node, module, symbols, leaves, gpu)
        if launches is not None:
            gpu.require(launches.variants)
            with graph.inserting_before(node):
                call = graph.call_function(launches.run, launches.inputs(shared))
            call.meta = node.meta
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    join_views(graph)
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or node.target in READ_BY_VIEWS):
            graph.erase_node(node)


class _Shared:
    """Calls that several launches of a step need the result of, each made once."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._calls: dict[tuple[object, ...], torch.fx.Node] = {}

    def call(self, function: Callable[..., object], *given: torch.fx.Node) -> torch.fx.Node:
        """Where its first caller is: nodes are asked for in the order in which they run."""
        key = function, *given
        if key not in self._calls:
            self._calls[key] = self._graph.call_function(function, given)
        return self._calls[key]


def _launches(
    node: torch.fx.Node,
    module: nn.Module,
    symbols: Mapping[torch.fx.Node, TensorType],
    leaves: Mapping[str, KVCacheParams],
    gpu: Gpu,
) -> Attention | RmsNorm | SiluMul | FusedExperts | QuantizedLinear | None:
    if node.target is torch_ops.update_and_attend.default:
        pool = symbols[node.args[1]]  # type: ignore[index]
        return Attention(node, module, gpu, leaves[pool.name.rpartition(".")[0]])
    kind = _KINDS.get(node.target)
    return None if kind is None else kind(node, module, gpu)


class Launches:
    """A node of ours as `run`, a function of what a step gives: `names` of `spec`'s inputs.

    Weights are bound, and made dense once; `loose` are the operands that are made so in every step.
    """

    spec: OpSpec
    variants: tuple[Variant, ...]

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        self.given = self.spec.arguments(node.args, node.kwargs)
        nodes = {o.name: self.given[o.name] for o in self.spec.inputs}
        self.nodes = {name: n for name, n in nodes.items() if isinstance(n, torch.fx.Node)}
        self.bound = {
            name: _dense(operator.attrgetter(str(n.target))(module))
            for name, n in self.nodes.items()
            if n.op == "get_attr"
        }
        self.names = tuple(name for name in self.nodes if name not in self.bound)
        self.loose = self.names
        self._launch = gpu.launch

    def inputs(self, shared: _Shared) -> tuple[torch.fx.Node, ...]:
        """What `run` is called with."""
        return tuple(self.nodes[name] for name in self.names)

    def operands(self, inputs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """By name, as kernels take them."""
        made = self.bound.copy()
        made.update(zip(self.names, inputs, strict=True))
        for name in self.loose:
            made[name] = _dense(made[name])
        return made


class Attention(Launches):
    """update_and_attend of one layer. `run` is given what is the same in all layers first."""

    spec = UPDATE_AND_ATTEND

    def __init__(
        self, node: torch.fx.Node, module: nn.Module, gpu: Gpu, leaf: KVCacheParams
    ) -> None:
        super().__init__(node, module, gpu)
        self._layer = int(self.given["layer"])
        stores = self.given["k"] is not None
        self.shape = shape = AttentionShape.of(leaf, self.given)
        self.variants = variants.attention_variants(shape, gpu.arch)
        if stores:
            self.variants += (variants.store_variant(shape.cache, shape.rope),)
        self._plans = launch.plans_of_steps(
            shape, gpu.arch, stores=stores, multiprocessors=gpu.multiprocessors
        )
        self._heads, self._width = shape.heads, shape.cache.v_width
        self._rotates = "cos_sin" in self.nodes
        self.names = tuple(name for name in self.names if name != "max_lengths")
        given = [n for n in self.names if self.nodes[n].op == "placeholder"]
        self.loose = tuple(n for n in self.names if n not in (*given, *MUTATED))

    def inputs(self, shared: _Shared) -> tuple[torch.fx.Node, ...]:
        return (
            shared.call(bounds_of, self.nodes["max_lengths"], self.nodes["lookup_table"]),
            *(
                shared.call(_dense, node)
                if node.op == "placeholder" and name not in MUTATED
                else node
                for name, node in zip(self.names, super().inputs(shared), strict=True)
            ),
        )

    def run(self, bounds: Bounds, *inputs: torch.Tensor) -> torch.Tensor:
        operands = self.operands(inputs)
        q = operands["q"]
        tokens = q.size(0)
        out = operands["out"] = q.new_empty(tokens, self._heads, self._width)
        positions = operands["cos_sin"].size(0) if self._rotates else 0
        batch, width, longest_new, longest = bounds
        sizes = Sizes(batch, tokens, longest_new, longest, width, positions)
        self._launch(self._plans.plan(sizes, self._layer), operands)
        return out


class RmsNorm(Launches):
    """rms_norm over the last dim, alone or after the sum with a residual stream."""

    spec = RMS_NORM

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        x = self.nodes["x"].meta["val"]
        has_residual = "residual" in self.nodes
        constants: dict[str, Any] = dict(node.kwargs)
        variant = variants.rms_norm_variant(
            str(x.dtype).removeprefix("torch."), x.shape[-1], residual=has_residual, **constants
        )
        self.variants, self.loose, self._width = (variant,), ("x",), x.shape[-1]
        self._plan = plans_by_rows(launch.plan_rms_norm, variant)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        operands = self.operands(inputs)
        x = operands["x"]
        out = operands["out"] = torch.empty_like(x)
        self._launch(self._plan(x.numel() // self._width), operands)
        return out


class SiluMul(Launches):
    """silu(gate) * up."""

    spec = SILU_MUL

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        gate = self.nodes["gate"].meta["val"]
        dtype, self._width = str(gate.dtype).removeprefix("torch."), gate.shape[-1]
        variant = variants.silu_mul_variant(dtype, self._width)
        self.variants, self._plan = (variant,), plans_by_rows(launch.plan_silu_mul, variant)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        operands = self.operands(inputs)
        gate = operands["gate"]
        out = operands["out"] = torch.empty_like(gate)
        self._launch(self._plan(gate.numel() // self._width), operands)
        return out


class FusedExperts(Launches):
    """A mixture of experts of one layer."""

    spec = FUSED_EXPERTS

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        call = Call.of(FUSED_EXPERTS, node)
        shape = ExpertsShape.of(call.dtypes["x"], call.shapes, call.attributes)
        self.variants = experts_variants(shape, gpu.arch)
        self._plan = plans_by_rows(plan_experts, shape, gpu.arch)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        operands = self.operands(inputs)
        x = operands["x"]
        out = operands["out"] = torch.empty_like(x)
        self._launch(self._plan(x.size(0)), operands)
        return out


class QuantizedLinear(Launches):
    """Linear layers of one input over small weights: a result for each output, or an empty one."""

    spec = QUANTIZED_LINEAR

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        call = Call.of(QUANTIZED_LINEAR, node)
        shape = LinearShape.of(call.dtypes["x"], call.shapes, call.attributes)
        self.variants, self.loose = linear_variants(shape, gpu.arch), ("x",)
        self._plan = plans_by_rows(plan_linear, shape, gpu.arch)
        self._in, self._features = shape.in_features, shape.out_features
        dtype = self.nodes["x"].meta["val"].dtype
        self._absent = torch.empty(0, 0, dtype=dtype, device=gpu.device)

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = self.operands(inputs)
        x = operands["x"]
        rows = x.shape[:-1]
        outs = [x.new_empty(*rows, n) if n else self._absent for n in self._features]
        operands.update(zip(OUTS, outs, strict=True))
        self._launch(self._plan(x.numel() // self._in), operands)
        return tuple(outs)


_KINDS: dict[object, type[RmsNorm | SiluMul | FusedExperts | QuantizedLinear]] = {
    torch_fusions.rms_norm.default: RmsNorm,
    torch_fusions.silu_mul.default: SiluMul,
    torch_fusions.fused_experts.default: FusedExperts,
    torch_fusions.quantized_linear.default: QuantizedLinear,
}

Bounds = tuple[int, int, int, int]
"""Rows of the batch, pages in a row of the table, and both of `max_lengths[0]`."""


def bounds_of(max_lengths: torch.Tensor, table: torch.Tensor) -> Bounds:
    longest_new, longest = max_lengths[0].tolist()
    return table.shape[0], table.shape[1], longest_new, longest


def _dense(x: torch.Tensor) -> torch.Tensor:
    """Row-major, at an address that kernels take: of one row a slice of columns is contiguous
    wherever it starts."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % variants.ALIGNMENT else x
