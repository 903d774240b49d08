"""Replaces kvgraph's ops in a program by launches: each runs as a function of a step's inputs.

A launch holds its weights and the constants of its kernels, so a step only plans grids and
launches: the device may wait for any Python code between two launches. A `Gpu` does the launching:
with cubins, or with Triton's interpreter in tests.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch
from torch import nn

from kvgraph.contract.dims import TensorType
from kvgraph.contract.params import KVCacheParams
from kvgraph.errors import KernelError
from kvgraph.kernels import launch, variants
from kvgraph.kernels.experts_plan import ExpertsShape, experts_variants, plan_experts
from kvgraph.kernels.launch import LaunchPlan, Sizes, plans_by_sizes
from kvgraph.kernels.linear_plan import (
    LinearShape,
    is_expanded,
    is_library,
    linear_variants,
    plan_linear,
)
from kvgraph.kernels.route_plan import RouteShape, plan_route, route_variant
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import Variant
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
from kvgraph.ops.spec import OpSpec
from kvgraph.ops.torch_nodes import Call, is_dense, row_stride
from kvgraph.runtime.sessions.expanded import Expanded
from kvgraph.runtime.sessions.scaled import OUTS, SCALED_ROWS, Scaled

Operands = Mapping[str, torch.Tensor]
MUTATED = UPDATE_AND_ATTEND.mutated
"""Operands written in place, so never copied; sessions allocate them row-major."""


class Gpu(Protocol):
    """Device that launches and captures. `arch`: architecture of the kernels that it launches."""

    device: torch.device
    arch: str
    multiprocessors: int

    def free_memory(self) -> int | None:
        """Free bytes of the device; None for a simulated device."""

    def require(self, variants: Iterable[Variant]) -> None:
        """Raise ArtifactError unless all `variants` can be launched."""

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        """Enqueue `plan` on the current stream; operands by the names of kernel parameters."""

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Run `step` and record it: the result replays it over the same memory."""


class Shared:
    """Adds calls that several launches of a step share to the graph, once each."""

    def __init__(self, graph: torch.fx.Graph) -> None:
        self._graph = graph
        self._calls: dict[tuple[object, ...], torch.fx.Node] = {}

    def call(self, function: Callable[..., object], *given: torch.fx.Node) -> torch.fx.Node:
        """The node of a call, inserted before its first user: nodes are requested in run order."""
        key = function, *given
        if key not in self._calls:
            self._calls[key] = self._graph.call_function(function, given)
        return self._calls[key]


def launches_of(
    node: torch.fx.Node,
    module: nn.Module,
    symbols: Mapping[torch.fx.Node, TensorType],
    leaves: Mapping[str, KVCacheParams],
    gpu: Gpu,
) -> Attention | Unit | None:
    if node.target is torch_ops.update_and_attend.default:
        pool = symbols[node.args[1]]  # type: ignore[index]
        return Attention(node, module, gpu, leaves[pool.name.rpartition(".")[0]])
    kind = _KINDS.get(node.target)
    return None if kind is None else kind(node, module, gpu)


class Launches:
    """One op's node as a function `run` of a step's values: `names` of `spec`'s inputs.

    Weights are bound, and made dense once. `loose`: operands that are made dense in every step.
    `strided`: operands whose rows are parts of a larger tensor, with the row stride in elements
    that the kernel was compiled for.
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
        self.strided: dict[str, int] = {}
        self._launch = gpu.launch

    def keep_rows(self, strides: Mapping[str, int], *names: str) -> None:
        """Restrict `loose` to dense operands of `names`, and add the others to `strided`."""
        own = {name: is_dense(self.nodes[name].meta["val"]) for name in names}
        self.loose = tuple(name for name in names if own[name])
        self.strided = {name: strides[name] for name in names if not own[name]}

    def inputs(self, shared: Shared) -> tuple[torch.fx.Node, ...]:
        """The nodes whose values `run` is called with."""
        return tuple(self.nodes[name] for name in self.names)

    def operands(self, inputs: Iterable[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Operands of the kernel by name."""
        made = self.bound.copy()
        made.update(zip(self.names, inputs, strict=True))
        for name in self.loose:
            made[name] = _dense(made[name])
        for name, stride in self.strided.items():
            _require_rows(name, made[name], stride)
        return made


