"""Match groups of linear layers as models write them, for the passes that pack their weights.

Linear layers with one input become one node: q, k and v, or gate and up. If the graph computes
silu(gate) * up, that is the node's output; gate and up may be two layers or halves of one. A router
keeps its weights, because a wrong expert costs more than the few bytes saved.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch.export import ExportedProgram
from torch.fx import Node

from kvgraph.compiler.kept_rows import in_groups
from kvgraph.compiler.packed_weights import Section
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.operands import (
    UnmatchedError,
    add_call,
    erase_unused,
    expect,
    expect_dtype,
    node_of,
    only_user,
    other_factor,
    value,
    with_residual,
)
from kvgraph.compiler.passes.parameters import (
    array_of,
    drop_unused,
    held,
    name_outputs,
    stored_of,
)
from kvgraph.compiler.passes.products import StoredWeight, turn_products, weight_of
from kvgraph.compiler.values import Turned, Values
from kvgraph.compiler.weights import Weights
from kvgraph.ops import torch_ops
from kvgraph.ops._linear import OUT_FEATURES
from kvgraph.ops.packed import Form

aten = torch.ops.aten
SPLITS = (aten.chunk.default, aten.split.Tensor, aten.split_with_sizes.default)
MAX_SECTIONS = 3
CHOICES = (aten.topk.default, torch_ops.route.default)
ROUTER_STEPS = 4
"""Most nodes from a router's linear layer to the choice of experts."""


@dataclass
class Layer:
    """A linear layer of a weight `[outputs, inputs]`, or one of two halves of its rows."""

    node: Node
    stored: StoredWeight
    bias: tuple[str, torch.Tensor] | None
    half: int | None = None

    @property
    def name(self) -> str:
        """The name of the stored weight."""
        return self.stored.name

    @cached_property
    def weight(self) -> torch.Tensor:
        return self.stored.matrix()

    @property
    def features(self) -> int:
        return len(self.weight) if self.half is None else len(self.weight) // 2

    def section(self, weights: Weights, *, is_kept: bool, group: int) -> Section:
        """The section of this layer to pack, with its values opened for reading.

        `is_kept`: read rows as the checkpoint stores them, in groups of `group` inputs.
        """
        first = (self.half or 0) * self.features
        bias = None if self.bias is None else weights.values(*self.bias).read()
        own = None if bias is None else array_of(bias[first : first + self.features])
        source = self.source(weights)
        if is_kept:
            coded = in_groups(source, group)
            return Section(
                self.features,
                lambda start, stop: stored_of(coded(first + start, first + stop)),
                own,
            )
        rows = source.open()
        return Section(
            self.features, lambda start, stop: array_of(rows(first + start, first + stop)), own
        )

    def source(self, weights: Weights) -> Values:
        """The source of the whole weight's values, in float32."""
        source = weights.values(self.name, self.stored.tensor, torch.float32)
        return source if self.stored.is_plain else Turned(source, *self.stored.dims)


@dataclass
class Group:
    """Layers with one input that become one node, and further operations that the node computes.

    `gated`: the product silu(gate) * up. `residual`: a tensor that is added to the layer's result;
    `total`: that sum. If gate and up are halves of one layer, both have its node.
    """

    layers: list[Layer]
    gated: Node | None = None
    residual: Node | None = None
    total: Node | None = None

    @property
    def has_bias(self) -> bool:
        return any(layer.bias is not None for layer in self.layers)

    @property
    def widths(self) -> list[int]:
        """Widths of the node's outputs."""
        return [layer.features for layer in self.layers][: 1 if self.gated else None]

    @property
    def parts(self) -> tuple[Hashable, ...]:
        """A key that is equal for nodes with the same packed weights."""
        layers = (
            (one.name, one.half, one.stored.dims, one.bias and one.bias[0]) for one in self.layers
        )
        return (*layers, self.gated is not None)

    def sections(self, weights: Weights, form: Form, *, is_kept: bool) -> list[Section]:
        """The sections of the layers to pack in `form`; see `Layer.section`."""
        return [layer.section(weights, is_kept=is_kept, group=form.group) for layer in self.layers]

    def attributes(self, form: Form) -> dict[str, int]:
        """Attributes of the node over weights that are packed in `form`."""
        gate = {} if self.gated is None else {"silu_mul": 1}
        return dict(zip(OUT_FEATURES, self.widths, strict=False)) | form.attributes() | gate

    @property
    def stem(self) -> str:
        """The stem of the packed weights' names: the first layer's name without `.weight`, or with
        `_linear` if it does not end so."""
        name = self.layers[0].name
        return name.removesuffix(".weight") if name.endswith(".weight") else f"{name}_linear"


def apart_by_form(group: Group, weights: Weights) -> list[Group]:
    """Split a group of layers that are kept as stored: one group for each stored form."""
    kinds: dict[object, list[Layer]] = {}
    for layer in group.layers:
        source = layer.source(weights)
        form = source.form and replace(source.form, has_offsets=False)
        kinds.setdefault(form or source.bits, []).append(layer)
    return [group] if len(kinds) == 1 else [Group(layers) for layers in kinds.values()]


