"""The process that builds a TensorRT engine: `python -m` this module, with a file as argument.

It is a separate process, because TensorRT's parser aborts on some errors. The file is a
BuildRequest as JSON. The process writes the engine, and a Result next to the request; its log goes
to stderr.

Nodes of domain kvgraph are rewritten before parsing. A plugin's node cannot leave out an operand in
the middle, so a field lists the given operands. Kernels and images become fields too.
"""

from __future__ import annotations

import json
import sys
from base64 import b64decode
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from kvgraph.contract.file_names import PLUGINS_NAME
from kvgraph.errors import KVGraphError, UnsupportedError
from kvgraph.kernels.record import new_images, pack_images
from kvgraph.ops import OPSET_DOMAIN, SPECS, OpSpec

if TYPE_CHECKING:
    from onnx import GraphProto, NodeProto
    from tensorrt_rtx import Builder, IBuilderConfig, ILogger

Shapes = Mapping[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class BuildRequest:
    """The engine to build.

    `archs`: GPU architectures; empty: a portable engine. `profiles`: input -> (min, opt, max)
    shapes, in order. `aliased`: declare each layer's pool output as an alias of its input; else all
    layers read the graph's pool, and only the last one returns it.
    """

    module: str
    model: str
    kernels: str
    library: str
    engine: str
    archs: list[str]
    profiles: list[Shapes]
    aliased: bool = True
    verbose: bool = False


@dataclass(frozen=True)
class Result:
    """The engine that was built: TensorRT's version, and inputs and outputs in order with their
    dims (-1 is dynamic)."""

    version: str
    inputs: dict[str, list[int]]
    outputs: dict[str, list[int]]


Asked = TypeVar("Asked")


def main(path: str) -> int:
    return answer(path, BuildRequest, build)


def answer(path: str, kind: type[Asked], make: Callable[[Asked], object]) -> int:
    """Read the request at `path`, call `make`, and write its result or refusal next to the request.

    Return the process's exit code: 1 for a refusal, else 0.
    """
    request = kind(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        found: dict[str, object] = asdict(make(request))  # type: ignore[call-overload]
    except KVGraphError as error:
        found = {"refused": str(error)}
    Path(path).with_suffix(".result").write_text(json.dumps(found), encoding="utf-8")
    return int("refused" in found)


def build(request: BuildRequest) -> Result:
    """Build and write the engine. UnsupportedError with the message of the parser or builder."""
    trt = import_module(request.module)
    said = Log.of(trt, request.verbose)
    builder = trt.Builder(said)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    if not builder.get_plugin_registry().load_library(request.library):
        raise UnsupportedError(f"{request.library}: TensorRT cannot load it: {said.last()}")
    parser = trt.OnnxParser(network, said)
    if not parser.parse(plugin_model(request), request.model):
        raise UnsupportedError(f"{request.model}: TensorRT refuses it: {said.refusal(request)}")
    config = _config(trt, builder, request)
    engine = builder.build_serialized_network(network, config)
    if engine is None:
        raise UnsupportedError(
            f"{request.model}: TensorRT cannot build it: {said.refusal(request)}"
        )
    Path(request.engine).write_bytes(engine)
    inputs = (network.get_input(i) for i in range(network.num_inputs))
    outputs = (network.get_output(i) for i in range(network.num_outputs))
    return Result(
        trt.__version__,
        {t.name: list(t.shape) for t in inputs},
        {t.name: list(t.shape) for t in outputs},
    )


def _config(trt: ModuleType, builder: Builder, request: BuildRequest) -> IBuilderConfig:
    config = builder.create_builder_config()
    if request.archs:
        config.num_compute_capabilities = len(request.archs)
        for index, arch in enumerate(request.archs):
            capability = getattr(trt.ComputeCapability, arch.replace("sm_", "SM"))
            config.set_compute_capability(capability, index)
    if request.aliased:
        config.set_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03, True)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # needed for CUDA graph capture
    if request.verbose:
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
    for shapes in request.profiles:
        profile = builder.create_optimization_profile()
        for name, (low, mid, high) in shapes.items():
            profile.set_shape(name, low, mid, high)
        if config.add_optimization_profile(profile) < 0:
            raise UnsupportedError(f"profile: TensorRT refuses it: {dict(shapes)}")
    return config


class Log:
    """TensorRT's log: errors are kept, and written to stderr; with `verbose`, all messages are
    written."""

    errors: list[str]

    @staticmethod
    def of(trt: Any, verbose: bool) -> Any:
        least = trt.ILogger.VERBOSE if verbose else trt.ILogger.ERROR

        class Logger(trt.ILogger, Log):  # type: ignore[misc]
            def __init__(self) -> None:
                trt.ILogger.__init__(self)
                self.errors = []

            def log(self, severity: ILogger.Severity, message: str) -> None:
                if severity <= trt.ILogger.ERROR:
                    self.errors.append(message)
                if severity <= least:
                    print(message, file=sys.stderr)

        return Logger()

    def last(self) -> str:
        return self.errors[-1].splitlines()[0] if self.errors else "nothing said"

    def refusal(self, request: BuildRequest) -> str:
        """The reason for a failure: the plugin's message, or else the first error that is not about
        a missing GPU."""
        return plugin_message(request.library) or next(
            (e.splitlines()[0] for e in self.errors if "Cuda Runtime" not in e), "nothing said"
        )


def plugin_message(library: str) -> str:
    """The last error message of a plugin in this process; "" if there is none."""
    import ctypes

    message = ctypes.create_string_buffer(512)
    ctypes.CDLL(library).kvg_tensorrt_message(message, ctypes.c_size_t(len(message)))
    return message.value.decode(errors="replace")


# ---- the model with plugin nodes ---------------------------------------------------------------


def plugin_model(request: BuildRequest) -> bytes:
    """The serialized model with plugin nodes."""
    import onnx

    model = onnx.load(request.model, load_external_data=False)
    folder = Path(request.kernels)
    described = json.loads((folder / PLUGINS_NAME).read_text(encoding="utf-8"))
    graph = model.graph
    heads = _pool_heads(graph) if not request.aliased else {}
    carried: set[str] = set()
    for node in graph.node:
        if node.domain != OPSET_DOMAIN:
            continue
        if node.output[0] not in described["nodes"]:
            raise UnsupportedError(
                f"{folder / PLUGINS_NAME}: expected kernels for node {node.output[0]!r}, got none"
            )
        record = b64decode(described["kernels"][described["nodes"][node.output[0]]])
        new = new_images(record, carried)
        images = pack_images((folder / described["images"][digest]).read_bytes() for digest in new)
        _set(node, kernels=record, images=images)
        _as_plugin(node, request.aliased, heads, {o.name for o in graph.output})
    data: bytes = model.SerializeToString()
    return data


def _as_plugin(node: NodeProto, aliased: bool, heads: Mapping[str, str], results: set[str]) -> None:
    spec = next(spec for spec in SPECS if spec.name == node.op_type)
    given = list(node.input) + [""] * (len(spec.inputs) - len(node.input))
    _defaults(node, spec)
    inputs = sum(1 << i for i, name in enumerate(given) if name)
    handed_on = [name for name in node.output[len(spec.results) :] if name]
    last = any(name in results for name in handed_on)
    _set(node, inputs=inputs, aliased=int(aliased), pool_out=int(aliased or last))
    del node.input[:]
    node.input.extend(heads.get(name, name) for name in given if name)
    if not aliased and not last:
        del node.output[len(spec.results) :]


def _defaults(node: NodeProto, spec: OpSpec) -> None:
    given = {attribute.name for attribute in node.attribute}
    _set(node, **{a.name: a.default for a in spec.attributes if a.name not in given})


def _set(node: NodeProto, **attributes: object) -> None:
    import onnx

    node.attribute.extend(onnx.helper.make_attribute(n, value) for n, value in attributes.items())


def _pool_heads(graph: GraphProto) -> dict[str, str]:
    """Name of a buffer that a layer returns -> name of the graph's input that it is a state of."""
    heads: dict[str, str] = {}
    for node in graph.node:
        if node.domain != OPSET_DOMAIN:
            continue
        spec = next(spec for spec in SPECS if spec.name == node.op_type)
        names = [operand.name for operand in spec.inputs]
        for output, name in zip(spec.outputs, node.output, strict=False):
            if output.alias and name:
                given = node.input[names.index(output.alias)]
                heads[name] = heads.get(given, given)
    return heads


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
