"""The ops of kvgraph's graphs: each has one declaration, from which all of its forms are derived.

The functions here, such as `store_kv`, are the torch forms, for the author of an `nn.Module`; torch
is imported when the first of them is looked up: MissingDependencyError without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraph.ops._collectives import ALL_GATHER as ALL_GATHER
from kvgraph.ops._collectives import ALL_REDUCE as ALL_REDUCE
from kvgraph.ops._experts import EXPERTS as EXPERTS
from kvgraph.ops._fused_experts import FUSED_EXPERTS as FUSED_EXPERTS
from kvgraph.ops._linear import LINEAR as LINEAR
from kvgraph.ops._paged_attention import PAGED_ATTENTION as PAGED_ATTENTION
from kvgraph.ops._quantized_linear import QUANTIZED_LINEAR as QUANTIZED_LINEAR
from kvgraph.ops._rms_norm import RMS_NORM as RMS_NORM
from kvgraph.ops._route import ROUTE as ROUTE
from kvgraph.ops._silu_mul import SILU_MUL as SILU_MUL
from kvgraph.ops._store_kv import STORE_KV as STORE_KV
from kvgraph.ops._update_and_attend import UPDATE_AND_ATTEND as UPDATE_AND_ATTEND
from kvgraph.ops.spec import OPSET_DOMAIN as OPSET_DOMAIN
from kvgraph.ops.spec import OPSET_VERSION as OPSET_VERSION
from kvgraph.ops.spec import OpSpec as OpSpec
from kvgraph.ops.specs import ALL_SPECS as ALL_SPECS
from kvgraph.ops.specs import FUSIONS as FUSIONS
from kvgraph.ops.specs import SPECS as SPECS

FUNCTIONS = tuple(spec.name for spec in ALL_SPECS)
"""Names of the ops that the author of a model can call."""

# generated: signatures
if TYPE_CHECKING:
    from torch import Tensor

    def store_kv(
        kv_blocks: Tensor,
        k: Tensor,
        v: Tensor,
        input_row_offsets: Tensor,
        cache_lengths: Tensor,
        lookup_table: Tensor,
        kv_scales: Tensor | None = None,
        *,
        layer: int,
    ) -> None:
        """Write K and V of the new tokens of one layer into the pages that the lookup table
        names."""
        ...

    def paged_attention(
        q: Tensor,
        kv_blocks: Tensor,
        input_row_offsets: Tensor,
        cache_lengths: Tensor,
        lookup_table: Tensor,
        max_lengths: Tensor,
        kv_scales: Tensor | None = None,
        sinks: Tensor | None = None,
        *,
        layer: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        causal: int = 1,
        v_head_dim: int = 0,
        chunked: int = 0,
    ) -> Tensor:
        """Attention of every new token over the cached and new tokens of its row."""
        ...

    def update_and_attend(
        q: Tensor,
        kv_blocks: Tensor,
        input_row_offsets: Tensor,
        cache_lengths: Tensor,
        lookup_table: Tensor,
        max_lengths: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        cos_sin: Tensor | None = None,
        kv_scales: Tensor | None = None,
        sinks: Tensor | None = None,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        *,
        layer: int,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        causal: int = 1,
        v_head_dim: int = 0,
        chunked: int = 0,
        rope_style: int = 0,
        norm_epsilon: float = 0.0,
        norm_offset: float = 0.0,
    ) -> Tensor:
        """One layer's cache work: RMSNorm of each head of q and k (if q_norm is given), rotate
        them (if cos_sin is given), store k and v, attend."""
        ...

    def linear(
        x: Tensor,
        weight: Tensor,
        scales: Tensor | None = None,
        group_bytes: Tensor | None = None,
        bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        out_features: int,
        out_features_1: int = 0,
        out_features_2: int = 0,
        bits: int,
        group: int = 0,
        codes: int = 0,
        silu_mul: int = 0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Up to three linear layers of one input, over weights packed in panels of 16
        columns."""
        ...

    def all_reduce(x: Tensor, residual: Tensor | None = None, *, ranks: int) -> Tensor:
        """The sum of x over all ranks, and a residual that is added once."""
        ...

    def all_gather(x: Tensor, *, ranks: int, out_width: int) -> Tensor:
        """The columns of x of all ranks next to each other, in the order of the ranks."""
        ...

    def experts(
        x: Tensor,
        indices: Tensor,
        weights: Tensor,
        up: Tensor,
        down: Tensor,
        up_scales: Tensor | None = None,
        up_group_bytes: Tensor | None = None,
        up_bias: Tensor | None = None,
        down_scales: Tensor | None = None,
        down_group_bytes: Tensor | None = None,
        down_bias: Tensor | None = None,
        residual: Tensor | None = None,
        *,
        inner_features: int,
        up_bits: int,
        up_group: int = 0,
        up_codes: int = 0,
        down_bits: int,
        down_group: int = 0,
        down_codes: int = 0,
        activation: int = 0,
        alpha: float = 1.0,
        limit: float = 0.0,
        up_offset: float = 0.0,
    ) -> Tensor:
        """The gated MLPs of each row's experts, weighed and summed, over packed weights."""
        ...

    def route(
        logits: Tensor,
        bias: Tensor | None = None,
        *,
        num_active: int,
        scores: int = 0,
        normalize: int = 0,
        epsilon: float = 0.0,
        least_total: float = 0.0,
        scale: float = 1.0,
        num_groups: int = 1,
        active_groups: int = 1,
        group_best: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """The best experts of each row, and their weights, from a router's logits."""
        ...
# end of generated

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name in FUNCTIONS:
            from kvgraph.contract.loading import require_package

            # torch must be first: it registers the ops (kvgraph/_torch.py)
            need = f"needed for kvgraph.ops.{name}"
            require_package("torch", need, "pip install 'kvgraph[compile]'")

            from kvgraph.ops import torch_ops

            return getattr(torch_ops, name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *FUNCTIONS])


__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "ALL_SPECS",
    "EXPERTS",
    "FUSED_EXPERTS",
    "FUSIONS",
    "LINEAR",
    "OPSET_DOMAIN",
    "OPSET_VERSION",
    "PAGED_ATTENTION",
    "QUANTIZED_LINEAR",
    "RMS_NORM",
    "ROUTE",
    "SILU_MUL",
    "SPECS",
    "STORE_KV",
    "UPDATE_AND_ATTEND",
    "OpSpec",
]