def rewrite_linears(
    program: ExportedProgram,
    name: str,
    kinds: Collection[torch.dtype],
    rewrite: Callable[[Group], None],
    *,
    residuals: bool = False,
    require: Callable[[Layer], None] = lambda layer: None,
) -> PassReport:
    """Rewrite linear layers of `program` in place, for pass `name`.

    `kinds`: dtypes of results of layers to rewrite. `rewrite`: makes one node of a group of layers.
    `residuals`: a layer also takes over the addition of a residual to its result.
    `require`: raises UnmatchedError for a layer that must stay.
    """
    report = PassReport(name, unmatched=turn_products(program))
    by_input: dict[Node, list[Layer]] = {}
    for node in program.graph.nodes:
        if node.target is not aten.linear.default:
            continue
        try:
            layer = _layer(program, node, kinds)
            require(layer)
            by_input.setdefault(node.args[0], []).append(layer)
        except UnmatchedError as why:
            report.unmatched.append(f"{node.name}: {why}")
    for layers in by_input.values():
        for group in _groups(layers, residuals):
            rewrite(group)
            report.applied += len({layer.node for layer in group.layers})
    drop_unused(program)
    name_outputs(program)
    program.graph.lint()
    program.graph_module.recompile()
    return report


def replace_outputs(group: Group, whole: Node, like: Callable[[Node, Node], Node]) -> None:
    """Replace the results of a group by the outputs of `whole`, its new node.

    New nodes go to the graph's insertion point. `like(out, old)` gives `out` the shape of `old`.
    """
    last = group.gated or group.total
    replaced = [last] if last is not None else [layer.node for layer in group.layers]
    for index, old in enumerate(replaced):
        out = add_call(whole.graph, operator.getitem, whole, index)
        old.replace_all_uses_with(like(out, old))
    for old in replaced:
        erase_unused(old)


def _layer(program: ExportedProgram, node: Node, kinds: Collection[torch.dtype]) -> Layer:
    found = weight_of(program, node.args[1])
    expect(found is not None, "expected a weight of the model, got a computed one")
    assert found is not None
    rank = len(found.dims)
    expect(rank == 2, f"expected a matrix of weights, got {rank} dims")
    given = node.args[2] if len(node.args) > 2 else None
    bias = held(program, given)
    expect(given is None or bias is not None, "expected a bias of the model, got a computed one")
    dims = len(value(node).shape)
    expect(
        dims == 2 or (dims == 3 and value(node).shape[0] == 1), f"expected rows, got {dims} dims"
    )
    expect_dtype(value(node).dtype, kinds)
    expect(not _routes(node), "a router, which keeps its weights")
    return Layer(node, found, bias)


def _routes(node: Node) -> bool:
    """Whether experts are chosen by the result of this linear layer."""
    reached = [node]
    for _ in range(ROUTER_STEPS):
        users = [user for n in reached for user in n.users]
        if any(user.target in CHOICES for user in users):
            return True
        reached = [user for user in users if user.target is not aten.linear.default]
    return False


def _groups(layers: list[Layer], residuals: bool) -> list[Group]:
    """Group layers with one input: gated pairs first, then up to three layers at a time.

    A layer alone may take over its residual.
    """
    groups = []
    left = list(layers)
    for gate in layers:
        group = _gated_pair(gate, left) or _gated_halves(gate)
        if group is not None:
            taken = {layer.node for layer in group.layers}
            left = [layer for layer in left if layer.node not in taken]
            groups.append(group)
    if len(left) == 1 and residuals:
        residual, total = with_residual(left[0].node)
        groups.append(Group(left, residual=residual, total=total))
        left = []
    return groups + [Group(left[i : i + MAX_SECTIONS]) for i in range(0, len(left), MAX_SECTIONS)]


def _gated_pair(gate: Layer, layers: list[Layer]) -> Group | None:
    product, other = _gated_product(gate.node)
    up = next((layer for layer in layers if layer.node is other), None)
    if product is None or up is None or up.features != gate.features:
        return None
    return Group([gate, up], gated=product)


def _gated_halves(both: Layer) -> Group | None:
    """The group of gate and up as two halves of one layer, in either order; None if it has none."""
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
            return Group([replace(both, half=gate), replace(both, half=up)], gated=product)
    return None


def _gated_product(gate: Node) -> tuple[Node, Node] | tuple[None, None]:
    """The product `silu(gate) * up`, and up; None twice if gate or up has any other use."""
    try:
        silu = node_of(only_user(gate, "the gate"), [aten.silu.default], "silu of the gate")
        product = node_of(only_user(silu, "silu(gate)"), [aten.mul.Tensor], "a product next")
        up = other_factor(product, silu)
        only_user(up, "up")
    except UnmatchedError:
        return None, None
    return product, up
