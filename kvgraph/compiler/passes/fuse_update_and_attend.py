"""store_kv + paged_attention of one layer -> one update_and_attend.

Applies where an attention follows the store of its layer on the same pool and index tensors, with
nothing that touches the pool between them. An attention without a store of its own reads another
layer's cache and becomes an update_and_attend without k and v. Afterwards each layer's work on
the pool is one node, so an aliased buffer has one consumer at any point.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Graph, Node

from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import PassReport
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
            store = pending if pending is not None and _same_cache(pending, node) else None
            _fuse(graph, store, node)
            report.applied += 1
            pending = None if store is pending else pending
    _report_unread(report, pending)
    return report


def require_fused(model: Model, report: PassReport) -> None:
    """UnsupportedError unless every layer of `model` became one node and no store was left."""
    if report.unmatched or report.applied != model.cache.num_layers:
        why = report.unmatched[0] if report.unmatched else "its attention does not reach the cache"
        raise UnsupportedError(
            f"architecture {model.architecture!r}: expected one update_and_attend for each of "
            f"{model.cache.num_layers} layers, got {report.applied}: {why}"
        )


def arguments(spec: OpSpec, node: Node) -> dict[str, Any]:
    """Inputs and attributes of `node` by the names of its spec (None where left out)."""
    names = [operand.name for operand in spec.inputs]
    return dict.fromkeys(names) | dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def _same_cache(store: Node, attend: Node) -> bool:
    written, read = arguments(STORE_KV, store), arguments(PAGED_ATTENTION, attend)
    shared = ("kv_blocks", "input_row_offsets", "cache_lengths", "lookup_table", "layer")
    return all(written[name] == read[name] for name in shared)


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
            "index tensors behind it, got none"
        )
