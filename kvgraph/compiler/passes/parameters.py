"""Change parameters and outputs of an exported program, in its graph and its signature."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument
from torch.fx import Node

from kvgraph.compiler import gpu_weights
from kvgraph.compiler.packed_weights import OPERANDS, Packed, StoredRows
from kvgraph.compiler.values import Coded, parts_of
from kvgraph.compiler.weights import Piece, Weights
from kvgraph.contract.dims import Array, TensorType
from kvgraph.contract.signature import GraphSignature
from kvgraph.ops.torch_arrays import tensor_over

PARAMETERS = {"weight": "packed", "bias": "packed_bias"}
"""Operand of a packed layer -> name of its parameter, if they differ."""

HELD = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def held(program: ExportedProgram, node: object) -> tuple[str, torch.Tensor] | None:
    """Name and tensor of a parameter, buffer or constant; None for any other node."""
    for spec in program.graph_signature.input_specs:
        if isinstance(node, Node) and spec.arg.name == node.name and spec.kind in HELD:
            assert spec.target is not None
            found = program.state_dict.get(spec.target, program.constants.get(spec.target))
            return (spec.target, found) if isinstance(found, torch.Tensor) else None
    return None


def inputs_of(program: ExportedProgram, signature: GraphSignature) -> dict[Node, TensorType]:
    """The program's inputs and their symbols, in the signature's order."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    users = program.graph_signature.user_inputs
    return {nodes[str(u)]: s for u, s in zip(users, signature.inputs, strict=True)}


def add_parameter(
    program: ExportedProgram, name: str, shape: Sequence[int], dtype: torch.dtype
) -> Node:
    """Add a parameter `name` without values. Return its placeholder, the first of the graph."""
    first = next(node for node in program.graph.nodes if node.op == "placeholder")
    with program.graph.inserting_before(first):
        node: Node = program.graph.placeholder("p_" + name.replace(".", "_"))
    with _mode(program):
        node.meta["val"] = torch.empty(shape, dtype=dtype)
    program.graph_signature.input_specs.insert(
        0, InputSpec(InputKind.PARAMETER, TensorArgument(node.name), name)
    )
    program.state_dict[name] = torch.nn.Parameter(node.meta["val"], requires_grad=False)
    return node


def add_buffer(program: ExportedProgram, name: str, tensor: torch.Tensor) -> Node:
    """Add a persistent buffer `name` after the existing ones. Return its placeholder.

    It is stored with the weights by its name, and bound together with them.
    """
    specs = program.graph_signature.input_specs
    before = (InputKind.PARAMETER, InputKind.BUFFER)
    index = next(i for i, spec in enumerate(specs) if spec.kind not in before)
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    with program.graph.inserting_before(placeholders[index]):
        node: Node = program.graph.placeholder(f"b_{name.replace('.', '_')}")
    node.meta["val"] = _mode(program).from_tensor(tensor, static_shapes=True)
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
    """Add the operands of a packed layer as parameters `stem.packed` and so on; return their nodes.

    The result has an entry for each name in OPERANDS; None: `forms` has no such operand.
    `of`: a key of the weights' content; a second call with an equal key returns the first nodes.
    `forms`: shape and dtype of each operand. `make`: yields the values when they are written.
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
    """Add the operands of a weight for GPU kernels as parameters; return their nodes.

    Names and arguments are those of `add_packed`.
    """
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
    while f"{stem}.{PARAMETERS['weight']}" in program.state_dict:  # another node has this stem
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
    """The weight as a NumPy array in float32, ready to be packed."""
    array: Array = tensor.float().numpy()
    return array


def stored_of(coded: Coded) -> StoredRows:
    """The stored rows of a checkpoint as NumPy arrays, ready to be packed."""
    return StoredRows(**{name: part.numpy() for name, part in parts_of(coded)})


def tensor_of(array: Array) -> torch.Tensor:
    """A tensor over the memory of `array`, which may have ml_dtypes' bfloat16."""
    return tensor_over(array, array.dtype.name)


def drop_unused(program: ExportedProgram) -> None:
    """Remove parameters that no node reads any more."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    for spec in list(program.graph_signature.input_specs):
        if spec.kind is InputKind.PARAMETER and not nodes[spec.arg.name].users:
            drop_held(program, nodes[spec.arg.name])


def drop_held(program: ExportedProgram, node: Node) -> None:
    """Drop a weight that no node reads."""
    specs = program.graph_signature.input_specs
    (spec,) = (spec for spec in specs if spec.arg.name == node.name)
    program.graph.erase_node(node)
    specs.remove(spec)
    assert spec.target is not None
    program.state_dict.pop(spec.target, None)
    program.constants.pop(spec.target, None)


def name_outputs(program: ExportedProgram) -> None:
    """Update names of results in the program's signature to the nodes that the graph returns."""
    results = program.graph.output_node().args[0]
    assert isinstance(results, tuple)
    for spec, node in zip(program.graph_signature.output_specs, results, strict=True):
        spec.arg = TensorArgument(name=node.name)


def _mode(program: ExportedProgram) -> FakeTensorMode:
    """The mode in which the fake values of the program's nodes were made."""
    values = (node.meta.get("val") for node in program.graph.nodes)
    return next(x.fake_mode for x in values if isinstance(x, FakeTensor))
