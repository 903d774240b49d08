"""aten.linear -> kvgraph.linear over packed weights, in bfloat16, int8 or int4.

Linear layers of one input become one node: q, k and v; gate and up, with silu(gate) * up as its
output where the graph computes that, whether they are two layers or the halves of one. A sum that
only a layer enters, the residual, is its too. A router keeps its weights: a wrong expert costs more
than its few bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.packed_weights import Packed, Section, pack_in_parts, shapes
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import (
    UnmatchedError,
    erase_unused,
    expect,
    node_of,
    only_user,
    other_factor,
    typed,
    value,
)
from kvgraph.compiler.passes.parameters import (
    add_packed,
    array_of,
    drop_unused,
    held,
    name_outputs,
)
from kvgraph.compiler.weights import Weights
from kvgraph.ops import torch_ops

aten = torch.ops.aten
PACKED = torch_ops.linear.default
SPLITS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
PRODUCTS = (aten.matmul.default, aten.mm.default, aten.addmm.default)
MAX_SECTIONS = 3
ROUTER_STEPS = 4
"""Nodes between a router's linear layer and the choice of experts."""


@dataclass
class _Layer:
    """A linear layer, or one of two halves of its rows."""

    node: Node
    name: str
    weight: torch.Tensor
    bias: tuple[str, torch.Tensor] | None
    half: int | None = None

    @property
    def features(self) -> int:
        return len(self.weight) if self.half is None else len(self.weight) // 2

    def section(self, weights: Weights) -> Section:
        """What is packed of it, opened."""
        first = (self.half or 0) * self.features
        rows = weights.values(self.name, self.weight).open()
        bias = None if self.bias is None else weights.values(*self.bias).read()
        own = None if bias is None else array_of(bias[first : first + self.features])
        return Section(
            self.features, lambda start, stop: array_of(rows(first + start, first + stop)), own
        )


@dataclass
class _Group:
    """Layers of one input, which become one node; what else it computes.

    Gate and up may be halves of one layer: then both have its node.
    """

    layers: list[_Layer]
    gated: Node | None = None
    residual: Node | None = None
    total: Node | None = None


def pack_linear(program: ExportedProgram, bits: int, weights: Weights) -> PassReport:
    """Rewrite `program` in place; its packed weights are made later."""
    report = PassReport("pack_linear")
    by_input: dict[Node, list[_Layer]] = {}
    for node in program.graph.nodes:
        if node.target in PRODUCTS and any(_of_weight(program, x) for x in node.args):
            report.unmatched.append(f"{node.name}: expected aten::linear, got {node.target.name()}")
        if node.target is not aten.linear.default:
            continue
        try:
            by_input.setdefault(node.args[0], []).append(_layer(program, node))
        except UnmatchedError as why:
            report.unmatched.append(f"{node.name}: {why}")
    for layers in by_input.values():
        for group in _groups(layers):
            _rewrite(program, group, bits, weights)
            report.applied += len({layer.node for layer in group.layers})
    drop_unused(program)
    name_outputs(program)
    program.graph.lint()
    program.graph_module.recompile()
    return report


def _of_weight(program: ExportedProgram, node: object) -> bool:
    """A weight or, say, its transpose."""
    source = node.args[0] if isinstance(node, Node) and node.args else node
    return any(held(program, x) is not None for x in (node, source))


def _layer(program: ExportedProgram, node: Node) -> _Layer:
    weight = held(program, node.args[1])
    expect(weight is not None, "expected a weight of the model, got a computed one")
    assert weight is not None
    given = node.args[2] if len(node.args) > 2 else None
    bias = held(program, given)
    expect(given is None or bias is not None, "expected a bias of the model, got a computed one")
    dims = len(value(node).shape)
    expect(
        dims == 2 or (dims == 3 and value(node).shape[0] == 1), f"expected rows, got {dims} dims"
    )
    expect(value(node).dtype == torch.float32, f"expected float32, got {value(node).dtype}")
    expect(not _routes(node), "a router, which keeps its weights")
    return _Layer(node, weight[0], weight[1].detach(), bias)


def _routes(node: Node) -> bool:
    """Whether experts are chosen by this layer's result."""
    reached = [node]
    for _ in range(ROUTER_STEPS):
        reached = [user for n in reached for user in n.users]
        if any(user.target is aten.topk.default for user in reached):
            return True
    return False


def _groups(layers: list[_Layer]) -> list[_Group]:
    """A gated pair, then up to three layers at once; a layer alone takes its residual."""
    groups = []
    left = list(layers)
    for gate in layers:
        group = _gated_pair(gate, left) or _gated_halves(gate)
        if group is not None:
            taken = {layer.node for layer in group.layers}
            left = [layer for layer in left if layer.node not in taken]
            groups.append(group)
    if len(left) == 1:
        groups.append(_with_residual(left[0]))
        left = []
    return groups + [_Group(left[i : i + MAX_SECTIONS]) for i in range(0, len(left), MAX_SECTIONS)]


