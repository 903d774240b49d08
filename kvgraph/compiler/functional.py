"""Rewrite a traced program so that it writes in place only into its caches.

Decision: passes take a node for a value. An in-place write changes the value of a node and of its
views, so a pass that moves a node, or computes it from its operands, would be wrong. Therefore each
write becomes a new value before the first pass. A call is replaced where it stands if later nodes
read only the node that it wrote, or the value that it wrote a part of, as in transformers' models.
Otherwise torch traces the program once more without writes, and the cache ops get their own form
back; passes then see other operators than the module's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Graph, Node
from torch.fx.node import Argument

from kvgraph.compiler.export import symbolic_batch
from kvgraph.compiler.passes.operands import add_call, typed
from kvgraph.compiler.passes.parameters import name_outputs
from kvgraph.compiler.passes.require_tokens_apart import CACHE_OPS
from kvgraph.compiler.passes.writes import (
    base_of,
    functional_form,
    gives_its_operand,
    write_elsewhere,
    write_part_elsewhere,
    writes_are_plain,
    written_by,
)
from kvgraph.ops import OpSpec

aten = torch.ops.aten
DROPOUTS = (aten.dropout.default, aten.feature_dropout.default)


def without_writes(program: ExportedProgram) -> ExportedProgram:
    """An equivalent program without in-place writes: `program`, changed in place, or a new one.

    Writes into inputs of the program stay. A program that writes into its own parameters, buffers
    or constants stays unchanged, because `require_state_unchanged` refuses it later. So does one
    whose cache ops write into a part of an input, which `require_whole_inputs` refuses.
    """
    if not _writes(program):
        return program
    _drop_identities(program.graph)
    calls = _writes(program)
    with symbolic_batch():
        if all(map(_replaced, calls)):
            program.graph_module.recompile()
            return program
        made: ExportedProgram = program.run_decompositions(_rules(program.graph))
    nodes = [node for node in made.graph.nodes if node.target is auto_functionalized_v2]
    for node in nodes:
        spec = CACHE_OPS.get(str(node.args[0]))
        if spec is not None:
            _restore(node, spec)
    _write_inputs(made)
    name_outputs(made)
    made.graph.lint()
    made.graph_module.recompile()
    return made


def _drop_identities(graph: Graph) -> None:
    """Remove operators that return their operand itself although their schemas do not say so."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            continue
        is_idle = node.target in DROPOUTS and not node.args[2]
        if is_idle or (node.target is aten.type_as.default and typed(node) == typed(source)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _writes(program: ExportedProgram) -> list[Node]:
    """Calls that write in place into values that the program computes.

    Empty for a program that a later check refuses: it writes into its own state, or its cache ops
    write into a value that is no input.
    """
    inputs, calls = set(program.graph_signature.user_inputs), []
    for node in program.graph.nodes:
        written = written_by(node)
        bases = list(map(base_of, written))
        if str(node.target) in CACHE_OPS:
            if any(pool.op != "placeholder" for pool in written):
                return []
        elif any(base.op == "placeholder" and base.name not in inputs for base in bases):
            return []
        elif any(base.op != "placeholder" for base in bases):
            calls.append(node)
    return calls


def _replaced(call: Node) -> bool:
    """Try to replace an in-place call by a new value; return whether that was possible.

    The new value stands for the node that was written, or for the value that it is a part of.
    """
    op = functional_form(call.target)
    if op is None or len(written_by(call)) > 1:
        return False
    if writes_are_plain([call]):
        return write_elsewhere(call, op)
    return write_part_elsewhere(call, op)


def _rules(graph: Graph) -> dict[OpOverload, Callable[..., object]]:
    """torch's own decompositions for the graph's operators that may return their operand itself.

    Without a decomposition torch takes their results for new values.
    """
    found = {node.target for node in graph.nodes if gives_its_operand(node)}
    known = torch.export.default_decompositions() if found else {}
    return {op: known[op] for op in found if op in known}


def _restore(node: Node, spec: OpSpec) -> None:
    """Replace a functionalised cache op by the op itself, which writes into the pools in place.

    Each pool that the node returns is replaced by the pool that it was given.
    """
    given = node.kwargs
    pools = given["_all_bases"]
    assert isinstance(pools, list | tuple)
    operands = {
        x.name: given[x.name] if x.name in given else _pool(pools, given, x.name)
        for x in spec.inputs
    }
    attributes = {x.name: given[x.name] for x in spec.attributes}
    with node.graph.inserting_before(node):
        call = node.graph.call_function(node.args[0], tuple(operands.values()), attributes)  # type: ignore[arg-type]
    call.meta = {**node.meta, "val": node.meta["val"][0]}
    results = len(node.meta["val"]) - len(pools)
    for part in list(node.users):
        assert part.target is operator.getitem
        index = part.args[1]
        assert isinstance(index, int)
        made = call if index < results else pools[index - results]
        assert isinstance(made, Node)
        part.replace_all_uses_with(made)
        node.graph.erase_node(part)
    node.graph.erase_node(node)


def _pool(pools: Sequence[Argument], given: Mapping[str, Argument], name: str) -> Argument:
    index = given[f"_{name}_base_index"]
    return pools[index] if isinstance(index, int) else None


def _write_inputs(program: ExportedProgram) -> None:
    """Make the program copy changed inputs in place, and remove them from its results."""
    specs, output = program.graph_signature.output_specs, program.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple)
    inputs = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    kept = []
    for index, spec in enumerate(specs):
        if spec.kind is not OutputKind.USER_INPUT_MUTATION:
            kept.append(index)
        elif results[index] is not (pool := inputs[str(spec.target)]):
            with program.graph.inserting_before(output):
                add_call(program.graph, aten.copy_.default, pool, results[index])
    output.args = (tuple(results[index] for index in kept),)
    specs[:] = [specs[index] for index in kept]
