"""Backend `onnx`: write a functional ONNX graph over `weights.safetensors`, for ONNX Runtime.

Decisions: opset 23 and IR 10 are the newest that ONNX Runtime 1.28 to 1.31 all support; package
onnx defaults to newer ones, which they refuse. Weights are external data by offset into the one
safetensors file. Metadata that the exporter leaves in nodes (stack traces with paths) is removed,
so that equal models give equal bytes.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

from kvgraph.compiler.export import lowering
from kvgraph.compiler.passes.label_kinds import MADE, SIZES
from kvgraph.compiler.passes.lists import PASSES, PassList, run_passes
from kvgraph.compiler.passes.parameters import tensor_of
from kvgraph.compiler.passes.token_functions import CASTS, LAYOUT, packet
from kvgraph.compiler.quiet import first_line, quiet_loggers
from kvgraph.compiler.sources import place
from kvgraph.compiler.targets import Lowered
from kvgraph.compiler.targets.core_aten import to_core_aten
from kvgraph.compiler.targets.onnx_constants import kept_constants
from kvgraph.compiler.targets.onnx_transposes import transposed_later
from kvgraph.compiler.targets.weights import write_safetensors
from kvgraph.compiler.traced import Traced
from kvgraph.compiler.weights import Weights
from kvgraph.contract.file_names import ONNX_NAME, WEIGHTS_NAME
from kvgraph.contract.safetensors import read_layout
from kvgraph.contract.signature import GraphSignature, output_name
from kvgraph.errors import KVGraphError, UnsupportedError
from kvgraph.ops import OPSET_DOMAIN
from kvgraph.ops.onnx_ops import translation_table
from kvgraph.signal_handlers import reraise_if_signalled

OPSET, IR_VERSION = 23, 10
aten = torch.ops.aten
ON_BFLOAT16 = {*CASTS, *LAYOUT, *MADE, *SIZES, aten.embedding} - {
    *(aten.expand, aten.repeat, aten.repeat_interleave),
}
"""Operators on bfloat16 that ONNX Runtime has CPU kernels for."""
INLINE_BYTES = 1024
"""Most bytes of an initializer that stays in the graph: shapes, axes, small tables."""
INLINE_BYTES_OF_RANKS = 64
"""Most bytes of an initializer in a graph that ranks share: shapes and axes, which are equal."""


def lower(
    traced: Traced,
    folder: Path,
    *,
    weight_bits: int | None = None,
) -> Lowered:
    """Write `model.onnx` and `weights.safetensors` into `folder`.

    `weight_bits`: bits of packed weights (16, 8, 4 or AS_STORED); None: the model's dtype.
    UnsupportedError: an operator computes in bfloat16, or ONNX's checker refuses the graph that
    torch's exporter made.
    """
    _require_float32(traced.program)
    traced.bits = weight_bits
    lowered, _ = write(traced, folder, PASSES["cpu", "onnx"])
    require_valid(folder)
    return lowered


def _require_float32(program: ExportedProgram) -> None:
    """Raise UnsupportedError for an operator on bfloat16 that ONNX Runtime has no CPU kernel for:
    all but casts, and operators that only move elements."""
    for node in program.graph.nodes:
        if not isinstance(node.target, OpOverload) or node.target.namespace != "aten":
            continue
        made = node.meta.get("val")
        values = tree_leaves([made, *(x.meta.get("val") for x in node.all_input_nodes)])
        on_halves = any(isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 for x in values)
        if on_halves and made is not None and packet(node) not in ON_BFLOAT16:
            raise UnsupportedError(
                f"{place(node)}: expected float32 for backend onnx on cpu, got an operator on "
                "bfloat16; compute in float32, or give backend 'torch'"
            )


def write(traced: Traced, folder: Path, passes: PassList) -> tuple[Lowered, ir.Model]:
    """Run `passes`, then write `model.onnx` and `weights.safetensors`.

    Return the graph too, as it was written.
    """
    run_passes(traced, passes.program)
    onnx_model, weights = _translate(_core_aten(traced), traced.signature, traced.weights)
    traced.onnx_model = onnx_model
    traced.changed("to_onnx")
    run_passes(traced, passes.onnx)
    _clean(onnx_model)
    if traced.plan.params.n_shards == 1:
        _save(onnx_model, folder, weights, INLINE_BYTES, frozenset())
    else:
        own = _rank_names(traced.program)
        _save(onnx_model, folder, weights, INLINE_BYTES_OF_RANKS, own)
    counts = Counter(_op_name(node) for node in onnx_model.graph)
    lowered = Lowered(
        ops=dict(sorted(counts.items())),
        passes=traced.passes,
    )
    return lowered, onnx_model


def _core_aten(traced: Traced) -> ExportedProgram:
    """The program in core ATen. UnsupportedError if torch's decompositions fail on it."""
    try:
        return to_core_aten(traced.program)
    except KVGraphError:
        raise
    except Exception as error:
        reraise_if_signalled(error)
        raise UnsupportedError(
            f"architecture {traced.model.architecture!r}: torch cannot make core ATen of its "
            f"operators: {first_line(error)}; backend torch may take them"
        ) from error