class Attention(Launches):
    """update_and_attend of one layer. `run` first takes the bounds, which all layers share."""

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
            self.variants += (variants.store_variant(shape),)
        self._plans = launch.plans_of_steps(
            shape, gpu.arch, stores=stores, multiprocessors=gpu.multiprocessors
        )
        self._heads, self._width = shape.heads, shape.cache.v_width
        self._rotates = "cos_sin" in self.nodes
        self.names = tuple(name for name in self.names if name != "max_lengths")
        given = [n for n in self.names if self.nodes[n].op == "placeholder"]
        self.loose = tuple(n for n in self.names if n not in (*given, *MUTATED))

    def inputs(self, shared: Shared) -> tuple[torch.fx.Node, ...]:
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
    """rms_norm over the last dim; optionally after adding a residual stream."""

    spec = RMS_NORM

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        call = Call.of(RMS_NORM, node)
        given = call.dtypes["x"], call.shapes, call.strides
        variant = variants.rms_norm_of(*given, call.attributes)
        self.variants, self._width = (variant,), call.shapes["x"][-1]
        self.keep_rows(call.strides, "x")
        self._plan = plans_by_sizes(launch.plan_rms_norm, variant)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        operands = self.operands(inputs)
        x = operands["x"]
        out = operands["out"] = x.new_empty(x.shape)
        self._launch(self._plan(x.numel() // self._width), operands)
        return out


class SiluMul(Launches):
    """silu(gate) * up, over the last dim."""

    spec = SILU_MUL

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        call = Call.of(SILU_MUL, node)
        variant = variants.silu_mul_of(call.dtypes["gate"], call.shapes, call.strides)
        self.keep_rows(call.strides, "gate", "up")
        self._width = call.shapes["gate"][-1]
        self.variants, self._plan = (variant,), plans_by_sizes(launch.plan_silu_mul, variant)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        operands = self.operands(inputs)
        gate = operands["gate"]
        out = operands["out"] = gate.new_empty(gate.shape)
        self._launch(self._plan(gate.numel() // self._width), operands)
        return out


class Route(Launches):
    """The experts that each row takes, and their weights."""

    spec = ROUTE

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        call = Call.of(ROUTE, node)
        shape = RouteShape.of(call.dtypes["logits"], call.shapes, call.attributes)
        self.variants, self._active = (route_variant(shape),), shape.num_active
        self._plan = plans_by_sizes(plan_route, shape)

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        operands = self.operands(inputs)
        logits = operands["logits"]
        size = logits.size(0), self._active
        indices = operands["indices"] = logits.new_empty(size, dtype=torch.int32)
        weights = operands["weights"] = logits.new_empty(size, dtype=torch.float32)
        self._launch(self._plan(size[0]), operands)
        return indices, weights


class FusedExperts(Launches):
    """A mixture of experts of one layer."""

    spec = FUSED_EXPERTS

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        call = Call.of(FUSED_EXPERTS, node)
        shape = ExpertsShape.of(call.dtypes["x"], call.shapes, call.attributes)
        self.variants = experts_variants(shape, gpu.arch)
        self._plan = plans_by_sizes(plan_experts, shape, gpu.arch)

    def run(self, *inputs: torch.Tensor) -> torch.Tensor:
        operands = self.operands(inputs)
        x = operands["x"]
        out = operands["out"] = torch.empty_like(x)
        self._launch(self._plan(x.size(0)), operands)
        return out


class QuantizedLinear(Launches):
    """Linear layers of one input over quantized weights: one result per output, or an empty one."""

    spec = QUANTIZED_LINEAR

    def __init__(self, node: torch.fx.Node, module: nn.Module, gpu: Gpu) -> None:
        super().__init__(node, module, gpu)
        call = Call.of(QUANTIZED_LINEAR, node)
        shape = LinearShape.of(call.dtypes["x"], call.shapes, call.attributes)
        self.variants, self.loose = linear_variants(shape, gpu.arch), ("x",)
        self._plan = plans_by_sizes(plan_linear, shape, gpu.arch)
        self._scaled, self._expanded = None, None
        if is_library(shape, gpu.arch):
            self._scaled = Scaled(shape, gpu.launch)
        elif is_expanded(shape, gpu.arch):
            self._expanded = Expanded(shape, gpu.arch, gpu.launch)
        self._in, self._features = shape.in_features, shape.out_features
        dtype = self.nodes["x"].meta["val"].dtype
        self._absent = torch.empty(0, 0, dtype=dtype, device=gpu.device)

    def run(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        operands = self.operands(inputs)
        x = operands["x"]
        leading, rows = x.shape[:-1], x.numel() // self._in
        if self._scaled is not None and rows > SCALED_ROWS:
            found = self._scaled.run(x.view(rows, self._in), operands)
            shaped = {name: out.view(*leading, -1) for name, out in found.items()}
            return tuple(shaped.get(name, self._absent) for name in OUTS)
        outs = [x.new_empty(*leading, n) if n else self._absent for n in self._features]
        if self._expanded is not None and rows >= self._expanded.least_rows:
            written = [out.view(rows, -1) for out in outs if out.numel()]
            self._expanded.run(x.view(rows, self._in), operands, written)
        else:
            operands.update(zip(OUTS, outs, strict=True))
            self._launch(self._plan(rows), operands)
        return tuple(outs)


Unit = RmsNorm | SiluMul | Route | FusedExperts | QuantizedLinear
_KINDS: dict[object, type[Unit]] = {
    torch_fusions.rms_norm.default: RmsNorm,
    torch_fusions.silu_mul.default: SiluMul,
    torch_ops.route.default: Route,
    torch_fusions.fused_experts.default: FusedExperts,
    torch_fusions.quantized_linear.default: QuantizedLinear,
}

Bounds = tuple[int, int, int, int]
"""Batch rows, width of the lookup table in pages, and the two numbers of `max_lengths[0]`."""


def bounds_of(max_lengths: torch.Tensor, table: torch.Tensor) -> Bounds:
    longest_new, longest = max_lengths[0].tolist()
    return table.shape[0], table.shape[1], longest_new, longest


def _require_rows(name: str, x: torch.Tensor, stride: int) -> None:
    """Raise KernelError unless rows have the stride that the kernel was compiled for."""
    is_single = x.numel() == x.size(-1)
    if x.stride(-2) != stride and not is_single and row_stride(x) != stride:
        raise KernelError(
            f"{name}: expected rows of a larger tensor, {stride} elements apart, as the program "
            f"says, got strides {x.stride()}"
        )


def _dense(x: torch.Tensor) -> torch.Tensor:
    """`x` row-major, at an aligned address: a column slice of a single row counts as contiguous at
    any address."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % variants.ALIGNMENT else x
