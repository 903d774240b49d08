"""A TensorRT runtime on a machine that has none, over a fake driver, strict where the real one is.

An engine runs its model through onnx's reference evaluator, at the very addresses that it was
given: nothing reaches it but through them. Names are those of `tensorrt_rtx`.
"""

from __future__ import annotations

import enum
import json
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops.onnx_ops import reference_ops
from tests.runtime.fake_cuda import POISON, FakeDriver


class DataType(enum.Enum):
    FLOAT = "float32"
    HALF = "float16"
    BF16 = "bfloat16"
    INT8 = "int8"
    FP8 = "float8_e4m3fn"
    INT32 = "int32"


class TensorIOMode(enum.Enum):
    INPUT = 1
    OUTPUT = 2


class TensorLocation(enum.Enum):
    DEVICE = 0
    HOST = 1


class TensorFormat(enum.Enum):
    LINEAR = 0
    CHW32 = 5


class ExecutionContextAllocationStrategy(enum.Enum):
    STATIC = 0
    USER_MANAGED = 2


class DynamicShapesKernelSpecializationStrategy(enum.Enum):
    LAZY = 0
    EAGER = 1


class Severity(enum.Enum):
    INTERNAL_ERROR = 0
    ERROR = 1
    INFO = 3


class ILogger:
    Severity = Severity

    def __init__(self) -> None:
        pass


SCRATCH = (4096, 16384)
"""Bytes that the two profiles' contexts need."""


class FakeTensorRT(types.ModuleType):
    """The module. `driver` is the fake device; `options` change what an engine says of itself, or
    under `engine` are all of it, whatever its bytes."""

    __version__ = "1.7.1.116"
    DataType, TensorIOMode, TensorLocation = DataType, TensorIOMode, TensorLocation
    TensorFormat, ILogger = TensorFormat, ILogger
    ExecutionContextAllocationStrategy = ExecutionContextAllocationStrategy
    DynamicShapesKernelSpecializationStrategy = DynamicShapesKernelSpecializationStrategy

    def __init__(self, driver: FakeDriver, **options: Any) -> None:
        super().__init__("tensorrt_rtx")
        self.driver, self.options = driver, options
        self.engines: list[FakeEngine] = []
        self.libraries: list[str] = []

    def Runtime(self, logger: Any) -> FakeRuntime:
        return FakeRuntime(self, logger)


class FakeRuntime:
    engine_host_code_allowed = False

    def __init__(self, trt: FakeTensorRT, logger: Any) -> None:
        self.trt, self.logger = trt, logger

    def get_plugin_registry(self) -> Any:
        def load_library(plugin_path: str) -> object | None:
            self.trt.libraries.append(plugin_path)
            if "plugins" in self.trt.options:
                self.logger.log(Severity.ERROR, self.trt.options["plugins"])
                return None
            return object()

        return types.SimpleNamespace(load_library=load_library, all_creators_recursive=[])

    def deserialize_cuda_engine(self, serialized_engine: Any) -> FakeEngine | None:
        if not (self.engine_host_code_allowed or self.trt.libraries):
            self.logger.log(Severity.ERROR, "no plugin creator for update_and_attend")
            return None
        try:
            described = self.trt.options.get("engine") or json.loads(bytes(serialized_engine))
        except ValueError:
            self.logger.log(Severity.INFO, "Loaded engine size: 0 MiB")
            self.logger.log(Severity.ERROR, "magicTag does not match")
            self.logger.log(Severity.ERROR, "[checkMacros.cpp::catchCudaError::250] Error Code 1")
            return None
        engine = FakeEngine(self.trt, self.logger, described | self.trt.options)
        self.trt.engines.append(engine)
        return engine


class FakeEngine:
    """What a builder made of `described["onnx"]`: dims and dtypes are read from that graph."""

    def __init__(self, trt: FakeTensorRT, logger: Any, described: dict[str, Any]) -> None:
        self.trt, self.logger, self.described = trt, logger, described
        path = Path(described["onnx"])
        graph = onnx.load(path, load_external_data=False).graph
        self.inputs = {v.name: _tensor_type(v) for v in graph.input}
        self.outputs = {v.name: _tensor_type(v) for v in graph.output}
        self.evaluator = ReferenceEvaluator(str(path), new_ops=reference_ops())
        self.contexts: list[FakeContext] = []
        self.profiles: list[dict[str, dict[str, int]]] = described["profiles"]
        self.num_optimization_profiles = len(self.profiles)
        self.names = [n for n in (*self.inputs, *self.outputs) if n != described.get("without")]
        self.num_io_tensors = len(self.names)

    def _said(self, what: str, name: str, default: Any) -> Any:
        return self.described.get(what, {}).get(name, default)

    def get_tensor_name(self, index: int) -> str:
        return self.names[index]

    def get_tensor_mode(self, name: str) -> TensorIOMode:
        return TensorIOMode.INPUT if name in self.inputs else TensorIOMode.OUTPUT

    def get_tensor_dtype(self, name: str) -> DataType:
        return DataType(self._said("dtypes", name, self._type(name)[0]))

    def get_tensor_format(self, name: str) -> TensorFormat:
        return TensorFormat(self._said("formats", name, 0))

    def get_tensor_location(self, name: str) -> TensorLocation:
        return TensorLocation(int(name in self.described.get("hosted", [])))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        dims = self._said("dims", name, self._type(name)[1])
        return tuple(d if isinstance(d, int) else -1 for d in dims)

    def get_aliased_input_tensor(self, name: str) -> str | None:
        said: str | None = self._said("aliases", name, None)
        return said

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        sizes = self.profiles[profile_index]
        dims = self._type(name)[1]
        return [tuple(_extent(d, sizes[end]) for d in dims) for end in ("min", "opt", "max")]

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        return SCRATCH[profile_index]

    def create_runtime_config(self) -> Any:
        config = types.SimpleNamespace(
            strategy=None,
            dynamic_shapes_kernel_specialization_strategy=(
                DynamicShapesKernelSpecializationStrategy.LAZY
            ),
        )
        config.set_execution_context_allocation_strategy = lambda strategy: setattr(
            config, "strategy", strategy
        )
        return config

    def create_execution_context(self, runtime_config: Any) -> FakeContext:
        assert runtime_config.strategy is ExecutionContextAllocationStrategy.USER_MANAGED
        strategy = runtime_config.dynamic_shapes_kernel_specialization_strategy
        kind = FakeContext if self.described.get("enterprise") else RtxContext
        context = kind(self, strategy is DynamicShapesKernelSpecializationStrategy.EAGER)
        self.contexts.append(context)
        return context

    def _type(self, name: str) -> tuple[str, list[int | str]]:
        return (self.inputs | self.outputs)[name]


