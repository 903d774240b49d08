"""torch-tensorrt adapter: convert cache ops of an exported program to kvgraph's TensorRT plugins.

    from kvgraph.compiler.targets.tensorrt import torch_tensorrt as adapter

    adapter.register()
    trt_module = torch_tensorrt.dynamo.compile(adapter.lower_caches(program), inputs)

Decisions: torch-tensorrt allocates outputs itself and functionalises mutations, so a pool that is
an output would be copied. Here each layer's op is functional in name only: nothing uses its pool
outputs, and the plugin writes the graph's pool in place (`pool_out` 0). Layers stay in order,
because each layer's query depends on the layer before. So a program may use a cache only through
pairs of store_kv and paged_attention, which `lower_caches` checks.

Tests need no CUDA build of torch: converters are tested with a stand-in for torch-tensorrt, plugins
with TensorRT's own registry, and whole programs with torch-tensorrt itself over TensorRT-RTX, with
networks in place of the plugins (`make test-vendors`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.export import ExportedProgram

from kvgraph.compiler.alone import alone
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.passes.fuse_update_and_attend import (
    FUSED,
    STORE,
    fuse_update_and_attend,
)
from kvgraph.compiler.passes.thread_pool import FUNCTIONAL
from kvgraph.compiler.passes.write_in_place import write_in_place
from kvgraph.contract.dtypes import ALL, POOLS
from kvgraph.errors import MissingDependencyError, UnsupportedError
from kvgraph.kernels import aot
from kvgraph.kernels.record import images_of, new_images, pack_images, pack_kernels
from kvgraph.kernels.shapes import AttentionShape, HeadNorm, PoolShape, Rope
from kvgraph.ops import OPSET_DOMAIN, UPDATE_AND_ATTEND
from kvgraph.ops.cuda_native import plugins_path
from kvgraph.ops.native import library_path
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from tensorrt import INetworkDefinition, IPluginCreator, IPluginV3, ITensor, PluginField

    from kvgraph.contract.dims import Array

INSTALL = "pip install 'kvgraph[torch-tensorrt]' (with the CUDA build of torch that it asks for)"

Made = tuple[bytes, Mapping[str, bytes]]
"""The plugin field `kernels` of a layer, and its cubins by SHA-256."""

Kernels = Mapping[AttentionShape, Made]

DTYPES = {dtype.tensorrt: dtype.name for dtype in ALL if dtype.name in POOLS}
"""Name of TensorRT's DataType -> kvgraph's name of the dtype."""


def lower_caches(program: ExportedProgram) -> ExportedProgram:
    """`program` in ops that `register`'s converter takes: changed in place, or a new program.

    `program` comes from torch.export without decompositions. UnsupportedError: it has no cache
    ops, or a store without its attention. It waits while another thread compiles.
    """
    with alone():
        return _lowered(without_writes(program))


def _lowered(program: ExportedProgram) -> ExportedProgram:
    graph = program.graph
    report = fuse_update_and_attend(graph)
    if report.unmatched:
        raise UnsupportedError(f"torch-tensorrt: {report.unmatched[0]}")
    nodes = [node for node in graph.nodes if node.target is FUSED]
    if not nodes or any(node.target is STORE for node in graph.nodes):
        raise UnsupportedError(
            "torch-tensorrt: expected pairs of kvgraph::store_kv and paged_attention in the "
            f"program, got {len(nodes)}"
        )
    write_in_place(graph)
    graph.lint()
    program.graph_module.recompile()
    return program


def register(archs: Sequence[str] = (), kernels: Kernels | None = None) -> Converter:
    """Register a converter for the ops of `lower_caches` with torch-tensorrt.

    `archs`: architectures to compile kernels for; default: this machine's GPU.
    `kernels`: compiled kernels, in place of `archs`.
    A second call has no effect, because torch-tensorrt uses the converter that came first.
    MissingDependencyError: torch-tensorrt or TensorRT is missing. UnsupportedError: an architecture
    has no kernels, or this TensorRT takes no plugins. KernelError: the plugins' library is missing.
    """
    conversion = imported("torch_tensorrt.dynamo.conversion")
    trt = imported("tensorrt")
    if not hasattr(trt.INetworkDefinition, "add_plugin_v3"):
        raise UnsupportedError(
            f"torch-tensorrt: expected a TensorRT whose INetworkDefinition has add_plugin_v3, got "
            f"{trt.__name__} {trt.__version__}, which takes plugins from ONNX alone: "
            f"{INSTALL}, or compile with --backend tensorrt"
        )
    converter = Converter(
        trt=trt,
        as_tensor=imported("torch_tensorrt.dynamo.conversion.converter_utils").get_trt_tensor,
        archs=tuple(archs) or (() if kernels else (_this_gpu(),)),
        made=dict(kernels or {}),
    )
    converter.load_plugins()
    decorate = conversion.dynamo_tensorrt_converter(FUNCTIONAL, supports_dynamic_shapes=True)
    decorate(converter)
    return converter


def imported(name: str) -> Any:
    try:
        return import_module(name)
    except Exception as error:  # with a CPU build of torch the import raises AssertionError
        reraise_if_signalled(error)
        raise MissingDependencyError(
            f"{name.partition('.')[0]}: needed for the torch-tensorrt adapter, cannot be imported "
            f"({error}); {INSTALL}"
        ) from error


def _this_gpu() -> str:
    import torch

    if not torch.cuda.is_available():
        raise UnsupportedError(
            "torch-tensorrt: archs: expected one or more (`archs=['sm_89']`) where this process "
            "sees no GPU, got none"
        )
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


@dataclass
class Converter:
    """Adds a node's plugin to a network. Kernels are compiled once for each distinct layer. A
    network has equal cubins once, in its first node that needs them."""

    trt: ModuleType
    as_tensor: Callable[..., ITensor]
    archs: tuple[str, ...]
    made: dict[AttentionShape, Made] = field(default_factory=dict)
    _network: INetworkDefinition | None = None
    _carried: set[str] = field(default_factory=set)

    def __call__(
        self, ctx: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str
    ) -> tuple[ITensor | None, ...]:
        """Convert a node for torch-tensorrt; return the op's outputs as tensors of the network."""
        given = _bound(args, kwargs)
        tensors = {
            operand.name: self.as_tensor(ctx, given[operand.name], f"{name}_{operand.name}")
            for operand in UPDATE_AND_ATTEND.inputs
            if given.get(operand.name) is not None
        }
        plugin = self._create(name, self._fields(ctx.net, tensors, given))
        layer = ctx.net.add_plugin_v3(list(tensors.values()), [], plugin)
        layer.name = name
        pools = [tensors.get(o.alias) for o in UPDATE_AND_ATTEND.outputs if o.alias]
        return (layer.get_output(0), *pools)

    def load_plugins(self) -> None:
        """Load the plugins, unless they are loaded: TensorRT refuses to load a library twice.

        UnsupportedError if TensorRT does not accept them.
        """
        if self._creator() is None:
            self.trt.get_plugin_registry().load_library(str(plugins_path()))
        if self._creator() is None:
            raise UnsupportedError(
                f"{library_path('tensorrt')}: expected plugins that tensorrt "
                f"{self.trt.__version__} takes, got none"
            )

    def _creator(self) -> IPluginCreator:
        for creator in self.trt.get_plugin_registry().all_creators:
            if (creator.plugin_namespace, creator.name) == (OPSET_DOMAIN, UPDATE_AND_ATTEND.name):
                return creator
        return None

    def _create(self, name: str, fields: list[PluginField]) -> IPluginV3:
        trt = self.trt
        collection = trt.PluginFieldCollection(fields)
        plugin = self._creator().create_plugin(name, collection, trt.TensorRTPhase.BUILD)
        if plugin is None:
            raise UnsupportedError(f"torch-tensorrt: {name}: TensorRT cannot make its plugin")
        return plugin

    def _fields(
        self, network: INetworkDefinition, tensors: Mapping[str, ITensor], given: Mapping[str, Any]
    ) -> list[PluginField]:
        record, images = self._kernels(_shape(tensors, given))
        if network is not self._network:
            self._network, self._carried = network, set()
        new = new_images(record, self._carried)
        operands = [operand.name for operand in UPDATE_AND_ATTEND.inputs]
        numbers = {a.name: _number(a.kind, given[a.name]) for a in UPDATE_AND_ATTEND.attributes}
        numbers |= {
            "inputs": _number("int", sum(1 << operands.index(name) for name in tensors)),
            "aliased": _number("int", 0),
            "pool_out": _number("int", 0),
        }
        types = self.trt.PluginFieldType
        kinds = {np.dtype(np.int32): types.INT32, np.dtype(np.float32): types.FLOAT32}
        return [
            *(self.trt.PluginField(n, value, kinds[value.dtype]) for n, value in numbers.items()),
            self._bytes("kernels", record),
            self._bytes("images", pack_images(images[digest] for digest in new)),
        ]

    def _bytes(self, name: str, data: bytes) -> PluginField:
        return self.trt.PluginField(
            name, np.frombuffer(data, np.int8), self.trt.PluginFieldType.CHAR
        )

    def _kernels(self, shape: AttentionShape) -> Made:
        if shape not in self.made:
            if not self.archs:
                raise UnsupportedError(
                    f"torch-tensorrt: expected a layer of which there are kernels, got {shape}"
                )
            compiled = {arch: aot.compile_attention(shape, arch) for arch in self.archs}
            images = images_of(kernel for kernels in compiled.values() for kernel in kernels)
            self.made[shape] = (pack_kernels(shape, compiled), images)
        return self.made[shape]


