"""Tables of the declarations of all ops, which every form of the ops reads, and their version."""

from __future__ import annotations

from kvgraph.contract.dtypes import ALL
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

ABI_VERSION = 6
"""ABI version of the ops' C entry points; raised when kvg_call or the operands of an op change."""

DTYPE_CODES = {dtype.name: dtype.code for dtype in ALL if dtype.code}
"""Name of a dtype -> its number in the C ABI."""

SPECS: tuple[OpSpec, ...] = (STORE_KV, PAGED_ATTENTION, UPDATE_AND_ATTEND)
"""The cache ops, in the order of their C entry points."""

ALL_SPECS = (*SPECS, LINEAR, ALL_REDUCE, ALL_GATHER, EXPERTS, ROUTE)
"""Ops with native kernels for a CPU, in the order of the C header."""

FUSIONS: tuple[OpSpec, ...] = (RMS_NORM, SILU_MUL, FUSED_EXPERTS, QUANTIZED_LINEAR)
"""Ops that only torch programs for CUDA contain; a compiler pass inserts them."""
