"""The torch-tensorrt adapter, with a module that stands for torch-tensorrt and its network."""

from __future__ import annotations

import functools
import sys
import types
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

pytest.importorskip("triton", reason="converters compile kernels")

from kvgraph import ops
from kvgraph.compiler.export import symbolic_batch
from kvgraph.compiler.passes.fuse_update_and_attend import arguments
from kvgraph.compiler.passes.thread_pool import FUNCTIONAL
from kvgraph.compiler.targets.tensorrt import torch_tensorrt as adapter
from kvgraph.errors import MissingDependencyError, UnsupportedError
from kvgraph.kernels import aot
from kvgraph.kernels.record import archs_of, image_digests
from kvgraph.kernels.shapes import AttentionShape, PoolShape
from kvgraph.ops import UPDATE_AND_ATTEND, torch_ops

LAYERS, HEADS, KV_HEADS, WIDTH, PAGE = 2, 4, 2, 16, 16
assert ops  # registers the ops


class Model(nn.Module):
    """Two layers over one pool."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(HEADS * WIDTH, HEADS * WIDTH)

    def forward(self, x: Any, pool: Any, offsets: Any, lengths: Any, table: Any, most: Any) -> Any:
        for layer in range(LAYERS):
            q = self.project(x).view(-1, HEADS, WIDTH)
            k, v = q[:, :KV_HEADS], q[:, KV_HEADS:]
            torch_ops.store_kv(pool, k, v, offsets, lengths, table, layer=layer)
            out = torch_ops.paged_attention(
                q, pool, offsets, lengths, table, most, layer=layer, scale=0.25
            )
            x = x + out.reshape(x.shape)
        return x


class Unread(Model):
    def forward(self, x: Any, pool: Any, offsets: Any, lengths: Any, table: Any, most: Any) -> Any:
        k = x.view(-1, HEADS, WIDTH)[:, :KV_HEADS]
        torch_ops.store_kv(pool, k, k, offsets, lengths, table, layer=0)
        return x


class Scaled(Model):
    """K and V are changed behind their store."""

    def forward(self, x: Any, pool: Any, offsets: Any, lengths: Any, table: Any, most: Any) -> Any:
        q = self.project(x).view(-1, HEADS, WIDTH)
        k, v = q[:, :KV_HEADS], q[:, KV_HEADS:]
        torch_ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        q *= 0.5
        return torch_ops.paged_attention(
            q, pool, offsets, lengths, table, most, layer=0, scale=0.25
        ) + k.repeat(1, HEADS // KV_HEADS, 1)


class Plain(Model):
    def forward(self, x: Any, pool: Any, offsets: Any, lengths: Any, table: Any, most: Any) -> Any:
        return self.project(x)


def exported(model: nn.Module) -> ExportedProgram:
    inputs = (
        torch.zeros(5, HEADS * WIDTH),
        torch.zeros(7, 2, LAYERS, PAGE, KV_HEADS, WIDTH),
        torch.tensor([0, 2, 4, 5], dtype=torch.int32),
        torch.zeros(3, dtype=torch.int32),
        torch.zeros(3, 6, dtype=torch.int32),
        torch.tensor([[2, 2]], dtype=torch.int32),
    )
    tokens = Dim("tokens", min=1, max=1 << 20)
    dynamic = ({0: tokens}, None, None, None, None, None)
    return torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=False)


def decomposed(program: ExportedProgram) -> list[Any]:
    """What torch-tensorrt hands to converters: nodes of the program, once it is functional."""
    with symbolic_batch():
        return list(program.run_decompositions().graph.nodes)


class Tensor:
    """A tensor of a network, with TensorRT's words for its type."""

    def __init__(self, name: str, value: torch.Tensor | None = None, shape: Any = None) -> None:
        self.name = name
        words = {torch.float32: "FLOAT", torch.int32: "INT32", torch.int8: "INT8"}
        self.dtype = SimpleNamespace(name=words.get(getattr(value, "dtype", None), "FLOAT"))
        dims = getattr(value, "shape", shape or ())
        self.shape = tuple(d if isinstance(d, int) else -1 for d in dims)


