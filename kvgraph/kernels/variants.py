"""The list of kernels, and their variants for a shape, which are compiled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from typing import Any

from kvgraph import ops
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels import shapes
from kvgraph.kernels.shapes import AttentionShape, PoolShape, Tiles, power_of_two
from kvgraph.ops.spec import Operand, OpSpec

ALIGNMENT = 16
"""Alignment in bytes of the address of every T, P and float32 operand."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """A run-time argument of a kernel; arguments are in ABI order. `type`: "*T" (pointer to the
    activations' dtype), "*P" (pointer to the dtype of the pool or the weight), "*fp32" or "*i32"
    (pointers), or "i32" (a value)."""

    name: str
    type: str

    @property
    def aligned(self) -> bool:
        """Whether it is an aligned pointer; index tensors are not: they may be views."""
        return self.type.startswith("*") and self.type != "*i32"


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function `name` of module `kvgraph.kernels.{module}`; constants follow its parameters.

    `revision`: raised when artifacts must not use the code that they contain.
    """

    name: str
    module: str
    parameters: tuple[Parameter, ...]
    revision: int = 0

    def function(self) -> Any:
        """Import Triton and return the kernel's Triton function."""
        return getattr(import_module(f"kvgraph.kernels.{self.module}"), self.name)


def _kernel(name: str, module: str, spec: OpSpec, parameters: str, *, revision: int = 0) -> Kernel:
    """Make a Kernel. `parameters`: names of the spec's operands, with their types, or name:type."""
    types = {operand.name: _pointer(operand) for operand in spec.inputs + spec.outputs}
    pairs = (parameter.partition(":") for parameter in parameters.split())
    return Kernel(name, module, tuple(Parameter(n, t or types[n]) for n, _, t in pairs), revision)


def _linear(name: str, parameters: str) -> Kernel:
    return _kernel(name, "quantized_linear", ops.QUANTIZED_LINEAR, parameters)


def _pointer(operand: Operand) -> str:
    return f"*{operand.type_variable or DTYPES[operand.dtypes[0]].triton}"


INDEX = "input_row_offsets cache_lengths lookup_table"
ROWS = "batch_size:i32 layer:i32 table_width:i32 tiles_per_row:i32 rows_below:i32"

STORE_KV = _kernel(
    "store_kv",
    "store_kv",
    ops.UPDATE_AND_ATTEND,
    f"kv_blocks k v {INDEX} cos_sin kv_scales k_norm {ROWS}",
)
PAGED_ATTENTION = _kernel(
    "paged_attention",
    "paged_attention",
    ops.UPDATE_AND_ATTEND,
    f"q kv_blocks {INDEX} cos_sin kv_scales sinks q_norm out partial_out:*fp32 "
    f"partial_state:*fp32 {ROWS} new_above:i32 new_upto:i32 num_parts:i32",
)
MERGE_PARTS = _kernel(
    "merge_parts",
    "paged_attention",
    ops.UPDATE_AND_ATTEND,
    "input_row_offsets cache_lengths sinks out partial_out:*fp32 partial_state:*fp32 "
    "tokens_per_row:i32 num_parts:i32",
)
RMS_NORM = _kernel("rms_norm", "rms_norm", ops.RMS_NORM, "x weight residual out num_rows:i32")
SILU_MUL = _kernel("silu_mul", "silu_mul", ops.SILU_MUL, "gate up out")
INCREMENT_CACHE_LENGTHS = _kernel(
    "increment_cache_lengths",
    "increment_cache_lengths",
    ops.UPDATE_AND_ATTEND,
    "cache_lengths input_row_offsets batch_size:i32",
)
ROUTE = _kernel("route", "route", ops.ROUTE, "logits bias indices weights")
SORT_SLOTS = _kernel(
    "sort_slots", "experts", ops.FUSED_EXPERTS, "indices order:*i32 offsets:*i32 num_slots:i32"
)
PLACE_TILES = _kernel(
    "place_tiles", "experts", ops.FUSED_EXPERTS, "offsets:*i32 tiles:*i32 num_tiles:i32"
)
EXPERTS_UP = _kernel(
    "experts_up",
    "experts",
    ops.FUSED_EXPERTS,
    "x up up_scales up_group_bytes up_bias order:*i32 tiles:*i32 inner:*T in_features:i32",
    revision=1,
)
EXPERTS_DOWN = _kernel(
    "experts_down",
    "experts",
    ops.FUSED_EXPERTS,
    "inner:*T down:*P down_scales down_group_bytes down_bias order:*i32 tiles:*i32 parts:*T "
    "inner_features:i32",
    revision=1,
)
SUM_EXPERTS = _kernel("sum_experts", "experts", ops.FUSED_EXPERTS, "parts:*T indices weights out")
QUANTIZED_LINEAR = _linear(
    "quantized_linear",
    "x rounded:*P row_scales:*fp32 weight scales group_bytes bias out out_1 out_2 sums:*fp32 "
    "num_rows:i32 in_features:i32 part_blocks:i32",
)
ROUND_ROWS = _linear("round_rows", "x rounded:*P row_scales:*fp32 restored:*T")
SUM_LINEAR = _linear(
    "sum_linear", "sums:*fp32 products:*T bias out out_1 out_2 num_rows:i32 num_parts:i32"
)
EXPAND_WEIGHT = _linear(
    "expand_weight", "weight scales group_bytes plain:*T first:i32 num_columns:i32"
)
KERNELS = (
    STORE_KV,
    PAGED_ATTENTION,
    MERGE_PARTS,
    RMS_NORM,
    SILU_MUL,
    INCREMENT_CACHE_LENGTHS,
    ROUTE,
    SORT_SLOTS,
    PLACE_TILES,
    EXPERTS_UP,
    EXPERTS_DOWN,
    SUM_EXPERTS,
    ROUND_ROWS,
    QUANTIZED_LINEAR,
    SUM_LINEAR,
    EXPAND_WEIGHT,
)

Constant = int | float | bool | str | None


@dataclass(frozen=True, slots=True)
class Variant:
    """A kernel with its constants; it is compiled once per architecture.

    `absent`: parameters that are compiled away and are not part of the launch ABI.
    """

    kernel: Kernel
    role: str
    dtype: str
    pool_dtype: str
    constants: Mapping[str, Constant] = field(hash=False)
    num_warps: int
    num_stages: int
    absent: frozenset[str] = frozenset()
    parameters: tuple[Parameter, ...] = field(init=False, compare=False)
    """Parameters of the launch ABI, with resolved types; two null scratch pointers follow them."""
    name: str = field(init=False, compare=False)
    """Unique name of the compiled code, the same in every process."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", self._parameters())
        object.__setattr__(self, "name", self._name())

    def _parameters(self) -> tuple[Parameter, ...]:
        types = {
            "*T": f"*{DTYPES[self.dtype].triton}",
            "*P": f"*{DTYPES[self.pool_dtype].triton}",
        }
        return tuple(
            Parameter(p.name, types.get(p.type, p.type))
            for p in self.kernel.parameters
            if p.name not in self.absent
        )

    def _name(self) -> str:
        said = [
            self.kernel.name,
            self.num_warps,
            self.num_stages,
            [[p.name, p.type] for p in self.parameters],
            sorted(self.constants.items()),
            *([self.kernel.revision] if self.kernel.revision else []),
        ]
        digest = hashlib.sha256(json.dumps(said).encode()).hexdigest()[:12]
        role = f"-{self.role}" if self.role else ""
        return f"{self.kernel.name}{role}-{digest}"


@lru_cache
def store_variant(shape: AttentionShape) -> Variant:
    cache = shape.cache
    constants: dict[str, Constant] = {
        **_pool_constants(cache),
        "LARGEST": DTYPES[cache.pool_dtype].largest,
        "GRANULARITY": cache.granularity,
        **shape.head_constants,
        "BLOCK_R": 16,
        "BLOCK_D": power_of_two(cache.head_dim, 16),
        "BLOCK_E": power_of_two(cache.v_width, 16),
    }
    absent = absent_of(
        cos_sin=shape.rope is None,
        kv_scales=cache.quantized is None,
        k_norm=shape.norm is None,
    )
    return Variant(STORE_KV, "", cache.dtype, cache.pool_dtype, constants, 4, 2, absent)


def prefill_variant(shape: AttentionShape, arch: str) -> Variant:
    """Variant for rows with more new tokens than a decode tile has."""
    return _attention_variant(shape, arch, "prefill", shapes.prefill_tiles(shape, arch))


def decode_variant(shape: AttentionShape, arch: str, *, split: bool) -> Variant:
    """Variant for rows whose new tokens fit one tile of few query rows."""
    role = "decode_split" if split else "decode"
    return _attention_variant(shape, arch, role, shapes.decode_tiles(shape, arch))


@lru_cache
def merge_variant(shape: AttentionShape, arch: str) -> Variant:
    tiles = shapes.decode_tiles(shape, arch)
    constants: dict[str, Constant] = {
        "HEADS": shape.heads,
        "V_HEAD_DIM": shape.cache.v_width,
        "WINDOW": shape.window,
        "CHUNKED": shape.chunked,
        "CAUSAL": shape.causal,
        "SINKS": shape.sinks,
        "MIN_PART": shapes.MIN_PART,
        "BLOCK_T": tiles.block_m // shape.group,
        "BLOCK_N": tiles.block_n,
        "BLOCK_P": shapes.MAX_PARTS,
        "BLOCK_E": power_of_two(shape.cache.v_width, 16),
    }
    cache, absent = shape.cache, absent_of(sinks=not shape.sinks)
    return Variant(MERGE_PARTS, "", cache.dtype, cache.pool_dtype, constants, 4, 1, absent)


def attention_variants(shape: AttentionShape, arch: str) -> tuple[Variant, ...]:
    """Every kernel that a plan of attention may launch for `shape`."""
    return (
        prefill_variant(shape, arch),
        decode_variant(shape, arch, split=False),
        decode_variant(shape, arch, split=True),
        merge_variant(shape, arch),
    )


@lru_cache
def _attention_variant(shape: AttentionShape, arch: str, role: str, tiles: Tiles) -> Variant:
    cache, split = shape.cache, role == "decode_split"
    constants: dict[str, Constant] = {
        "HEADS": shape.heads,
        **_pool_constants(cache),
        "SCALE": shape.scale,
        "WINDOW": shape.window,
        "CHUNKED": shape.chunked,
        "SOFTCAP": shape.softcap,
        "CAUSAL": shape.causal,
        "SINKS": shape.sinks,
        "FP8_NATIVE": shapes.capability(arch) >= 89,
        "GRANULARITY": cache.granularity,
        # In float16 a weight times a small scale may underflow; otherwise scaling weights is
        # cheaper.
        "SCALE_V_TILE": cache.dtype == "float16",
        **shape.head_constants,
        "PRECISION": "ieee" if cache.dtype == "float32" else "tf32",
        "SPLIT": split,
        "MIN_PART": shapes.MIN_PART,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "BLOCK_D": power_of_two(cache.head_dim, 16),
        "BLOCK_E": power_of_two(cache.v_width, 16),
    }
    absent = absent_of(
        cos_sin=shape.rope is None,
        kv_scales=cache.quantized is None,
        sinks=not shape.sinks or split,
        q_norm=shape.norm is None,
        out=split,
        partial_out=not split,
        partial_state=not split,
    )
    return Variant(
        PAGED_ATTENTION,
        role,
        cache.dtype,
        cache.pool_dtype,
        constants,
        tiles.num_warps,
        tiles.num_stages,
        absent,
    )


def _pool_constants(cache: PoolShape) -> dict[str, Constant]:
    return {
        "KV_HEADS": cache.kv_heads,
        "HEAD_DIM": cache.head_dim,
        "V_HEAD_DIM": cache.v_width,
        "PAGE_SIZE": cache.page_size,
        "LAYERS": cache.num_layers,
        "QUANTIZED": cache.quantized,
    }


def absent_of(**names: bool) -> frozenset[str]:
    return frozenset(name for name, gone in names.items() if gone)


def rms_norm_variant(
    dtype: str,
    width: int,
    epsilon: float,
    *,
    residual: bool = False,
    weight_offset: float = 0.0,
    round_first: bool = False,
    x_stride: int = 0,
) -> Variant:
    """Variant of rms_norm. `weight_offset`: 1 for Gemma. `round_first`: round to dtype before the
    weight, as in Llama. `x_stride`: 0 means that x is a whole tensor."""
    block = power_of_two(width, 16)
    rows = max(1, 2048 // block)
    constants: dict[str, Constant] = {
        "WIDTH": width,
        "X_STRIDE": x_stride or width,
        "EPSILON": epsilon,
        "WEIGHT_OFFSET": weight_offset,
        "ROUND_FIRST": round_first and dtype != "float32",
        "RESIDUAL": residual,
        "BLOCK_R": rows,
        "BLOCK_D": block,
    }
    warps = min(max(block * rows // 512, 1), 16)
    return Variant(
        RMS_NORM, "", dtype, dtype, constants, warps, 1, absent_of(residual=not residual)
    )


def silu_mul_variant(
    dtype: str, width: int, *, gate_stride: int = 0, up_stride: int = 0
) -> Variant:
    """Variant of silu_mul. Strides of 0 mean that gate and up are whole tensors."""
    constants: dict[str, Constant] = {
        "WIDTH": width,
        "GATE_STRIDE": gate_stride or width,
        "UP_STRIDE": up_stride or width,
        "BLOCK_D": min(power_of_two(width, 16), 1024),
    }
    return Variant(SILU_MUL, "", dtype, dtype, constants, 4, 1)


def rms_norm_of(
    dtype: str,
    shapes: Mapping[str, tuple[int, ...]],
    strides: Mapping[str, int],
    attributes: Mapping[str, float],
) -> Variant:
    """Variant for a call of rms_norm; x's rows are `strides["x"]` elements apart."""
    return rms_norm_variant(
        dtype,
        shapes["x"][-1],
        attributes["epsilon"],
        residual="residual" in shapes,
        weight_offset=attributes["weight_offset"],
        round_first=bool(attributes["round_first"]),
        x_stride=strides["x"],
    )


def silu_mul_of(
    dtype: str, shapes: Mapping[str, tuple[int, ...]], strides: Mapping[str, int]
) -> Variant:
    """Variant for a call of silu_mul; rows are `strides` elements apart."""
    width = shapes["gate"][-1]
    return silu_mul_variant(dtype, width, gate_stride=strides["gate"], up_stride=strides["up"])


def increment_variant() -> Variant:
    return Variant(INCREMENT_CACHE_LENGTHS, "", "int32", "int32", {"BLOCK_B": 256}, 4, 1)
