"""Check that a module uses its caches as given: inputs whole, and layers stored before they are
read.

A module that fails could be compiled, but would read pages that nothing wrote, or pages of another
cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, Node

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.passes.fuse_update_and_attend import ATTEND, FUSED, STORE, arguments
from kvgraph.compiler.passes.operands import value
from kvgraph.compiler.passes.parameters import inputs_of
from kvgraph.compiler.passes.writes import base_of, written_by
from kvgraph.contract.dims import TOTAL_SEQ_LEN, TensorType
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import KernelError, UnsupportedError
from kvgraph.ops import PAGED_ATTENTION, STORE_KV, UPDATE_AND_ATTEND, OpSpec
from kvgraph.ops.torch_ops import check_call, known_to_differ

SPECS = {STORE: STORE_KV, ATTEND: PAGED_ATTENTION, FUSED: UPDATE_AND_ATTEND}

OF_ITS_POOL = ("lookup_table", "kv_scales")
"""Operands that must come from the same cache as the pool. Lengths are equal in all caches."""

Symbols = Mapping[Any, TensorType]
"""Input node of a program -> its symbol in the signature."""


def require_whole_inputs(program: ExportedProgram, signature: GraphSignature) -> None:
    """Raise UnsupportedError unless the cache ops get the graph's own pools, each with its own
    table, and every new token."""
    symbols = inputs_of(program, signature)
    tokens = next(value(node).shape[0] for node, s in symbols.items() if s.name == "tokens")
    for spec, given in _cache_ops(program.graph):
        what = f"{spec.name} of layer {given['layer']}"
        _require_tokens(what, spec, given, tokens)
        _require_own_pool(what, given, symbols)


def _require_tokens(
    what: str, spec: OpSpec, given: Mapping[str, Any], tokens: int | torch.SymInt
) -> None:
    for operand in spec.inputs:
        node = given[operand.name]
        if node is None or operand.dims[0] != TOTAL_SEQ_LEN:
            continue
        found = value(node).shape[0]
        if known_to_differ(found, tokens):
            raise UnsupportedError(
                f"{what}: {operand.name}: dim {TOTAL_SEQ_LEN}: expected {tokens} as tokens has it, "
                f"got {found}"
            )


def _require_own_pool(what: str, given: Mapping[str, Any], symbols: Symbols) -> None:
    pool = symbols.get(given["kv_blocks"])
    if pool is None or pool.kind != "buffer":
        raise UnsupportedError(
            f"{what}: kv_blocks: expected a pool of the graph's inputs, got "
            f"{pool.name if pool else given['kv_blocks'].target}"
        )
    for operand in OF_ITS_POOL:
        found = symbols.get(given.get(operand))
        expected = pool.name.removesuffix("kv_blocks") + operand
        if found is not None and found.name != expected:
            raise UnsupportedError(
                f"{what}: {operand}: expected {expected!r} of its pool, got {found.name!r}"
            )


def require_stored(graph: Graph) -> None:
    """Raise UnsupportedError unless each cache op's operands fit, and each layer is stored before
    it is read."""
    stored = set()
    for spec, given in _cache_ops(graph):
        where = f"layer {given['layer']}"
        _require_fits(where, spec, given)
        layer = given["kv_blocks"], given["layer"]
        if given["k"] is not None:
            stored.add(layer)
        if layer not in stored:
            raise UnsupportedError(
                f"{where}: expected a store_kv of its new tokens before its paged_attention, got "
                "none: pages would be read that nothing wrote"
            )


def _require_fits(where: str, spec: OpSpec, given: Mapping[str, Any]) -> None:
    """Raise UnsupportedError unless the operands fit the op. Operands that fit a store and an
    attention need not fit the op that replaced both."""
    values = {n: value(each) if isinstance(each, Node) else each for n, each in given.items()}
    try:
        check_call(spec, values)
    except KernelError as error:
        raise UnsupportedError(f"{where}: {error}") from error
    if not values.get("causal", 1):
        raise UnsupportedError(
            f"{where}: {spec.name}: expected causal=1, since a prompt may come in chunks, got 0"
        )


def require_planned(program: ExportedProgram, signature: GraphSignature, plan: CachePlan) -> None:
    """Raise UnsupportedError unless V has the width in the cache's params, and each buffer of a
    padded cache is written."""
    symbols: Symbols = inputs_of(program, signature)
    if plan.strategy is KVCacheStrategy.PADDED:
        _require_written(program.graph, symbols)
        return
    for _, given in _cache_ops(program.graph):
        path = symbols[given["kv_blocks"]].name.rpartition(".")[0]
        leaf = plan.params.leaves[path]
        found = given["v_head_dim"] or leaf.head_dim
        if found != leaf.v_head_dim:
            raise UnsupportedError(
                f"layer {given['layer']} of leaf {path!r}: v_head_dim: expected {leaf.v_head_dim} "
                f"from the cache's params, got {found} from its attention"
            )


def _require_written(graph: Graph, symbols: Symbols) -> None:
    written = set(_written(graph))
    for node, symbol in symbols.items():
        if symbol.kind == "buffer" and node not in written:
            raise UnsupportedError(
                f"{symbol.name}: expected a module that writes its new tokens, got one that never "
                "does"
            )


def _cache_ops(graph: Graph) -> Iterator[tuple[OpSpec, dict[str, object]]]:
    """The spec of each cache op in order, with the op's inputs and attributes by name."""
    for node in graph.nodes:
        if node.target in SPECS:
            spec = SPECS[node.target]
            yield spec, arguments(spec, node)


def _written(graph: Graph) -> Iterator[Node]:
    """Values that some op writes in place, directly or through a view."""
    for node in graph.nodes:
        yield from map(base_of, written_by(node))
