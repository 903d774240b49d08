"""Make pools the program's last outputs. ONNX has no in-place writes, so a pool is an input and an
output there."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from kvgraph.compiler.passes import PassReport, report_of
from kvgraph.compiler.passes.fuse_update_and_attend import FUSED, arguments
from kvgraph.compiler.passes.writes import base_of, written_by
from kvgraph.errors import UnsupportedError
from kvgraph.ops import UPDATE_AND_ATTEND


def return_pools(program: ExportedProgram) -> PassReport:
    """Rewrite the outputs to one flat tuple with all pools. The report counts the pools added."""
    output = program.graph.output_node()
    results = tuple(output.args[0])
    added = [pool for pool in _pools(program) if pool not in results]
    output.args = ((*results, *added),)
    names = [TensorArgument(pool.name) for pool in added]
    specs = program.graph_signature.output_specs
    specs += [OutputSpec(OutputKind.USER_OUTPUT, name, None) for name in names]
    call = program.module_call_graph[0].signature
    assert call is not None
    call.outputs = [*call.outputs, *names]
    call.out_spec = pytree.tree_structure(tuple(range(len(specs))))
    return PassReport("return_pools", applied=len(added))


def require_pairs(program: ExportedProgram, passes: list[PassReport]) -> None:
    """Raise UnsupportedError unless every store was fused with its attention, pools are inputs that
    nothing else uses, and nothing else is written in place."""
    unmatched = report_of(passes, "fuse_update_and_attend").unmatched
    if unmatched:
        raise UnsupportedError(unmatched[0])
    written = _written(program)
    if not written:
        raise UnsupportedError(
            "program: expected pairs of kvgraph::store_kv and paged_attention, got none"
        )
    others = written - set(_inputs(program))
    if others:
        views = ", ".join(sorted(map(str, others)))
        raise UnsupportedError(f"program: expected pools that are inputs, got {views}")
    for node in program.graph.nodes:
        if node.target is not FUSED:
            _require_no_pool(node, written)


def _require_no_pool(node: Node, pools: set[Node]) -> None:
    """Raise UnsupportedError if `node` reads a pool or writes in place: it would read the pool from
    before the step, and its write would be lost."""
    changed = ", ".join(str(base_of(x)) for x in written_by(node))
    if changed:
        raise UnsupportedError(
            "program: expected one that changes nothing but its pools, by cache ops, got "
            f"{node.target} that changes {changed}"
        )
    if isinstance(node.meta.get("val"), torch.SymInt):  # it reads only an extent of the pool
        return
    read = ", ".join(str(x) for x in node.all_input_nodes if x in pools)
    if node.op != "output" and read:
        raise UnsupportedError(
            f"program: expected pools that cache ops alone use, got {node.target} of {read}"
        )


def _pools(program: ExportedProgram) -> list[Node]:
    """The inputs that cache ops write, in the program's order of inputs."""
    written = _written(program)
    return [node for node in _inputs(program) if node in written]


def _inputs(program: ExportedProgram) -> list[Node]:
    return [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]


def _written(program: ExportedProgram) -> set[Node]:
    written: set[Node] = set()
    for node in program.graph.nodes:
        if node.target is FUSED:
            given = arguments(UPDATE_AND_ATTEND, node)
            written |= {given[name] for name in UPDATE_AND_ATTEND.mutated} - {None}
    return written