def _translate(
    program: ExportedProgram, signature: GraphSignature, weights: Weights
) -> tuple[ir.Model, Weights]:
    """The graph, and the sources of its weights, some of which it has transposed."""
    try:
        with _decomposed(program):
            translated = _to_onnx(program, signature)
    except torch.onnx.OnnxExporterError:  # the exporter must decompose some core ATen operators
        translated = _to_onnx(program, signature)
    for name, value in translated.model.graph.initializers.items():
        if weights.has(name):
            value.const_value = _later(value, weights)
    weights = transposed_later(translated.model, weights)
    try:
        with kept_constants(translated.model):
            translated.optimize()
    except ir.passes.PassError as error:  # a weight that the optimiser read may be damaged
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KVGraphError):
            cause = cause.__cause__
        raise cause or error from error
    model = translated.model
    model.ir_version = IR_VERSION
    _name_dims(model, signature)
    _name_weights(model, program)
    return model, weights


@contextlib.contextmanager
def _decomposed(program: ExportedProgram) -> Iterator[None]:
    """Make the exporter take the program as it is. Its own decomposition would trace the whole
    program once more, which takes a quarter of a compile."""
    program.run_decompositions = lambda table: program
    try:
        yield
    finally:
        del program.run_decompositions


def _later(value: ir.Value, weights: Weights) -> ir.LazyTensor:
    """A lazy weight: it is read, or made, only if a pass reads its numbers."""
    tensor, name = value.const_value, value.name
    assert tensor is not None
    assert name is not None
    shape, dtype = tensor.shape.numpy(), ir.tensor_adapters.to_torch_dtype(tensor.dtype)

    def read() -> ir.TensorProtocol:
        return ir.tensor_adapters.TorchTensor(weights.read(name, dtype, shape), name=name)

    return ir.LazyTensor(read, dtype=tensor.dtype, shape=ir.Shape(shape), name=name)


def _to_onnx(program: ExportedProgram, signature: GraphSignature) -> torch.onnx.ONNXProgram:
    with lowering(), quiet_loggers("torch.onnx"):  # it reports optional packages as missing
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            optimize=False,  # `_translate` does it, once weights are lazy
            opset_version=OPSET,
            verbose=False,
            custom_translation_table=translation_table(),
            input_names=[s.name for s in signature.inputs],
            output_names=[output_name(s) for s in signature.outputs],
        )
    assert onnx_program is not None
    return onnx_program


