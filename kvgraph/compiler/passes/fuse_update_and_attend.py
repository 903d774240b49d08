"""Replace store_kv and paged_attention of a layer by one update_and_attend.

Applies where an attention follows the store of its layer on the same pool and index tensors, with
nothing between them that uses the pool. An attention without a store of its own reads another
layer's cache, and becomes an update_and_attend without k and v. Afterwards each layer's work on
the pool is one node, so an aliased buffer has one consumer at any point.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch.export import ExportedProgram
from torch.fx import Graph, Node

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.passes import PassReport, report_of
from kvgraph.compiler.passes.parameters import inputs_of
from kvgraph.contract.manifest import LayerRef
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError
from kvgraph.ops import PAGED_ATTENTION, STORE_KV, UPDATE_AND_ATTEND, OpSpec, torch_ops

STORE = torch_ops.store_kv.default
ATTEND = torch_ops.paged_attention.default
FUSED = torch_ops.update_and_attend.default


def fuse_update_and_attend(graph: Graph) -> PassReport:
    """Rewrite `graph` in place; a store that no attention follows is reported and left."""
    report = PassReport("fuse_update_and_attend")
    pending: Node | None = None
    for node in list(graph.nodes):
        if node.target is STORE:
            _report_unread(report, pending)
            pending = node
        elif node.target is ATTEND:
            matches = pending is not None and _same_cache(pending, node)
            store = pending if matches and _nothing_between(pending, node) else None
            _fuse(graph, store, node)
            report.applied += 1
            pending = None if store is pending else pending
    _report_unread(report, pending)
    return report


def require_fused(
    program: ExportedProgram,
    passes: Sequence[PassReport],
    signature: GraphSignature,
    plan: CachePlan,
) -> None:
    """Raise UnsupportedError unless every layer of the plan became one node with the leaf's window.

    A leaf with a window frees the pages that leave it, so an attention that looks further back
    would read freed pages.
    """
    report = report_of(passes, "fuse_update_and_attend")
    if report.unmatched:
        raise UnsupportedError(f"{report.name}: {report.unmatched[0]}")
    leaf_of = buffer_leaves(program, signature)
    found: Counter[tuple[str, int]] = Counter()
    for node in program.graph.nodes:
        if node.target is FUSED:
            given = arguments(UPDATE_AND_ATTEND, node)
            leaf = leaf_of[given["kv_blocks"]]
            found[leaf, given["layer"]] += 1
            _require_window(given, leaf, plan.params.leaves[leaf].window_size)
    expected = Counter((ref.leaf, ref.index) for ref in plan.layers)
    for leaf, layer in sorted(expected | found):
        wanted, got = expected[leaf, layer], found[leaf, layer]
        if got != wanted:
            of = f"leaf {leaf!r}" if leaf else "the cache"
            hint = "; a module of your own reads each layer once" if got > wanted else ""
            raise UnsupportedError(
                f"layer {layer} of {of}: expected {wanted} calls of attention, got {got}{hint}"
            )


def attended_layers(
    program: ExportedProgram, signature: GraphSignature, plan: CachePlan
) -> tuple[LayerRef, ...]:
    """The plan's layers with what the fused attention of each sees."""
    leaf_of = buffer_leaves(program, signature)
    found: dict[tuple[str, int], list[LayerRef]] = {}
    for node in program.graph.nodes:
        if node.target is FUSED:
            given = arguments(UPDATE_AND_ATTEND, node)
            leaf, layer = leaf_of[given["kv_blocks"]], given["layer"]
            v_head_dim = given["v_head_dim"] or plan.params.leaves[leaf].head_dim
            ref = LayerRef(leaf, layer, given["window"], v_head_dim)
            found.setdefault((leaf, layer), []).append(ref)
    return tuple(found[ref.leaf, ref.index].pop(0) for ref in plan.layers)


def buffer_leaves(program: ExportedProgram, signature: GraphSignature) -> dict[Node, str]:
    """A buffer's node in the program -> path of the leaf that it belongs to."""
    return {
        node: symbol.name.rpartition(".")[0]
        for node, symbol in inputs_of(program, signature).items()
        if symbol.kind == "buffer"
    }


def _require_window(given: dict[str, Any], leaf: str, window: int | None) -> None:
    if window is not None and given["window"] != window:
        raise UnsupportedError(
            f"layer {given['layer']} of leaf {leaf!r}: expected window {window} from the cache's "
            f"params, got {given['window']} from its attention"
        )


def arguments(spec: OpSpec, node: Node) -> dict[str, Any]:
    """Inputs and attributes of `node` by the names of its spec (None where left out)."""
    return spec.arguments(node.args, node.kwargs)


def _same_cache(store: Node, attend: Node) -> bool:
    written, read = arguments(STORE_KV, store), arguments(PAGED_ATTENTION, attend)
    shared = ("kv_blocks", "input_row_offsets", "cache_lengths", "lookup_table", "layer")
    return all(written[name] == read[name] for name in shared)


def _nothing_between(store: Node | None, attend: Node) -> bool:
    """Whether no node from the store to the attention uses the pool."""
    assert store is not None
    pool = arguments(STORE_KV, store)["kv_blocks"]
    node = store.next
    while node is not attend:
        if pool in node.all_input_nodes:
            return False
        node = node.next
    return True


def _fuse(graph: Graph, store: Node | None, attend: Node) -> None:
    given = arguments(PAGED_ATTENTION, attend)
    if store is not None:
        stored = arguments(STORE_KV, store)
        given |= {"k": stored["k"], "v": stored["v"]}
    inputs = tuple(given.get(operand.name) for operand in UPDATE_AND_ATTEND.inputs)
    attributes = {a.name: given[a.name] for a in UPDATE_AND_ATTEND.attributes if a.name in given}
    with graph.inserting_before(attend):
        fused = graph.call_function(FUSED, inputs, attributes)
    fused.meta = dict(attend.meta)
    attend.replace_all_uses_with(fused)
    graph.erase_node(attend)
    if store is not None:
        graph.erase_node(store)


def _report_unread(report: PassReport, store: Node | None) -> None:
    if store is not None:
        layer = arguments(STORE_KV, store)["layer"]
        report.unmatched.append(
            f"store_kv of layer {layer}: expected a paged_attention of the same layer, pool and "
            "index tensors right behind it in the pool's use, got none"
        )