def _gated_pair(gate: _Layer, layers: list[_Layer]) -> _Group | None:
    product, other = _gated_product(gate.node)
    up = next((layer for layer in layers if layer.node is other), None)
    if product is None or up is None or up.features != gate.features:
        return None
    return _Group([gate, up], gated=product)


def _gated_halves(both: _Layer) -> _Group | None:
    """Gate and up of one layer that is cut in two, in either order."""
    cuts = list(both.node.users)
    if len(cuts) != 1 or cuts[0].target not in SPLITS:
        return None
    width = len(both.weight) // 2
    halves = {part.args[1]: part for part in cuts[0].users if value(part).shape[-1] == width}
    if len(both.weight) % 2 or {*halves} != {0, 1} or len(cuts[0].users) != 2:
        return None
    for gate, up in ((0, 1), (1, 0)):
        product, other = _gated_product(halves[gate])
        if product is not None and other is halves[up]:
            return _Group([replace(both, half=gate), replace(both, half=up)], gated=product)
    return None


def _gated_product(gate: Node) -> tuple[Node, Node] | tuple[None, None]:
    """silu(gate) * up and up, if the graph computes nothing else of either."""
    try:
        silu = node_of(only_user(gate, "the gate"), [aten.silu.default], "silu of the gate")
        product = node_of(only_user(silu, "silu(gate)"), [aten.mul.Tensor], "a product next")
        up = other_factor(product, silu)
        only_user(up, "up")
    except UnmatchedError:
        return None, None
    return product, up


def _with_residual(layer: _Layer) -> _Group:
    group = _Group([layer])
    users = list(layer.node.users)
    if len(users) == 1 and users[0].target is aten.add.Tensor and not users[0].kwargs:
        others = [x for x in users[0].args if x is not layer.node]
        other = others[0] if len(others) == 1 else None
        if isinstance(other, Node) and typed(other) == typed(layer.node):
            group.residual, group.total = other, users[0]
    return group


def _rewrite(program: ExportedProgram, group: _Group, bits: int, weights: Weights) -> None:
    graph, first, layers = program.graph, group.layers[0], group.layers
    width, interleave = first.weight.shape[1], group.gated is not None

    def make() -> Iterator[Packed]:
        sections = [layer.section(weights) for layer in layers]
        return pack_in_parts(sections, width, bits, interleave=interleave)

    has_bias = any(layer.bias is not None for layer in layers)
    forms = shapes([layer.features for layer in layers], width, bits, has_bias)
    operands = add_packed(program, weights, _stem(first.name), forms, make)
    widths = [layer.features for layer in layers][: 1 if group.gated else None]
    names = ("out_features", "out_features_1", "out_features_2")
    attributes = dict(zip(names, widths, strict=False)) | {"bits": bits}
    if group.gated is not None:
        attributes["silu_mul"] = 1
    last = group.gated or group.total or first.node
    with graph.inserting_before(last if group.gated or group.total else first.node):
        x = _rows(first.node.args[0])
        residual = _rows(group.residual) if group.residual is not None else None
        whole = graph.call_function(PACKED, (x, *operands, residual), attributes)
        with value(x).fake_mode:  # type: ignore[attr-defined]
            rows = value(x).shape[0]
            widths += [0] * (MAX_SECTIONS - len(widths))
            whole.meta["val"] = tuple(
                value(x).new_empty((rows if width else 0, width)) for width in widths
            )
        replaced = [group.gated or group.total] if last is not first.node else []
        for index, old in enumerate(replaced or [layer.node for layer in group.layers]):
            assert old is not None
            out = graph.call_function(operator.getitem, (whole, index))
            out.meta["val"] = whole.meta["val"][index]
            old.replace_all_uses_with(_like(out, old))
    for old in replaced or [layer.node for layer in group.layers]:
        assert old is not None
        erase_unused(old)


def _rows(node: object) -> Node:
    """`[rows, width]` of `[1, rows, width]`, as it is or as another view."""
    assert isinstance(node, Node)
    if len(value(node).shape) == 2:
        return node
    if node.target is aten.unsqueeze.default and node.args[1] == 0:
        assert isinstance(node.args[0], Node)
        return node.args[0]
    flat = node.graph.call_function(aten.squeeze.dim, (node, 0))
    flat.meta["val"] = value(node)[0]
    return flat


def _like(rows: Node, old: Node) -> Node:
    if len(value(old).shape) == 2:
        return rows
    view = rows.graph.call_function(aten.unsqueeze.default, (rows, 0))
    view.meta["val"] = value(rows)[None]
    return view


def _stem(name: str) -> str:
    """The layer's name for its packed weights; one of its own for what is not `layer.weight`."""
    return name.removesuffix(".weight") if name.endswith(".weight") else f"{name}_linear"
