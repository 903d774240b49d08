"""OpSpec: declaration of one op, from which the registrations of all frameworks are generated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from math import inf, isfinite
from typing import Any, Literal, TypeVar

from kvgraph.contract import dtypes

OPSET_DOMAIN = "kvgraph"
OPSET_VERSION = 1

ACTIVATION, QUANTIZED, POOL = dtypes.ACTIVATIONS, dtypes.QUANTIZED, dtypes.POOLS
WEIGHT = (*dict.fromkeys(dtypes.PACKED.values()), dtypes.PACKED_FLOAT8)
MATRIX = (*dtypes.ACTIVATIONS, "int8", dtypes.PACKED_FLOAT8)
"""Dtypes of a weight on a GPU: an activations' dtype, or numbers of fewer bits with scales."""
OTHER_WEIGHT = "Q"
"""Type variable of a second weight, whose dtype may be another."""
INDEX = ("int32",)
FLOAT32 = ("float32",)

LOST = "0, or a number that is not 0 in float32"

T = TypeVar("T")


@dataclass(frozen=True)
class Operand:
    """One tensor of an op: dims by name (equal names are equal extents), and allowed dtypes.

    A first dim "..." stands for any number of dims, the same in all operands that have it.
    `alias`: name of the input that an output shares its memory with: both have one address.
    `default_width`: dim of the inputs that is an output's last extent if no attribute sets it.
    `variable`: the type variable, if it is not the one of all operands with these dtypes.
    """

    name: str
    dims: tuple[str | int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    alias: str | None = None
    default_width: str | None = None
    variable: str | None = None

    def dims_of(self, rank: int) -> tuple[str | int, ...] | None:
        """The dims of a tensor of `rank`; None if the operand cannot have this rank."""
        own = self.dims[1:] if self.dims[0] == "..." else self.dims
        leading = rank - len(own)
        if leading < 0 or (leading > 0 and own is self.dims):
            return None
        return (*(f"leading {i}" for i in range(leading)), *own)

    def is_left_out(self, attributes: Mapping[str, Any]) -> bool:
        """Whether a call with `attributes` leaves this output out."""
        return self.optional and (attributes.get(str(self.dims[-1])) or 0) <= 0

    @property
    def type_variable(self) -> str | None:
        """Name of the type variable: operands with the same one share one dtype per call. None if
        the operand has no choice of dtypes."""
        return self.variable or {ACTIVATION: "T", POOL: "P", WEIGHT: "P", MATRIX: "P"}.get(
            self.dtypes
        )


@dataclass(frozen=True)
class Attribute:
    """One constant of an op. `default`: None means that the caller must give a value."""

    name: str
    kind: Literal["int", "float", "bool"]
    default: int | float | None = None


@dataclass(frozen=True)
class Rule:
    """A condition on a call besides equal dims and dtypes.

    `fault(...)` takes the values of `names`, by default its parameters' names: attributes, static
    dims, and dtypes of operands (None: left out). It returns a text of the expected value, or a
    false value if the call is right. `subject`: ends with the name of the wrong value. `got`:
    replaces its value in the message. A rule with a dim that is symbolic or has no extent is
    skipped.
    """

    subject: str
    fault: Callable[..., bool | str]
    got: str = ""
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.names:
            object.__setattr__(self, "names", tuple(signature(self.fault).parameters))


def finite(name: str) -> Rule:
    """Rule that attribute `name` is finite in float32, and not rounded to 0 unless it is 0."""

    def fault(given: float) -> bool | str:
        narrowed = c_float(given).value
        if not isfinite(narrowed):
            return "a finite number in float32"
        return narrowed == 0 != given and LOST

    return Rule(name, fault, names=(name,))


def at_least_0(name: str) -> Rule:
    def fault(given: float) -> bool | str:
        narrowed = c_float(given).value
        if not 0 <= narrowed < inf:
            return "at least 0, and finite in float32"
        return narrowed == 0 != given and LOST

    return Rule(name, fault, names=(name,))


@dataclass(frozen=True)
class OpSpec:
    """One op of domain `kvgraph`: inputs in order, outputs in order, attributes, NumPy reference.

    `reference(*inputs, **attributes)` takes NumPy arrays (None where an optional input is left
    out), mutates the pool (and scales) in place, and returns the outputs that alias nothing.
    """

    name: str
    doc: str
    inputs: tuple[Operand, ...]
    outputs: tuple[Operand, ...]
    attributes: tuple[Attribute, ...]
    reference: Callable[..., Any]
    rules: tuple[Rule, ...] = ()

    @property
    def mutated(self) -> frozenset[str]:
        """Names of the inputs that the op writes: an output aliases each of them."""
        return frozenset(out.alias for out in self.outputs if out.alias)

    def arguments(self, args: Sequence[object], attributes: Mapping[str, object]) -> dict[str, Any]:
        """Arguments of a call by name: missing inputs are None, missing attributes are defaults."""
        names = [operand.name for operand in self.inputs]
        defaults = {a.name: a.default for a in self.attributes}
        given = dict(zip(names, args, strict=False))
        return defaults | dict.fromkeys(names) | given | dict(attributes)

    def call(self, given: Mapping[str, T]) -> tuple[tuple[T, ...], dict[str, T]]:
        """Inverse of `arguments`: inputs and attributes of the call, without defaults."""
        inputs = [given[operand.name] for operand in self.inputs]
        while inputs and inputs[-1] is None:
            inputs.pop()
        others = [a for a in self.attributes if given[a.name] != a.default]
        return tuple(inputs), {a.name: given[a.name] for a in others}

    def type_of(
        self, out: Operand, types: Sequence[T | None], named: Callable[[str], T]
    ) -> T | None:
        """Type of an output for inputs of `types` (None: left out, or not known): the type of the
        input with which it shares memory or a type variable, otherwise `named` of its only dtype.
        """
        if not out.alias and out.type_variable is None:
            return named(out.dtypes[0])
        for operand, found in zip(self.inputs, types, strict=False):
            is_source = (
                operand.name == out.alias
                if out.alias
                else operand.type_variable == out.type_variable
            )
            if is_source and found is not None:
                return found
        return None

    def extents(
        self, out: Operand, shapes: Sequence[Sequence[Any] | None], attributes: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Shape of an output for inputs of `shapes` (None: left out); None for unknown extents.

        An attribute with the name of the last dim is its extent.
        """
        *others, last = out.dims
        given = attributes.get(str(last))
        if given is not None and (given > 0 or out.default_width is None):
            width = max(given, 0)
        else:
            width = self._extent(out.default_width or last, shapes)
        if others[:1] == ["..."]:  # the leading dims of the first input
            return (*(shapes[0] or ())[: 1 - len(self.inputs[0].dims)], width)
        return (*(self._extent(dim, shapes) for dim in others), width)

    def _extent(self, dim: str | int, shapes: Sequence[Sequence[Any] | None]) -> Any:
        """Extent of `dim` in the first input that has it; None if unknown."""
        for index, axis in self._places.get(dim, ()):
            shape = shapes[index] if index < len(shapes) else None
            if shape is not None and -len(shape) <= axis < len(shape):
                return shape[axis]
        return None

    @cached_property
    def _places(self) -> dict[str | int, list[tuple[int, int]]]:
        """Places of each dim: index of an input, and axis (from the end if it has a "...")."""
        places: dict[str | int, list[tuple[int, int]]] = {}
        for index, operand in enumerate(self.inputs):
            behind = len(operand.dims) if operand.dims[0] == "..." else 0
            for axis, dim in enumerate(operand.dims, start=-behind):
                places.setdefault(dim, []).append((index, axis))
        return places

    @property
    def results(self) -> tuple[Operand, ...]:
        """Outputs that are new memory."""
        return tuple(out for out in self.outputs if out.alias is None)


ROWS = ("...", "width")
"""Dims of an operand that is computed row by row, with any leading dims."""

# Operands that several ops share. Legend: T new tokens of all rows, N query heads, K kv heads,
# D head_dim, Dv v_head_dim, B rows.
POOL_DIMS = ("num_page_slots", "kv_dim", "num_layers", "page_size", "num_kv_heads")

Q = Operand("q", ("total_seq_len", "num_heads", "head_dim"), ACTIVATION)
K = Operand("k", ("total_seq_len", "num_kv_heads", "head_dim"), ACTIVATION)
V = Operand("v", ("total_seq_len", "num_kv_heads", "v_head_dim"), ACTIVATION)
KV_BLOCKS = Operand("kv_blocks", (*POOL_DIMS, "head_dim"), POOL)
ROW_OFFSETS = Operand("input_row_offsets", ("batch_size + 1",), INDEX)
CACHE_LENGTHS = Operand("cache_lengths", ("batch_size",), INDEX)
LOOKUP_TABLE = Operand("lookup_table", ("batch_size", "max_num_pages"), INDEX)
MAX_LENGTHS = Operand("max_lengths", ("num_steps", 2), INDEX)
COS_SIN = Operand("cos_sin", ("max_positions", "rotary_dim"), FLOAT32, optional=True)
KV_SCALES = Operand("kv_scales", (*POOL_DIMS, "scales_per_head"), FLOAT32, optional=True)
SINKS = Operand("sinks", ("num_heads",), FLOAT32, optional=True)
OUT = Operand(
    "out", ("total_seq_len", "num_heads", "v_head_dim"), ACTIVATION, default_width="head_dim"
)
KV_BLOCKS_OUT = Operand("kv_blocks_out", KV_BLOCKS.dims, POOL, alias="kv_blocks")
KV_SCALES_OUT = Operand("kv_scales_out", KV_SCALES.dims, FLOAT32, optional=True, alias="kv_scales")

LAYER = Attribute("layer", "int")
ATTENTION_ATTRIBUTES = (
    LAYER,
    Attribute("scale", "float"),
    Attribute("window", "int", 0),
    Attribute("softcap", "float", 0.0),
    Attribute("causal", "int", 1),
    Attribute("v_head_dim", "int", 0),
    Attribute("chunked", "int", 0),
)


def _scales_fault(scales_per_head: int, head_dim: int, v_head_dim: int) -> bool | str:
    fits = 1 <= scales_per_head <= head_dim and head_dim % scales_per_head == 0
    if fits and v_head_dim % (head_dim // scales_per_head) == 0:
        return False
    return f"groups that divide head_dim {head_dim} and v_head_dim {v_head_dim}"


def _missing_scales(kv_scales: str | None, kv_blocks: str) -> bool | str:
    missing = kv_scales is None and kv_blocks in QUANTIZED
    return missing and f"scales with a pool of dtype {kv_blocks}"


def _unwanted_scales(kv_scales: str | None, kv_blocks: str) -> bool | str:
    unwanted = kv_scales is not None and kv_blocks not in QUANTIZED
    return unwanted and f"none with a pool of dtype {kv_blocks}"


def _heads_fault(num_heads: int, num_kv_heads: int) -> bool | str:
    fits = num_heads % num_kv_heads == 0 if num_kv_heads else num_heads == 0
    return not fits and f"a multiple of the {num_kv_heads} kv heads of kv_blocks"


def _layer_fault(layer: int, num_layers: int) -> bool | str:
    return not 0 <= layer < num_layers and f"one of the {num_layers} layers of kv_blocks"


def _v_head_dim_fault(v_head_dim: int, head_dim: int) -> bool | str:
    return not 0 <= v_head_dim <= head_dim and f"at most head_dim {head_dim}"


def _chunked_fault(chunked: int, window: int) -> bool | str:
    if chunked not in (0, 1):
        return "0 or 1"
    return bool(chunked) and window == 0 and "0 without a window"


POOL_RULES = (
    Rule("kv_blocks: dim kv_dim", lambda kv_dim: kv_dim != 2 and "2 (K, then V)"),
    Rule("kv_blocks: dim page_size", lambda page_size: page_size < 1 and "at least 1"),
    Rule("layer", _layer_fault),
    Rule("v_head_dim", _v_head_dim_fault),
    Rule("kv_scales", _missing_scales),
    Rule("kv_scales", _unwanted_scales, got="scales"),
    Rule("kv_scales: dim scales_per_head", _scales_fault),
)
ATTENTION_RULES = (
    finite("scale"),
    Rule("window", lambda window: window < 0 and "at least 0"),
    at_least_0("softcap"),
    Rule("causal", lambda causal: causal not in (0, 1) and "0 or 1"),
    Rule("chunked", _chunked_fault),
    *POOL_RULES,
    Rule("q: dim num_heads", _heads_fault),
)
