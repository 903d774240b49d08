"""The layout in a manifest: plain data from which cache parameters are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from kvgraph.contract.plain import from_plain

if TYPE_CHECKING:
    from kvgraph.contract.params import KVCacheParamInterface


@dataclass(frozen=True, slots=True)
class Quantization:
    """Types of the fields of a layout's `quantization`."""

    dtype: str
    scale_dtype: str
    granularity: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Types of the fields of a single cache's layout."""

    dtype: str
    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    num_layers: int
    window_size: int | None
    quantization: Quantization | None
    is_mla: bool
    layout: str
    cache_strategy: str
    n_shards: int
    page_size: int = 0  # only a paged cache has one


def require_layout(where: str, layout: Mapping[str, object]) -> KVCacheParamInterface:
    """Parameters of the cache or tree of caches with this layout. Raises ValueError (ParamsError is
    one) for any other layout. `where` begins the messages about fields of wrong names or types."""
    from kvgraph.contract.trees import params_from_layout  # only readers of a manifest need it

    _require_types(where, layout)
    try:
        return params_from_layout(layout)
    except TypeError as error:  # a field that no cache has
        raise ValueError(f"{where}: expected fields of a cache, got another ({error})") from error


def _require_types(where: str, layout: object) -> None:
    """Raise ValueError for a field of a wrong type: parameters compare fields with numbers."""
    if not isinstance(layout, dict) or not layout:
        raise ValueError(f"{where}: expected a cache, got {layout!r}")
    if any(field.name in layout for field in fields(Layout)):
        from_plain(Layout, layout, where)
        return
    for name, inner in layout.items():
        _require_types(f"{where}.{name}", inner)