class Network:
    """Records the plugins that are added."""

    def __init__(self) -> None:
        self.layers: list[Any] = []

    def add_plugin_v3(self, inputs: list[Any], shape_inputs: list[Any], plugin: Any) -> Any:
        assert shape_inputs == []
        out = Tensor(f"out{len(self.layers)}", shape=inputs[0].shape)
        layer = SimpleNamespace(inputs=inputs, plugin=plugin, outputs=[out], name="")
        layer.get_output = layer.outputs.__getitem__
        self.layers.append(layer)
        return layer


class FakeTRT(types.ModuleType):
    """TensorRT's registry and fields; `refuses` makes its creator give no plugin."""

    __version__ = "11.4.0"
    PluginFieldType = SimpleNamespace(INT32="INT32", FLOAT32="FLOAT32", CHAR="CHAR")
    TensorRTPhase = SimpleNamespace(BUILD="BUILD")
    INetworkDefinition: type = Network

    def __init__(self) -> None:
        super().__init__("tensorrt")
        self.libraries: list[str] = []
        self.refuses = False
        self.all_creators: list[Any] = []

    def PluginField(self, name: str, data: Any, type: str) -> Any:
        return SimpleNamespace(name=name, data=data.copy(), type=type)

    def PluginFieldCollection(self, fields: list[Any]) -> list[Any]:
        return fields

    def get_plugin_registry(self) -> FakeTRT:
        return self

    def load_library(self, plugin_path: str) -> object:
        self.libraries.append(plugin_path)
        creator = SimpleNamespace(name=UPDATE_AND_ATTEND.name, plugin_namespace="kvgraph")
        creator.create_plugin = self.create_plugin
        self.all_creators.append(creator)
        return object()

    def create_plugin(self, name: str, field_collection: Any, phase: str) -> Any:
        assert phase == "BUILD"
        return None if self.refuses else {field.name: field for field in field_collection}


class TorchTensorRT:
    """Registers converters and asks them, as far as the adapter sees."""

    def __init__(self) -> None:
        self.converters: dict[Any, Any] = {}

    def dynamo_tensorrt_converter(self, key: Any, *, supports_dynamic_shapes: bool) -> Any:
        assert supports_dynamic_shapes
        return lambda converter: self.converters.setdefault(key, converter)

    def get_trt_tensor(self, ctx: Any, input_val: Any, name: str) -> Any:
        return input_val if isinstance(input_val, Tensor) else Tensor(name, input_val)

    def convert(self, program: ExportedProgram) -> Network:
        """One network of all the program's cache ops; other nodes are tensors without a source."""
        ctx = SimpleNamespace(net=Network())
        values: dict[Any, Any] = {}
        for node in decomposed(program):
            given = torch.fx.map_arg((node.args, node.kwargs), lambda n: values[n])
            if node.target in self.converters:
                values[node] = self.converters[node.target](ctx, node.target, *given, node.name)
            elif getattr(node.target, "__name__", "") == "getitem":
                values[node] = given[0][0][given[0][1]]
            elif node.op != "output":
                values[node] = Tensor(node.name, node.meta["val"])
        return ctx.net


