"""A traced program -> one that writes in place into its caches alone.

Decision: passes take a node for a value. A write in place gives a node another value, and its views
too, so a pass that reads it at another place, or computes it from its operands, would be wrong. So
each write becomes a new value before the first pass. A call is replaced where it stands if only
the name that it wrote is read later, or the value that it wrote a part of, as in the models of
transformers. Else torch traces the program once more without writes, and the cache ops get their
own form back: passes then see other operators than the module's.
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
    """`program`, changed in place, or another one made of it, which computes the same.

    Writes into inputs of the program stay. A program that writes into its own parameters, buffers
    or constants stays as it is, for `require_state_unchanged` to refuse it, and so does one whose
    cache ops write into a part of an input, for `require_whole_inputs`.
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
    """Operators that give their operand itself, where their schemas do not say so."""
    for node in list(graph.nodes):
        source = node.args[0] if node.args else None
        if not isinstance(source, Node):
            continue
        is_idle = node.target in DROPOUTS and not node.args[2]
        if is_idle or (node.target is aten.type_as.default and typed(node) == typed(source)):
            node.replace_all_uses_with(source)
            graph.erase_node(node)


def _writes(program: ExportedProgram) -> list[Node]:
    """Calls that write into values of the program itself; none in a program that is refused, for
    writes into its own state or caches that are no inputs."""
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
    """Whether a new value stands for the write: of the name that was written, or of what that name
    is a part of."""
    op = _functional(call.target)
    if op is None or len(written_by(call)) > 1:
        return False
    if writes_are_plain([call]):
        return write_elsewhere(call, op)
    return write_part_elsewhere(call, op)


def _functional(target: object) -> OpOverload | None:
    """`aten.mul.Tensor` of `aten.mul_.Tensor`; None where there is no such operator."""
    if not isinstance(target, OpOverload) or not target._opname.endswith("_"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), target._opname[:-1], None)
    op = getattr(packet, target._overloadname, None)
    if not isinstance(op, OpOverload) or op._schema.is_mutable:
        return None
    names = [[given.name for given in each._schema.arguments] for each in (op, target)]
    return op if names[0] == names[1] else None


def _rules(graph: Graph) -> dict[OpOverload, Callable[..., object]]:
    """torch's own of the operators whose results are their operands, which torch else takes for
    new values."""
    found = {node.target for node in graph.nodes if gives_its_operand(node)}
    known = torch.export.default_decompositions() if found else {}
    return {op: known[op] for op in found if op in known}


def _restore(node: Node, spec: OpSpec) -> None:
    """The cache op in its own form, which writes into the pools: each new pool is the old one."""
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
    """Inputs that the program changes are written by it: they are no results."""
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
