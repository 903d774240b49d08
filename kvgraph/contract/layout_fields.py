"""Fields of a layout: plain data from which cache parameters are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from kvgraph.contract.plain import from_plain
from kvgraph.contract.values import shown
from kvgraph.errors import ParamsError


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


OPTIONAL = ("window_size", "quantization", "page_size")
"""Fields that a layout may lack: None, or no page size."""


def is_cache(layout: Mapping[str, object]) -> bool:
    """Whether `layout` has a field of a single cache, so that it is no tree of caches."""
    return any(field.name in layout for field in fields(Layout))


def require_named(layout: object, where: str = "layout") -> None:
    """Raise ParamsError unless `layout` has the fields of a cache, or such layouts by name.

    Values of a cache's fields are left to its parameters. `where` begins the messages.
    """
    named = as_mapping(layout, where)
    if is_cache(named):
        require_fields(named, where)
        return
    for name, inner in named.items():
        require_named(inner, f"{where}.{name}")


def require_fields(layout: object, where: str = "layout") -> None:
    """Raise ParamsError unless `layout` has the fields of one cache; values are not checked."""
    named = as_mapping(layout, where)
    _require_fields_of(Layout, named, where)
    if isinstance(quantization := named.get("quantization"), Mapping):
        _require_fields_of(Quantization, quantization, f"{where}.quantization")


def as_mapping(layout: object, where: str = "layout") -> Mapping[str, object]:
    """`layout` itself; ParamsError unless it is a mapping with an entry."""
    if not isinstance(layout, Mapping) or not layout:
        raise ParamsError(f"{where}: expected the fields of a cache, got {shown(layout)}")
    return layout


def _require_fields_of(kind: type, given: Mapping[str, object], where: str) -> None:
    names = [field.name for field in fields(kind)]
    for name in given:
        if name not in names:
            raise ParamsError(f"{where}: expected fields of a cache, got another one, {name!r:.40}")
    for name in names:
        if name not in given and name not in OPTIONAL:
            raise ParamsError(f"{where}: {name}: expected a value, got none")


def require_types(where: str, layout: object) -> None:
    """Raise ValueError for a field of a wrong type: parameters compare fields with numbers."""
    if not isinstance(layout, dict) or not layout:
        raise ValueError(f"{where}: expected a cache, got {layout!r}")
    if is_cache(layout):
        from_plain(Layout, layout, where)
        return
    for name, inner in layout.items():
        require_types(f"{where}.{name}", inner)
