"""Parameters and outputs of an exported program: its signature follows its graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from kvgraph.compiler import gpu_weights
from kvgraph.compiler.packed_weights import OPERANDS, Packed, Stored
from kvgraph.compiler.passes.operands import value
from kvgraph.compiler.values import Coded, parts_of
from kvgraph.compiler.weights import Piece, Weights
from kvgraph.contract.dims import Array
from kvgraph.ops.torch_arrays import tensor_over

PARAMETERS = {"weight": "packed", "bias": "packed_bias"}
"""Operands of a packed layer that have other names as its parameters."""

HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def held(program: ExportedProgram, node: object) -> tuple[str, torch.Tensor] | None:
    """Name and tensor of a weight, or None for any other node."""
    for spec in program.graph_signature.input_specs:
        if isinstance(node, Node) and spec.arg.name == node.name and spec.kind in HELD:
            assert spec.target is not None
            found = program.state_dict.get(spec.target, program.constants.get(spec.target))
            return (spec.target, found) if isinstance(found, torch.Tensor) else None
    return None


def add_parameter(
    program: ExportedProgram, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Node:
    """A placeholder before all others for a new parameter `name`, which has no values yet."""
    first = next(node for node in program.graph.nodes if node.op == "placeholder")
    mode = value(next(n for n in program.graph.nodes if "val" in n.meta and _is_fake(n))).fake_mode  # type: ignore[attr-defined]
    with program.graph.inserting_before(first):
        node: Node = program.graph.placeholder("p_" + name.replace(".", "_"))
    with mode:
        node.meta["val"] = torch.empty(shape, dtype=dtype)
    program.graph_signature.input_specs.insert(
        0, InputSpec(InputKind.PARAMETER, TensorArgument(node.name), name)
    )
    program.state_dict[name] = torch.nn.Parameter(node.meta["val"], requires_grad=False)
    return node


def add_buffer(program: ExportedProgram, name: str, tensor: torch.Tensor) -> Node:
    """A persistent buffer `name` of `program`, behind those that it has: it is stored by name with
    the weights, and bound when they are."""
    specs = program.graph_signature.input_specs
    held = (InputKind.PARAMETER, InputKind.BUFFER)
    index = next(i for i, spec in enumerate(specs) if spec.kind not in held)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    mode = next(v.fake_mode for n in placeholders if hasattr(v := n.meta["val"], "fake_mode"))
    with program.graph.inserting_before(placeholders[index]):
        node: Node = program.graph.placeholder(f"b_{name.replace('.', '_')}")
    node.meta["val"] = mode.from_tensor(tensor, static_shapes=True)
    argument = TensorArgument(name=node.name)
    specs.insert(index, InputSpec(InputKind.BUFFER, argument, name, persistent=True))
    program.state_dict[name] = tensor
    return node


def add_packed(
    program: ExportedProgram,
    weights: Weights,
    stem: str,
    of: Hashable,
    forms: Mapping[str, tuple[tuple[int, ...], str]],
    make: Callable[[], Iterable[Packed]],
) -> list[Node | None]:
    """weight, scales, bytes of groups and bias as new parameters `stem.packed` etc., of `forms`.

    `make` gives their parts when they are written. A layer that a model calls again has those of
    the first call: `of` says what they are made of.
    """

    def parts() -> Iterator[dict[str, torch.Tensor]]:
        for part in make():
            yield {operand: tensor_of(getattr(part, operand)) for operand in forms}

    typed = {name: (shape, getattr(torch, dtype)) for name, (shape, dtype) in forms.items()}
    made = _add_made(program, weights, stem, of, typed, parts)
    return [made.get(operand) for operand in OPERANDS]


def add_matrix(
    program: ExportedProgram,
    weights: Weights,
    stem: str,
    of: Hashable,
    forms: Mapping[str, gpu_weights.Shaped],
    make: Callable[[], Iterable[gpu_weights.Part]],
) -> list[Node | None]:
    """weight, scales, bytes of groups and bias as new parameters, as `add_packed` names them."""
    made = _add_made(program, weights, stem, of, forms, make)
    return [made.get(operand) for operand in gpu_weights.OPERANDS]


def _add_made(
    program: ExportedProgram,
    weights: Weights,
    stem: str,
    of: Hashable,
    forms: Mapping[str, gpu_weights.Shaped],
    parts: Callable[[], Iterable[Mapping[str, torch.Tensor]]],
) -> dict[str, Node]:
    if (known := weights.placeholders.get(of)) is not None:
        return known
    while f"{stem}.{PARAMETERS['weight']}" in program.state_dict:  # it begins another node's layers
        stem += "_again"
    names = {operand: f"{stem}.{PARAMETERS.get(operand, operand)}" for operand in forms}

    def pieces() -> Iterator[Piece]:
        for part in parts():
            for operand, tensor in part.items():
                yield names[operand], tensor

    weights.later(names.values(), pieces)
    found = {operand: add_parameter(program, names[operand], *forms[operand]) for operand in forms}
    weights.placeholders[of] = found
    return found


def array_of(tensor: torch.Tensor) -> Array:
    """A weight in float32, as it is packed."""
    array: Array = tensor.float().numpy()
    return array


def stored_of(coded: Coded) -> Stored:
    """Rows of a checkpoint, as they are packed."""
    return Stored(**{name: part.numpy() for name, part in parts_of(coded)})


def tensor_of(array: Array) -> torch.Tensor:
    """`array`'s memory as a tensor, bfloat16 of ml_dtypes included."""
    return tensor_over(array, array.dtype.name)


def drop_unused(program: ExportedProgram) -> None:
    """Drop the parameters that no node reads any more."""
    specs = program.graph_signature.input_specs
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in [s for s in specs if s.kind is InputKind.PARAMETER]:
        if not nodes[spec.arg.name].users:
            program.graph.erase_node(nodes[spec.arg.name])
            specs.remove(spec)
            assert spec.target is not None
            program.state_dict.pop(spec.target, None)


def name_outputs(program: ExportedProgram) -> None:
    """Name the results that the graph returns now in the program's signature."""
    results = program.graph.output_node().args[0]
    assert isinstance(results, tuple)
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        spec.arg = TensorArgument(name=node.name)


def _is_fake(node: Node) -> bool:
    return hasattr(node.meta["val"], "fake_mode")
