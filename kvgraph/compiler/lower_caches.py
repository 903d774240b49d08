"""An exported program of a user's own, made ready for plain `torch.onnx.export`.

ONNX has no mutation: a pool is an input and an output there, and one op of each layer hands it on.
Decision: a program of its own, over the same weights, so that the torch form stays usable next to
it; nothing is traced again.
"""

from __future__ import annotations

import copy

from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import OutputKind, OutputSpec, TensorArgument
from torch.fx import Node
from torch.utils import _pytree as pytree

from kvgraph.compiler.passes.fuse_update_and_attend import (
    FUSED,
    arguments,
    fuse_update_and_attend,
)
from kvgraph.compiler.passes.parameters import name_outputs
from kvgraph.compiler.passes.require_stored import require_stored
from kvgraph.compiler.passes.thread_pool import thread_pool
from kvgraph.compiler.passes.wide_indices import wide_indices
from kvgraph.errors import UnsupportedError
from kvgraph.ops import UPDATE_AND_ATTEND


def lower_caches(program: ExportedProgram) -> ExportedProgram:
    """As `kvgraph.onnx.lower_caches`."""
    lowered = _copy(program)
    graph = lowered.graph
    report = fuse_update_and_attend(graph)
    if report.unmatched:
        raise UnsupportedError(f"lower_caches: {report.unmatched[0]}")
    pools = _pools(lowered)
    require_stored(graph)
    _return(lowered, pools)
    thread_pool(graph)
    wide_indices(graph)
    name_outputs(lowered)
    graph.lint()
    lowered.graph_module.recompile()
    return lowered


def _copy(program: ExportedProgram) -> ExportedProgram:
    """A program with a graph and a signature of its own, over the same weights."""
    graph_module = copy.deepcopy(program.graph_module)
    for mine, node in zip(graph_module.graph.nodes, program.graph.nodes, strict=True):
        mine.name = node.name  # a copy avoids names of Python's, such as input
    first, *others = program.module_call_graph
    return ExportedProgram(
        root=graph_module,
        graph=graph_module.graph,
        graph_signature=copy.deepcopy(program.graph_signature),
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry(first.fqn, copy.copy(first.signature)), *others],
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _pools(program: ExportedProgram) -> list[Node]:
    """The inputs that cache ops write, in the order of the inputs."""
    inputs = [n for n in program.graph.nodes if n.name in program.graph_signature.user_inputs]
    written = set()
    for node in program.graph.nodes:
        if node.target is FUSED:
            given = arguments(UPDATE_AND_ATTEND, node)
            written |= {given[name] for name in UPDATE_AND_ATTEND.mutated} - {None}
    if not written:
        raise UnsupportedError(
            "lower_caches: expected pairs of kvgraph::store_kv and paged_attention in the program, "
            "got none"
        )
    if not written <= set(inputs):
        views = ", ".join(sorted(str(node) for node in written - set(inputs)))
        raise UnsupportedError(f"lower_caches: expected pools that are inputs, got {views}")
    return [node for node in inputs if node in written]


def _return(program: ExportedProgram, pools: list[Node]) -> None:
    """Append `pools` to the program's outputs, which become one flat tuple."""
    output = program.graph.output_node()
    results = tuple(output.args[0])
    added = [pool for pool in pools if pool not in results]
    output.args = ((*results, *added),)
    names = [TensorArgument(pool.name) for pool in added]
    specs = program.graph_signature.output_specs
    specs += [OutputSpec(OutputKind.USER_OUTPUT, name, None) for name in names]
    call = program.module_call_graph[0].signature
    assert call is not None
    call.outputs = [*call.outputs, *names]
    call.out_spec = pytree.tree_structure(tuple(range(len(specs))))
