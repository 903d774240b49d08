"""The declarations of all ops, in tables: a module of its own, which every form of an op reads."""

from __future__ import annotations

from kvgraph.ops._collectives import ALL_GATHER, ALL_REDUCE
from kvgraph.ops._experts import EXPERTS
from kvgraph.ops._fused_experts import FUSED_EXPERTS
from kvgraph.ops._linear import LINEAR
from kvgraph.ops._paged_attention import PAGED_ATTENTION
from kvgraph.ops._quantized_linear import QUANTIZED_LINEAR
from kvgraph.ops._rms_norm import RMS_NORM
from kvgraph.ops._route import ROUTE
from kvgraph.ops._silu_mul import SILU_MUL
from kvgraph.ops._store_kv import STORE_KV
from kvgraph.ops._update_and_attend import UPDATE_AND_ATTEND
from kvgraph.ops.spec import OpSpec

SPECS: tuple[OpSpec, ...] = (STORE_KV, PAGED_ATTENTION, UPDATE_AND_ATTEND)
"""The cache ops, in the order of their C entry points."""

CPU_SPECS: tuple[OpSpec, ...] = (LINEAR, ALL_REDUCE, ALL_GATHER, EXPERTS, ROUTE)
"""What only graphs for a CPU hold; after the cache ops in every table."""

ALL_SPECS = SPECS + CPU_SPECS
"""What has native kernels for a CPU, and is in the C header."""

FUSIONS: tuple[OpSpec, ...] = (RMS_NORM, SILU_MUL, FUSED_EXPERTS, QUANTIZED_LINEAR)
"""What only programs of torch for CUDA hold; a pass writes them."""
