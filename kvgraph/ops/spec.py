"""OpSpec: what one op takes, returns and means; frameworks' registrations are generated from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

OPSET_DOMAIN = "kvgraph"
OPSET_VERSION = 1

ACTIVATION = ("float32", "float16", "bfloat16")
POOL = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn")
WEIGHT = ("bfloat16", "int8")
INDEX = ("int32",)
FLOAT32 = ("float32",)


@dataclass(frozen=True)
class Operand:
    """One tensor of an op: dims by name (equal names are equal extents), dtypes it may have.

    `alias` names the input whose memory an output is: both must have one address.
    """

    name: str
    dims: tuple[str | int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False
    alias: str | None = None

    @property
    def type_variable(self) -> str | None:
        """Operands that share a set of several dtypes share one dtype per call."""
        return {ACTIVATION: "T", POOL: "P", WEIGHT: "P"}.get(self.dtypes)


@dataclass(frozen=True)
class Attribute:
    """One constant of an op. `default=None` means that a caller must give it."""

    name: str
    kind: Literal["int", "float"]
    default: int | float | None = None


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

    @property
    def mutated(self) -> frozenset[str]:
        """Names of the inputs that the op writes: those that an output aliases."""
        return frozenset(out.alias for out in self.outputs if out.alias)

    def arguments(self, args: Sequence[Any], attributes: Mapping[str, Any]) -> dict[str, Any]:
        """What a call passes, by name: inputs left out are None, attributes their defaults."""
        names = [operand.name for operand in self.inputs]
        defaults = {a.name: a.default for a in self.attributes}
        given = dict(zip(names, args, strict=False))
        return defaults | dict.fromkeys(names) | given | dict(attributes)

    @property
    def results(self) -> tuple[Operand, ...]:
        """Outputs that are new memory."""
        return tuple(out for out in self.outputs if out.alias is None)


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
OUT = Operand("out", ("total_seq_len", "num_heads", "v_head_dim"), ACTIVATION)
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
)
