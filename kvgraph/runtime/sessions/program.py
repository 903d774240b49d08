"""Prepares a weightless program for a device: binds weights, replaces our ops by launches."""

from __future__ import annotations

import logging
import operator
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from kvgraph.contract.dims import TensorType
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.file_names import PROGRAM_NAME
from kvgraph.errors import ArtifactError
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.launches import Attention, Gpu, Shared, launches_of
from kvgraph.runtime.sessions.opening import opening, require_type
from kvgraph.runtime.sessions.program_file import require_no_code
from kvgraph.runtime.sessions.views import join_views
from kvgraph.runtime.sessions.weights import Stored, read_weights

READ_BY_VIEWS = (
    torch.ops.aten.sym_size.int,
    operator.add,
    operator.floordiv,
    operator.getitem,
    operator.mul,
    operator.sub,
)
"""Nodes without side effects, erased when unused: sizes, tuple items, and arithmetic on sizes."""


LOGGERS = (
    "torch.export",
    "torch.export.pt2_archive._package",
    "torch._export.serde.serialize",
)
"""Loggers of what reads an archive."""


def load_program(artifact: ArtifactFolder, gpu: Gpu) -> torch.fx.GraphModule:
    """`model.pt2` with its weights on the GPU's device, over inputs in the signature's order."""
    path = artifact.file(PROGRAM_NAME)
    with opening(path, f"torch {torch.__version__}"):
        program = read_program(artifact, gpu.device)
        if gpu.device.type != "cpu":  # saved as a CPU graph
            program = move_to_device_pass(program, str(gpu.device))
        module = program.module(check_guards=False)
        _replace_ops(module, artifact, gpu)
        # Without torch's own checks of inputs: the signature is checked before every run.
        return torch.fx.GraphModule(module, module.graph)


def read_program(artifact: ArtifactFolder, device: torch.device) -> torch.export.ExportedProgram:
    """`model.pt2`, a CPU graph, with its weights on `device`. ArtifactError for a file that would
    run code as it is read."""
    path = artifact.file(PROGRAM_NAME)
    require_no_code(path)
    program = _load(path)
    _bind_weights(program, artifact, device)
    return program


def _bind_weights(
    program: torch.export.ExportedProgram, artifact: ArtifactFolder, device: torch.device
) -> None:
    """Bind the weights before the program is moved, so that none is copied or held twice."""
    named = program.state_dict
    expected = {name: _stored(placeholder) for name, placeholder in named.items()}
    weights = read_weights(artifact, expected, str(device))
    program._state_dict = {
        name: nn.Parameter(weights[name], requires_grad=False)
        if isinstance(placeholder, nn.Parameter)
        else weights[name]
        for name, placeholder in named.items()
    }


def _stored(placeholder: torch.Tensor) -> Stored:
    dtype = DTYPES[str(placeholder.dtype).removeprefix("torch.")]
    return dtype.safetensors, tuple(placeholder.shape)


def _load(path: Path) -> torch.export.ExportedProgram:
    """Load an archive, without torch's warnings about its own file format, and about a damaged
    file: the error says what is wrong."""
    levels = {logger: logger.level for logger in map(logging.getLogger, LOGGERS)}
    try:
        for logger in levels:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.load(path)
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _require_type(path: Path, symbol: TensorType, node: torch.fx.Node) -> None:
    given = node.meta["val"]
    dims = [extent if isinstance(extent, int) else str(extent) for extent in given.shape]
    require_type(path, symbol.name, symbol, (str(given.dtype).removeprefix("torch."), dims))


def _replace_ops(module: torch.fx.GraphModule, artifact: ArtifactFolder, gpu: Gpu) -> None:
    path, graph = artifact.file(PROGRAM_NAME), module.graph
    leaves, inputs = artifact.params().leaves, artifact.signature.inputs
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(inputs):
        raise ArtifactError(
            f"{path}: expected {len(inputs)} inputs from the manifest, got {len(placeholders)}"
        )
    symbols = dict(zip(placeholders, inputs, strict=True))
    for node, symbol in symbols.items():
        _require_type(path, symbol, node)
    _require_type(path, artifact.signature.outputs[0], graph.output_node().all_input_nodes[0])
    shared = Shared(graph)
    windows = []
    for node in list(graph.nodes):
        launches = launches_of(node, module, symbols, leaves, gpu)
        if isinstance(launches, Attention):
            windows.append(launches.shape.window)
        if launches is not None:
            gpu.require(launches.variants)
            with graph.inserting_before(node):
                call = graph.call_function(launches.run, launches.inputs(shared))
            call.meta = node.meta
            node.replace_all_uses_with(call)
            graph.erase_node(node)
    artifact.require_windows(PROGRAM_NAME, windows)
    join_views(graph)
    for node in reversed(graph.nodes):
        if not node.users and (node.op == "get_attr" or node.target in READ_BY_VIEWS):
            graph.erase_node(node)
