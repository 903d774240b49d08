"""A model as `kvgraph plan` sees it: what its layers cache, and the sizes of its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvgraph.compiler.cache import LayerNeed
from kvgraph.compiler.frontends.stored_forms import PLAIN
from kvgraph.compiler.joined_forms import KeptAs, Takes, joined_form, kept_in
from kvgraph.compiler.packed_weights import shapes
from kvgraph.compiler.passes import TABLE_BYTES
from kvgraph.contract.dtypes import AS_STORED, itemsize
from kvgraph.contract.mixtures import Mixture, joined
from kvgraph.ops import matrices
from kvgraph.ops.packed import Form

MATRICES = ("gate_up_proj", "down_proj")
"""Parameters of a layer of experts, which have the matrices of all of them."""


@dataclass(frozen=True, order=True)
class Linear:
    """The shape and role of a linear layer.

    `is_tied`: its weight is the embedding table's. `is_head`: its outputs are logits.
    `name`: name of its module, if known.
    `joined_with`: name of the layer that kernels of CPUs join it with: of a gate its up projection,
    and of that its gate.
    `kept`: how a quantised checkpoint stores it, and then that layer.
    """

    out_features: int
    in_features: int
    has_bias: bool
    is_tied: bool = False
    is_head: bool = False
    name: str = field(default="", compare=False)
    joined_with: str = field(default="", compare=False)
    kept: tuple[KeptAs, ...] = field(default=(), compare=False)


@dataclass(frozen=True, order=True)
class Experts:
    """A layer of `count` gated experts. A token uses `active` of them; each of `ranks` holds an
    equal share.

    `kept`: how a quantised checkpoint stores the matrices of MATRICES.
    """

    count: int
    active: int
    in_features: int
    inner_features: int
    has_bias: bool
    ranks: int = 1
    name: str = field(default="", compare=False)
    kept: tuple[KeptAs, ...] = field(default=(), compare=False)

    @property
    def held(self) -> int:
        return self.count // self.ranks

    @property
    def parts(self) -> tuple[Linear, Linear, Linear]:
        """The gate, up and down projections of one expert."""
        wide, narrow = self.in_features, self.inner_features
        up = Linear(narrow, wide, self.has_bias)
        return up, up, Linear(wide, narrow, self.has_bias)

    @property
    def elements(self) -> int:
        return self.held * sum(map(_elements, self.parts))


@dataclass(frozen=True)
class ModelSizes:
    """A checkpoint as its configuration and the shapes of its weights describe it.

    `widest`: values per token that the widest linear layer makes, the head not counted.
    `table_elements`: elements of embedding tables. `other_elements`: elements of all parameters
    outside tables, linear layers and experts that have a CPU kernel.
    `rotary_dims`: dims of each rotary embedding that a table by position can hold.
    `share_bytes`: bytes of the tables by which a rank finds its share.
    """

    architecture: str
    layers: tuple[LayerNeed, ...]
    max_seq_len: int
    hidden_size: int
    vocab_size: int
    widest: int
    linears: tuple[Linear, ...]
    table_elements: int
    other_elements: int
    rotary_dims: tuple[int, ...]
    experts: tuple[Experts, ...] = ()
    notes: tuple[str, ...] = ()
    """Sentences about the model that a plan prints."""
    share_bytes: int = 0
    most_seq_len: int = 0
    """Longest context, in tokens, that the user may ask for, if it is above `max_seq_len`."""

    @property
    def parameters(self) -> int:
        """Number of parameters; a tied table counts once."""
        own = sum(_elements(linear) for linear in self.linears if not linear.is_tied)
        mixtures = sum(each.elements for each in self.experts)
        return own + self.table_elements + self.other_elements + mixtures

    @property
    def active_parameters(self) -> int:
        """Number of parameters that compute one token: of experts, only those that it uses."""
        idle = (each.elements * (each.count - each.active) // each.count for each in self.experts)
        return self.parameters - sum(idle)

    def mixtures(self, dtype: str, bits: int | None, on_cpu: bool) -> list[Mixture]:
        """Records of expert layers, as an artifact's manifest has them; layers of one kind are one
        record."""
        return joined(
            Mixture(
                layers=1,
                experts=each.count,
                active=each.active,
                parameters=each.elements,
                bytes=_expert_bytes(each, dtype, _forms_of_experts(each, bits, on_cpu), on_cpu),
            )
            for each in self.experts
        )

    def kept_as(self, tensors: Mapping[str, KeptAs]) -> ModelSizes:
        """The same model with the forms in which a checkpoint stores its parameters.

        `tensors`: name of a parameter -> how it is stored; others are plain.
        """

        def of_experts(layer: Experts) -> tuple[KeptAs, ...]:
            names = (f"{layer.name}.{matrix}" for matrix in MATRICES)
            return tuple(tensors.get(name, kept_in(PLAIN)) for name in names)

        own = {
            each.name: tensors.get(f"{each.name}.weight", kept_in(PLAIN)) for each in self.linears
        }
        return replace(
            self,
            linears=tuple(
                replace(each, kept=tuple(own[n] for n in (each.name, each.joined_with) if n in own))
                for each in self.linears
            ),
            experts=tuple(replace(each, kept=of_experts(each)) for each in self.experts),
        )

    def weight_bytes(self, dtype: str, bits: int | None, on_cpu: bool = False) -> int:
        """Bytes of all weights, rotary tables included.

        `bits`: bits of packed linear layers; None: all weights are of `dtype`. Packed weights on a
        CPU have embedding tables in 16 bits.
        `on_cpu`: float32 experts are packed even if `bits` is None, as float32 then.
        A router that is a linear layer is counted as packed too. In fact it is not (linears.py),
        but its bytes are few.
        """
        table = self.table_elements * itemsize("bfloat16" if bits is not None and on_cpu else dtype)
        mixtures = sum(mixture.bytes for mixture in self.mixtures(dtype, bits, on_cpu))
        own = self._linear_bytes(dtype, bits, on_cpu, with_tied=bits is not None)
        tables = table + sum(self._rotary_tables()) + self.share_bytes
        return own + tables + mixtures + self._other_bytes(dtype)

    def read_bytes(self, dtype: str, bits: int | None, on_cpu: bool, rows: int) -> int:
        """Bytes of weights that a step of `rows` rows reads. Of tables, only a tied head counts."""
        mixtures = sum(mixture.read(rows) for mixture in self.mixtures(dtype, bits, on_cpu))
        return self._linear_bytes(dtype, bits, on_cpu) + mixtures + self._other_bytes(dtype)

    def _linear_bytes(
        self, dtype: str, bits: int | None, on_cpu: bool, *, with_tied: bool = True
    ) -> int:
        linears = [linear for linear in self.linears if with_tied or not linear.is_tied]
        if bits is None:
            return sum(map(_elements, linears)) * itemsize(dtype)
        if not on_cpu:
            return sum(_gpu_bytes(each, _form_of(each, bits, on_cpu), dtype) for each in linears)
        return sum(_packed_bytes(each, _form_of(each, bits, on_cpu)) for each in linears)

    def _other_bytes(self, dtype: str) -> int:
        return self.other_elements * itemsize(dtype)

    def _rotary_tables(self) -> list[int]:
        """Bytes of each table of cosines and sines by position that fuse_rope makes."""
        tables = [self.max_seq_len * dim * itemsize("float32") for dim in self.rotary_dims]
        return [nbytes for nbytes in tables if nbytes <= TABLE_BYTES]


def _elements(linear: Linear) -> int:
    return linear.out_features * (linear.in_features + linear.has_bias)


def _form_of(linear: Linear, bits: int, on_cpu: bool) -> Form:
    """The form in which a layer is packed. Kernels of GPUs join no layers of different forms."""
    if bits != AS_STORED:
        return Form(bits)
    kept = linear.kept if on_cpu else linear.kept[:1]
    return joined_form(kept, _takes(linear.in_features, on_cpu))[0]


def _forms_of_experts(experts: Experts, bits: int | None, on_cpu: bool) -> list[Form] | None:
    """The forms in which parts of experts are packed; None: plain, in the activations' dtype."""
    _, up, down = experts.parts
    if bits != AS_STORED:
        return None if bits is None else [Form(bits)] * len(experts.parts)
    first, second = (
        joined_form([kept], _takes(part.in_features, on_cpu))[0]
        for kept, part in zip(experts.kept, (up, down), strict=True)
    )
    return [first, first, second]


