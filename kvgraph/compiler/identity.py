"""The digest of an exported program: equal for programs that compute the same from equal weights.

It is computed before anything is lowered, over all nodes that reach the logits or write a cache.
Names of nodes, symbols and source lines are left out. So are values of parameters, which hashes of
the artifact's weights files cover. So is the order of nodes that do not need each other: a module
may compute its parts in the order of a Python set, which differs from one process to the next. So
the digest does not depend on the process that exports, and two modules of one class with different
`forward` code have different digests. Another version of torch or transformers may change it: pages
that were cached before are then not found.
"""

from __future__ import annotations

from hashlib import sha256
from types import FunctionType
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node

from kvgraph.compiler.passes.writes import base_of, written_by
from kvgraph.contract.signature import GraphSignature

DOMAIN = "kvgraph-program-1"


def program_digest(program: ExportedProgram, signature: GraphSignature) -> bytes:
    """SHA-256 (32 bytes) over the signature's inputs, the program's constants and its nodes."""
    digest = sha256(DOMAIN.encode())
    for symbol in signature.inputs:
        digest.update(f"{symbol.name} {symbol.dtype} {symbol.shape}\n".encode())
    inputs = _inputs(program)
    for line in _lines(program.graph, inputs, program.graph_module):
        digest.update(line.encode() + b"\n")
    return digest.digest()


def _inputs(program: ExportedProgram) -> dict[str, str]:
    """Text for each placeholder, by its name in the graph: input, parameter or constant."""
    stored: dict[str, object] = {**program.constants, **program.state_dict}
    said: dict[str, str] = {}
    position = 0
    for spec in program.graph_signature.input_specs:
        name = str(getattr(spec.arg, "name", spec.arg))
        if spec.kind is InputKind.USER_INPUT:
            said[name], position = f"input {position}", position + 1
        elif spec.kind is InputKind.PARAMETER:
            said[name] = f"parameter {spec.target} {_type(stored.get(spec.target))}"
        else:
            said[name] = f"constant {_content(stored.get(str(spec.target)))}"
    return said


def _type(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)


def _content(value: object) -> str:
    """Text for a buffer or constant: its type and a hash of its values. A fake tensor has only its
    type, because its values are in the weights file."""
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return _type(value)
    data = value.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy()
    return f"{_type(value)} {sha256(data.data).hexdigest()}"


def _lines(graph: Graph, inputs: dict[str, str], root: GraphModule) -> list[str]:
    """One line for each live node: its operator, and its operands as line numbers."""
    number: dict[Node, int] = {}
    lines = []

    def said(given: object) -> str:
        if isinstance(given, Node):
            return f"%{number[given]}"
        if isinstance(given, list | tuple):
            return f"[{', '.join(map(said, given))}]"
        if isinstance(given, dict):
            return f"{{{', '.join(f'{key}: {said(given[key])}' for key in sorted(given))}}}"
        return repr(given)

    for node in _ordered(graph):
        number[node] = len(number)
        if node.op == "placeholder":
            lines.append(f"placeholder {inputs.get(node.name, node.name)}")
        elif node.op == "get_attr":
            part = getattr(root, str(node.target), None)
            whole = (
                _lines(part.graph, {}, part) if isinstance(part, GraphModule) else _content(part)
            )
            lines.append(f"get_attr {whole}")
        elif node.op == "output":
            # Pools that a functional backend returns are inputs; the ops that write them are lines.
            lines.append(f"output {said([x for x in node.args[0] if x.op != 'placeholder'])}")
        else:
            lines.append(f"{_operator(node)} {said(node.args)} {said(node.kwargs)}")
    return lines


def _operator(node: Node) -> str:
    """Name of a node's operator. The text of a Python function has its address in memory."""
    target = node.target
    if isinstance(target, FunctionType):
        return f"{target.__module__}.{target.__qualname__}"
    return str(target)


def _ordered(graph: Graph) -> list[Any]:
    """Nodes that reach an output or change memory, each behind its operands.

    Those that use memory which the program changes are in the program's order. All others are where
    they are first needed.
    """
    writes = {node: written_by(node) for node in graph.nodes}
    changed = {base_of(each) for written in writes.values() for each in written}
    live: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in live or node.op == "output" or writes[node]:
            live.add(node)
            live.update(node.all_input_nodes)
    found: dict[Node, None] = {}
    for root in graph.nodes:
        is_root = root.op == "output" or any(base_of(x) in changed for x in root.all_input_nodes)
        waiting = [root] if is_root and root in live else []
        while waiting:
            missing = [x for x in waiting[-1].all_input_nodes if x not in found]
            if missing:
                waiting.extend(reversed(missing))
            else:
                found[waiting.pop()] = None
    return list(found)