class FakeContext:
    """Shapes, addresses and memory of one engine's runs; `state` counts changes of them."""

    def __init__(self, engine: FakeEngine, eager: bool) -> None:
        self.eager = eager
        self.engine, self.driver = engine, engine.trt.driver
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.profile = -1
        self.memory = (0, 0)
        self.state, self.ran = 0, -1
        self.most_tokens = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        assert stream_handle == FakeDriver.STREAM
        self.profile = profile_index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        self.driver.view(self.driver.device, memory, size)
        self.memory = (memory, size)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        low, _, high = self.engine.get_tensor_profile_shape(name, self.profile)
        inside = all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        if not inside:
            self.engine.logger.log(Severity.ERROR, f"{name} {shape} is not in {low}..{high}")
            return False
        self.state += self.shapes.get(name) != shape
        self.shapes[name] = shape
        if name == next(iter(self.engine.inputs)):
            self.most_tokens = max(self.most_tokens, *shape)
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.state += self.addresses.get(name) != memory
        self.addresses[name] = memory
        return True

    def infer_shapes(self) -> list[str]:
        return [name for name in self.engine.inputs if name not in self.shapes]

    def execute_async_v3(self, stream_handle: int) -> bool:
        assert stream_handle == FakeDriver.STREAM
        assert self.memory[1] >= SCRATCH[self.profile]
        if "fails" in self.engine.described:
            self.engine.logger.log(Severity.ERROR, self.engine.described["fails"])
            return False
        capturing = self.driver.captured is not None
        if capturing and not self.engine.described.get("capturable", True):
            assert not isinstance(self, RtxContext), "captured although it says that it cannot be"
            self.engine.logger.log(
                Severity.ERROR, "operation not permitted when stream is capturing"
            )
            return False
        assert not capturing or self.ran == self.state, "captured before a run of these shapes"
        assert not capturing or self.eager, "captured kernels that stand in for others"
        self.ran = state = self.state
        baked = {n: self._array(n).copy() for n in self.engine.described.get("hosted", [])}

        def work() -> None:
            assert self.state == state, "the context was changed under a graph"
            self._compute(baked)

        self.driver.enqueue(work)
        return True

    def _compute(self, baked: dict[str, Any]) -> None:
        engine = self.engine
        feeds = {
            name: baked[name] if name in baked else self._array(name) for name in engine.inputs
        }
        first, *buffers = engine.outputs
        for name in buffers:
            assert self.addresses[name] == self.addresses[name.removesuffix("_out")]
        self.driver.view(self.driver.device, *self.memory).fill(POISON)
        logits = engine.evaluator.run([first], feeds)[0]
        raw = np.ascontiguousarray(logits).view(np.uint8).reshape(-1)
        self.driver.view(self.driver.device, self.addresses[first], len(raw))[:] = raw

    def _array(self, name: str) -> Any:
        dtype = DTYPES[self.engine.inputs[name][0]].numpy
        hosted = name in self.engine.described.get("hosted", [])
        where = self.driver.pinned if hosted else self.driver.device
        count = int(np.prod(self.shapes[name]))
        raw = self.driver.view(where, self.addresses[name], count * dtype.itemsize)
        return raw.view(dtype).reshape(self.shapes[name])


def _tensor_type(value: onnx.ValueInfoProto) -> tuple[str, list[int | str]]:
    tensor = value.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return str(dtype), [d.dim_param or d.dim_value for d in tensor.shape.dim]


def _extent(dim: int | str, sizes: dict[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    name, _, offset = dim.partition(" + ")
    return sizes[name] + int(offset or 0)


class RtxContext(FakeContext):
    """What TensorRT-RTX has and TensorRT has not."""

    def is_stream_capturable(self, stream: int) -> bool:
        return bool(self.engine.described.get("capturable", True))