def _takes(inputs: int, on_cpu: bool) -> Takes:
    """Whether kernels support a form for layers of `inputs` inputs."""
    return (lambda form: form.sums(inputs)) if on_cpu else matrices.takes


def _expert_bytes(experts: Experts, dtype: str, forms: list[Form] | None, on_cpu: bool) -> int:
    if forms is None and (not on_cpu or dtype != "float32"):
        return experts.elements * itemsize(dtype)
    each = zip(experts.parts, forms or [Form(32)] * len(experts.parts), strict=True)
    if on_cpu:
        return experts.held * sum(_packed_bytes(part, form) for part, form in each)
    return experts.held * sum(_gpu_bytes(part, form, dtype, is_expert=True) for part, form in each)


def _gpu_bytes(linear: Linear, form: Form, dtype: str, *, is_expert: bool = False) -> int:
    """Bytes of a linear layer in the GPU kernels' layout (ops/matrices.py): quantised numbers, data
    of each group, and a bias in `dtype`."""
    if form.bits == PLAIN.bits:
        return _elements(linear) * itemsize(dtype)
    inputs = linear.in_features
    made = matrices.of_kernels(
        replace(form, group=min(form.group, inputs)), 0 if is_expert else inputs
    )
    of_group = 4 * made.has_scales + made.has_group_bytes
    groups = matrices.groups_of(inputs, made.bits, made.group)
    bias = itemsize(dtype) if linear.has_bias else 0
    each = matrices.depth_of(inputs, made.bits, made.group) + of_group * groups + bias
    return linear.out_features * each


def _packed_bytes(linear: Linear, form: Form) -> int:
    form = form if form.sums(linear.in_features) else PLAIN
    made = shapes([linear.out_features], linear.in_features, form, linear.has_bias)
    return sum(math.prod(shape) * itemsize(dtype) for shape, dtype in made.values())