def _bound(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [operand.name for operand in UPDATE_AND_ATTEND.inputs]
    defaults = {a.name: a.default for a in UPDATE_AND_ATTEND.attributes}
    return defaults | dict(zip(names, args, strict=False)) | dict(kwargs)


def _number(kind: str, value: float) -> Array:
    return np.array([value], np.int32 if kind == "int" else np.float32)


def _shape(tensors: Mapping[str, ITensor], given: Mapping[str, Any]) -> AttentionShape:
    """The shape for which the layer's kernels are compiled, from the network's tensors."""
    query, pool = tensors["q"], tensors["kv_blocks"]
    _, _, layers, page_size, kv_heads, head_dim = pool.shape
    scales, cos_sin = tensors.get("kv_scales"), tensors.get("cos_sin")
    rope = Rope(cos_sin.shape[1], bool(given["rope_style"])) if cos_sin is not None else None
    norm = HeadNorm(given["norm_epsilon"], given["norm_offset"])
    v_head_dim = given["v_head_dim"]
    cache = PoolShape(
        dtype=_dtype("q", query),
        pool_dtype=_dtype("kv_blocks", pool),
        kv_heads=kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        num_layers=layers,
        v_head_dim=v_head_dim if v_head_dim != head_dim else 0,
        granularity=_granularity(head_dim, scales) if scales is not None else 0,
    )
    return AttentionShape(
        cache=cache,
        heads=query.shape[1],
        scale=given["scale"],
        window=given["window"],
        softcap=given["softcap"],
        causal=bool(given["causal"]),
        sinks="sinks" in tensors,
        rope=rope,
        chunked=bool(given["chunked"]),
        norm=norm if "q_norm" in tensors else None,
    )


def _granularity(head_dim: int, scales: ITensor) -> int:
    """Number of a head's elements that share a scale. UnsupportedError unless scales divide it."""
    each = scales.shape[-1]
    if head_dim % each:
        raise UnsupportedError(
            f"torch-tensorrt: kv_scales: expected a number of scales that divides head_dim "
            f"{head_dim}, got {each}"
        )
    return int(head_dim // each)


def _dtype(name: str, tensor: ITensor) -> str:
    found = str(getattr(tensor.dtype, "name", tensor.dtype))
    if found not in DTYPES:
        raise UnsupportedError(
            f"torch-tensorrt: {name}: expected one of {list(DTYPES)}, got {found}"
        )
    return DTYPES[found]