def _name_dims(model: ir.Model, signature: GraphSignature) -> None:
    """Replace torch's symbols in shapes of the graph by the signature's names of dims."""
    names: dict[str, str] = {}
    for value, symbol in zip(model.graph.inputs, signature.inputs, strict=True):
        assert value.shape is not None
        for found, dim in zip(value.shape, symbol.shape, strict=True):
            if isinstance(dim, str):
                names[str(found)] = dim
    for node in model.graph:
        for value in node.outputs:
            if value.shape is not None:
                value.shape = ir.Shape(
                    [d if isinstance(d, int) else names.get(str(d)) for d in value.shape]
                )
    for value, symbol in zip(model.graph.inputs, signature.inputs, strict=True):
        value.shape = ir.Shape(symbol.shape)
    for value, symbol in zip(model.graph.outputs, signature.outputs, strict=True):
        value.shape = ir.Shape(symbol.shape)


def _name_weights(model: ir.Model, program: ExportedProgram) -> None:
    """Give initializers that the exporter transposed ahead of time their parameters' names."""
    parameters = program.graph_signature.inputs_to_parameters
    for node in program.graph.nodes:
        source = node.args[0] if node.args else None
        name = parameters.get(getattr(source, "name", ""))
        value = model.graph.initializers.get(node.name)
        if name and value is not None and name not in model.graph.initializers:
            value.name = name


def _clean(model: ir.Model) -> None:
    for node in model.graph:
        while node.domain == OPSET_DOMAIN and _is_idle(node.outputs[-1]):
            node.resize_outputs(len(node.outputs) - 1)  # kv_scales_out of an unquantised pool
    ir.passes.Sequential(
        common.CommonSubexpressionEliminationPass(),
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedOpsetsPass(),
        common.ClearMetadataAndDocStringPass(),
    )(model)
    for value in [*model.graph.inputs, *model.graph.outputs, *model.graph.initializers.values()]:
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    model.producer_name, model.producer_version = "kvgraph", None


def _is_idle(value: ir.Value) -> bool:
    return not (value.uses() or value.is_graph_output())


def _rank_names(program: ExportedProgram) -> frozenset[str]:
    """Names of parameters and buffers. Their values may differ between ranks, and ranks share
    the graph, so they must not be in it."""
    signature = program.graph_signature
    return frozenset([*signature.parameters, *signature.buffers])


def _save(model: ir.Model, folder: Path, weights: Weights, most: int, own: Set[str]) -> None:
    """Write the graph and its weights. Initializers of up to `most` bytes stay in the graph, except
    those named in `own`."""
    large = {
        name: value
        for name, value in sorted(model.graph.initializers.items())
        if value.const_value is not None and (value.const_value.nbytes > most or name in own)
    }
    path = folder / WEIGHTS_NAME
    write_safetensors(path, {n: _tensor(v, weights) for n, v in large.items()}, {}, weights)
    layout = read_layout(path)
    for name, value in large.items():
        tensor = value.const_value
        assert tensor is not None
        value.const_value = ir.ExternalTensor(
            WEIGHTS_NAME,
            layout[name].offset,
            tensor.nbytes,
            tensor.dtype,
            shape=tensor.shape,  # type: ignore[arg-type]
            name=name,
            base_dir=folder,
        )
    ir.save(model, folder / ONNX_NAME)


def require_valid(folder: Path) -> None:
    """Raise UnsupportedError if ONNX's checker refuses the graph: types, shapes or operators."""
    try:
        onnx.checker.check_model(str(folder / ONNX_NAME), full_check=True)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        raise UnsupportedError(
            f"{ONNX_NAME}: expected a graph that ONNX's checker accepts, "
            f"got one that it refuses: {first_line(error)}"
        ) from error


def _tensor(value: ir.Value, weights: Weights) -> torch.Tensor:
    """An initializer as a tensor; if `weights` provides it later, a meta tensor of its shape and
    dtype."""
    tensor = value.const_value
    assert tensor is not None
    if isinstance(tensor, ir.LazyTensor) and weights.has(str(value.name)):
        dtype = ir.tensor_adapters.to_torch_dtype(tensor.dtype)
        return torch.empty(tensor.shape.numpy(), dtype=dtype, device="meta")
    return tensor_of(np.ascontiguousarray(tensor.numpy()))


def _op_name(node: ir.Node) -> str:
    return f"{node.domain}.{node.op_type}" if node.domain else node.op_type