compile_once = functools.cache(aot.compile_attention)  # kernels take seconds


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> TorchTensorRT:
    monkeypatch.setattr(aot, "compile_attention", compile_once)
    torch_tensorrt = TorchTensorRT()
    conversion = types.ModuleType("torch_tensorrt.dynamo.conversion")
    conversion.dynamo_tensorrt_converter = (  # type: ignore[attr-defined]
        torch_tensorrt.dynamo_tensorrt_converter
    )
    utils = types.ModuleType("torch_tensorrt.dynamo.conversion.converter_utils")
    utils.get_trt_tensor = torch_tensorrt.get_trt_tensor  # type: ignore[attr-defined]
    for module in (conversion, utils, FakeTRT()):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("torch_tensorrt", "torch_tensorrt.dynamo"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    return torch_tensorrt


# -- the program


def test_cache_ops_survive_torch_tensorrts_decompositions() -> None:
    program = adapter.lower_caches(exported(Model()))
    nodes = decomposed(program)
    cache = [node for node in nodes if node.target is FUNCTIONAL]
    assert [node.kwargs["layer"] for node in cache] == [0, 1]
    assert not [node for node in nodes if "functionalized" in str(node.target)]
    assert len(nodes[-1].args[0]) == 1  # no pool, which would be a copy
    users = [[str(user.args[1]) for user in node.users] for node in cache]
    assert users == [["0"], ["0"]]


def test_what_is_not_lowered_would_be_functionalised() -> None:
    nodes = decomposed(exported(Model()))
    assert [node for node in nodes if "functionalized" in str(node.target)]


def sources(node: Any) -> set[Any]:
    """What a value is computed from, itself too."""
    found = {node}
    for each in node.all_input_nodes:
        found |= sources(each)
    return found


def test_what_is_written_behind_a_store_becomes_a_new_value() -> None:
    nodes = adapter.lower_caches(exported(Scaled())).graph.nodes
    (op,) = (node for node in nodes if node.target is FUNCTIONAL)
    (product,) = (node for node in nodes if node.target is torch.ops.aten.mul.Tensor)
    given = arguments(UPDATE_AND_ATTEND, op)
    assert product in sources(given["q"])
    assert product not in sources(given["k"])


def test_a_program_without_pairs() -> None:
    with pytest.raises(UnsupportedError, match=r"torch-tensorrt: store_kv of layer 0: expected a"):
        adapter.lower_caches(exported(Unread()))
    with pytest.raises(UnsupportedError, match=r"expected pairs of kvgraph::store_kv .*, got 0"):
        adapter.lower_caches(exported(Plain()))


# -- the network


def test_every_layer_writes_the_graphs_pool_in_place(host: TorchTensorRT) -> None:
    adapter.register(["sm_80"])
    network = host.convert(adapter.lower_caches(exported(Model())))
    assert len(network.layers) == LAYERS
    for index, layer in enumerate(network.layers):
        names = ["pool", "offsets", "lengths", "table", "most"]
        assert [tensor.name for tensor in layer.inputs][1:6] == names
        assert len(layer.inputs) == 8  # q, pool, index tensors, k and v
        fields = {name: field.data for name, field in layer.plugin.items()}
        assert {name: fields[name].tolist() for name in ("inputs", "aliased", "pool_out")} == {
            "inputs": [0b11111111],
            "aliased": [0],
            "pool_out": [0],
        }
        assert fields["layer"].tolist() == [index]
        assert fields["scale"].dtype == np.float32
        assert {a.name for a in UPDATE_AND_ATTEND.attributes} < set(fields)


def test_images_travel_once_in_each_network(host: TorchTensorRT) -> None:
    converter = adapter.register(["sm_80", "sm_86"])
    program = adapter.lower_caches(exported(Model()))
    for _ in range(2):
        first, second = host.convert(program).layers
        record = bytes(first.plugin["kernels"].data)
        assert [arch.arch for arch in archs_of(record)] == [b"sm_80", b"sm_86"]
        images = bytes(first.plugin["images"].data)
        assert all(bytes.fromhex(digest) in images for digest in image_digests(record))
        assert second.plugin["images"].data.size == 0
        assert bytes(second.plugin["kernels"].data) == record
    assert len(converter.made) == 1  # both layers, and both networks


def test_rotary_and_quantised_operands_reach_the_kernels() -> None:
    pool = Tensor("pool", torch.zeros(3, 2, LAYERS, PAGE, KV_HEADS, 32, dtype=torch.int8))
    tensors = {
        "q": Tensor("q", torch.zeros(5, HEADS, 32)),
        "kv_blocks": pool,
        "cos_sin": Tensor("cos_sin", torch.zeros(64, 16)),
        "kv_scales": Tensor("scales", torch.zeros(3, 2, LAYERS, PAGE, KV_HEADS, 2)),
        "sinks": Tensor("sinks", torch.zeros(HEADS)),
    }
    given = adapter._bound([], {"layer": 0, "scale": 1.0, "rope_style": 1, "v_head_dim": 32})
    shape = adapter._shape(tensors, given)
    assert (shape.cache.granularity, shape.cache.pool_dtype) == (16, "int8")
    assert shape.cache.v_head_dim == 0  # the same as head_dim
    assert shape.rope is not None
    assert (shape.rope.rotary_dim, shape.rope.interleaved, shape.sinks) == (16, True, True)
    tensors["kv_scales"] = Tensor("scales", torch.zeros(3, 2, LAYERS, PAGE, KV_HEADS, 3))
    with pytest.raises(UnsupportedError, match="divides head_dim 32, got 3"):
        adapter._shape(tensors, given)
    tensors["q"].dtype.name = "INT64"
    with pytest.raises(UnsupportedError, match=r"q: expected one of \['FLOAT'.*got INT64"):
        adapter._shape(tensors, given)


# -- what is missing


def test_without_torch_tensorrt() -> None:
    if "torch_tensorrt" in sys.modules:
        pytest.skip("torch-tensorrt is installed")
    with pytest.raises(
        MissingDependencyError,
        match=r"torch_tensorrt: needed .*; pip install 'kvgraph\[torch-tensorrt]'",
    ):
        adapter.register(["sm_80"])


def test_without_tensorrt(host: TorchTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    with pytest.raises(MissingDependencyError, match=r"^tensorrt: needed for the torch-tensorrt"):
        adapter.register(["sm_80"])
    assert not host.converters


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_architectures_are_named(host: TorchTensorRT) -> None:
    with pytest.raises(UnsupportedError, match=r"archs: expected one or more .*'sm_89'"):
        adapter.register()
    assert not host.converters


def test_a_plugin_that_tensorrt_cannot_make(host: TorchTensorRT) -> None:
    converter = adapter.register(["sm_80"])
    converter.trt.refuses = True
    program = adapter.lower_caches(exported(Model()))
    with pytest.raises(UnsupportedError, match=r"update_and_attend.*cannot make its plugin"):
        host.convert(program)


def test_a_tensorrt_that_takes_plugins_from_onnx_alone(
    host: TorchTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    trt = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    with pytest.raises(
        UnsupportedError,
        match=r"expected a TensorRT whose INetworkDefinition has add_plugin_v3, got tensorrt_rtx "
        r"1\.\S+, which takes plugins from ONNX alone: pip install .* --backend tensorrt$",
    ):
        adapter.register(["sm_86"])
    assert not host.converters


def test_a_layer_without_kernels(host: TorchTensorRT) -> None:
    adapter.register(kernels={another_shape(): (b"", {})})
    with pytest.raises(UnsupportedError, match="expected a layer of which there are kernels, got"):
        host.convert(adapter.lower_caches(exported(Model())))


def another_shape() -> AttentionShape:
    """Of no layer here."""
    return AttentionShape(
        PoolShape("float32", "float32", KV_HEADS, WIDTH, PAGE, LAYERS), HEADS, 9.0
    )


def test_the_library_is_loaded_once(host: TorchTensorRT) -> None:
    libraries = adapter.register(["sm_80"]).trt.libraries
    adapter.register(["sm_80"])
    assert [path.rpartition("/")[2] for path in libraries] == ["libkvgraph_tensorrt.so"]


# -- the plugins themselves, in the registry of a TensorRT that installs without a GPU


def test_tensorrt_makes_the_plugins(host: TorchTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    rtx = pytest.importorskip("tensorrt_rtx", reason="tensorrt-rtx is not installed")
    trt = types.ModuleType("tensorrt")
    vars(trt).update(vars(rtx), INetworkDefinition=Network)
    monkeypatch.setitem(sys.modules, "tensorrt", trt)
    adapter.register(["sm_86"])
    network = host.convert(adapter.lower_caches(exported(Model())))
    assert [type(layer.plugin).__name__ for layer in network.layers] == ["IPluginV3"] * LAYERS
