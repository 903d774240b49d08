"""The paged-cache ops: one declaration each, from which every framework's form is derived.

`store_kv`, `paged_attention` and `update_and_attend` here are the torch forms, which an author's
own `nn.Module` calls; torch is imported when the first of them is looked up.
"""

from __future__ import annotations

from typing import Any

from kvgraph.ops._linear import LINEAR
from kvgraph.ops._paged_attention import PAGED_ATTENTION
from kvgraph.ops._store_kv import STORE_KV
from kvgraph.ops._update_and_attend import UPDATE_AND_ATTEND
from kvgraph.ops.spec import OPSET_DOMAIN, OPSET_VERSION, OpSpec

SPECS: tuple[OpSpec, ...] = (STORE_KV, PAGED_ATTENTION, UPDATE_AND_ATTEND)
"""The cache ops, in the order of their C entry points."""

CPU_SPECS: tuple[OpSpec, ...] = (LINEAR,)
"""What only graphs for a CPU hold; after the cache ops in every table."""

ALL_SPECS = SPECS + CPU_SPECS


def __getattr__(name: str) -> Any:
    if name in {spec.name for spec in ALL_SPECS}:
        from kvgraph.ops import torch_ops

        return getattr(torch_ops, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "ALL_SPECS",
    "CPU_SPECS",
    "LINEAR",
    "OPSET_DOMAIN",
    "OPSET_VERSION",
    "PAGED_ATTENTION",
    "SPECS",
    "STORE_KV",
    "UPDATE_AND_ATTEND",
    "OpSpec",
]
