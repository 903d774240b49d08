"""Joins chains of views into one.

Exported programs change a shape in many steps (view, transpose, transpose back, select). Each is a
call of torch on the host. If the elements keep their order, the last shape alone is enough.
"""

from __future__ import annotations

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from kvgraph.ops.torch_nodes import is_dense

aten = torch.ops.aten
VIEWS = (
    aten.view.default,
    aten.reshape.default,
    aten.select.int,
    aten.squeeze.dim,
    aten.transpose.int,
    aten.unsqueeze.default,
)


def join_views(graph: torch.fx.Graph) -> None:
    """Replace chains that keep all elements in order by one `reshape`.

    A view's strides are computed from its source, not taken from the program's metadata.
    """
    sources: dict[Node, Node] = {}
    values: dict[Node, torch.Tensor] = {}
    for node in list(graph.nodes):
        if node.target not in VIEWS:
            continue
        before, *others = node.args
        given = values.get(before, before.meta["val"])
        if node.target is aten.reshape.default and not is_dense(given):
            continue  # it may copy into another order
        values[node] = node.target(given, *map_arg(others, lambda other: other.meta["val"]))
        source = sources[node] = sources.get(before, before)
        sizes = _sizes(source.meta["val"], values[node])
        if sizes is not None and any(user.target not in VIEWS for user in node.users):
            with graph.inserting_before(node):
                made = graph.call_method("reshape", (source, tuple(sizes)))
            made.meta = node.meta
            node.replace_all_uses_with(made)
    for node in reversed(graph.nodes):
        if node in sources and not node.users:
            graph.erase_node(node)


def _sizes(source: torch.Tensor, view: torch.Tensor) -> list[int] | None:
    """Sizes with which `source` reshapes to `view`, with at most one open size (-1).

    None if `view` is a part of `source` or has another order. Two row-major tensors with the same
    number of elements have the same order.
    """
    whole = statically_known_true(source.numel() == view.numel())
    sizes = [extent if isinstance(extent, int) else -1 for extent in view.shape]
    keeps = whole and is_dense(source) and is_dense(view)
    return sizes if keeps and sizes.count(-1) <= 1 else None
