"""What a module does with its caches, against what it was given: pools whole, layers stored.

Checks, no rewrites: each failure is a module that could be compiled and would read pages that
nothing wrote, or another cache's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.passes.fuse_update_and_attend import ATTEND, FUSED, STORE, arguments
from kvgraph.compiler.passes.operands import value
from kvgraph.contract.dims import TensorType
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import KernelError, UnsupportedError
from kvgraph.ops import PAGED_ATTENTION, STORE_KV, UPDATE_AND_ATTEND, OpSpec
from kvgraph.ops.torch_ops import check_call

SPECS = {STORE: STORE_KV, ATTEND: PAGED_ATTENTION, FUSED: UPDATE_AND_ATTEND}

OF_ITS_LEAF = ("lookup_table", "kv_scales")
"""Operands that must come from the same cache as the pool; lengths are equal in all caches."""


def require_whole_pools(program: ExportedProgram, signature: GraphSignature) -> None:
    """UnsupportedError unless the cache ops get the graph's own pools, each with its own table."""
    symbols = _symbols(program, signature)
    for spec, given in _cache_ops(program):
        what = f"{spec.name} of layer {given['layer']}"
        pool = symbols.get(given["kv_blocks"])
        if pool is None or pool.kind != "buffer":
            raise UnsupportedError(
                f"{what}: kv_blocks: expected a pool of the graph's inputs, got "
                f"{pool.name if pool else given['kv_blocks'].target}"
            )
        for operand in OF_ITS_LEAF:
            found = symbols.get(given.get(operand))
            expected = pool.name.removesuffix("kv_blocks") + operand
            if found is not None and found.name != expected:
                raise UnsupportedError(
                    f"{what}: {operand}: expected {expected!r} of its pool, got {found.name!r}"
                )


def require_stored(program: ExportedProgram, signature: GraphSignature, plan: CachePlan) -> None:
    """UnsupportedError unless every layer is stored before it is attended to, with V as wide as the
    params say; for a padded cache, unless K and V are written at all."""
    symbols = _symbols(program, signature)
    if plan.strategy is KVCacheStrategy.PADDED:
        written = set(_written(program))
        for node, symbol in symbols.items():
            if symbol.kind == "buffer" and node not in written:
                raise UnsupportedError(
                    f"{symbol.name}: expected a module that writes its new tokens, got one that "
                    "never does"
                )
        return
    stored = set()
    for spec, given in _cache_ops(program):
        leaf = symbols[given["kv_blocks"]].name.rpartition(".")[0]
        where = f"layer {given['layer']} of leaf {leaf!r}"
        _require_operands(where, spec, given)
        if given["k"] is not None:
            stored.add((leaf, given["layer"]))
        if (leaf, given["layer"]) not in stored:
            raise UnsupportedError(
                f"{where}: expected a store_kv of its new tokens before its paged_attention, got "
                "none: pages would be read that nothing wrote"
            )
        _require_width(where, given, plan.params.leaves[leaf])


def _require_operands(where: str, spec: OpSpec, given: dict[str, Any]) -> None:
    """What fits a store and an attention apart need not fit the op that they became."""
    values = {n: value(each) if isinstance(each, Node) else each for n, each in given.items()}
    try:
        check_call(spec, values)
    except KernelError as error:
        raise UnsupportedError(f"{where}: {error}") from error


def _require_width(where: str, given: dict[str, Any], leaf: KVCacheParams) -> None:
    found = given["v_head_dim"] or leaf.head_dim
    if found != leaf.v_head_dim:
        raise UnsupportedError(
            f"{where}: v_head_dim: expected {leaf.v_head_dim} from the cache's params, got {found} "
            "from its attention"
        )


def _symbols(program: ExportedProgram, signature: GraphSignature) -> dict[Any, TensorType]:
    """The program's own inputs -> what each is in the signature."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    users = program.graph_signature.user_inputs
    return {nodes[str(u)]: s for u, s in zip(users, signature.inputs, strict=True)}


def _cache_ops(program: ExportedProgram) -> Iterator[tuple[OpSpec, dict[str, Any]]]:
    """Each cache op with its inputs and attributes, in order."""
    for node in program.graph.nodes:
        if node.target in SPECS:
            spec = SPECS[node.target]
            yield spec, arguments(spec, node)


def _written(program: ExportedProgram) -> Iterator[Node]:
    """Inputs that some op writes, through views too."""
    for node in program.graph.nodes:
        for argument, given in _schema_arguments(node):
            if argument.alias_info is not None and argument.alias_info.is_write:
                yield _base(given)


def _base(node: Node) -> Node:
    """What a chain of views is of."""
    while (schema := getattr(node.target, "_schema", None)) and schema.returns[0].alias_info:
        assert isinstance(node.args[0], Node)
        node = node.args[0]
    return node


def _schema_arguments(node: Node) -> Iterator[tuple[Any, Any]]:
    schema = getattr(node.target, "_schema", None)
    for i, argument in enumerate(schema.arguments if schema else ()):
        if i < len(node.args):
            yield argument, node.args[i]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]
