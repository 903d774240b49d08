"""Several caches behind one request: parameters and symbols of a tree of caches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypedDict, Unpack, cast

from kvgraph.contract.devices import Device
from kvgraph.contract.layout_fields import as_mapping, is_cache, require_named
from kvgraph.contract.params import LAYOUT_FIELDS, KVCacheParams, KVCacheStrategy, as_devices
from kvgraph.contract.symbols import (
    KVCacheInputSymbols,
    MultiKVCacheInputSymbols,
    paged_symbols,
)
from kvgraph.contract.values import shown
from kvgraph.errors import ParamsError

SHARED_FIELDS = (
    "page_size",
    "devices",
    "data_parallel_degree",
    "enable_prefix_caching",
    "hash_algorithm",
    "hash_seed",
    "cache_strategy",
)
"""Fields that are equal in all leaves of a tree: a request has one set of rows in all of them."""


@dataclass(frozen=True)
class MultiKVCacheParams:
    """Several caches behind one request, by name; nests. Make one with `from_params`.

    All leaves agree on `SHARED_FIELDS`; a page of the tree is one page of every leaf.
    """

    children: tuple[tuple[str, KVCacheParams | MultiKVCacheParams], ...]

    @classmethod
    def from_params(
        cls, params: Mapping[str, KVCacheParams | MultiKVCacheParams]
    ) -> MultiKVCacheParams:
        """Make a tree of the given caches; ParamsError names a field in which two caches differ."""
        if not isinstance(params, Mapping):
            raise ParamsError(f"params: expected caches by name, got {shown(params)}")
        return cls(tuple(params.items()))

    def __post_init__(self) -> None:
        pairs = self.children if isinstance(self.children, tuple | list) else (None,)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ParamsError(
                "MultiKVCacheParams: expected pairs of a name and a cache, got "
                f"{shown(self.children)}; make one with from_params"
            )
        if not self.children:
            raise ParamsError("MultiKVCacheParams: expected at least one cache, got none")
        for name, child in self.children:
            if not isinstance(name, str) or not name.isidentifier() or name in LAYOUT_FIELDS:
                raise ParamsError(
                    f"cache name: expected an identifier that is no layout field, got {name!r}"
                )
            if not isinstance(child, KVCacheParams | MultiKVCacheParams):
                raise ParamsError(f"cache {name!r}: expected KVCacheParams, got {shown(child)}")
        names = [name for name, _ in self.children]
        for name in names:
            if names.count(name) > 1:
                raise ParamsError(f"cache name: expected each once, got {name!r} twice")
        dims = [path.replace(".", "_") for path in self.leaves]
        for path, dim in zip(self.leaves, dims, strict=True):
            if dims.count(dim) > 1:
                raise ParamsError(
                    f"cache name: expected names whose dims differ, got {path!r} and another "
                    f"leaf whose dims begin with {dim}_"
                )
        (first, reference), *others = self.leaves.items()
        for field_name in SHARED_FIELDS:
            expected = getattr(reference, field_name)
            for path, leaf in others:
                if getattr(leaf, field_name) != expected:
                    raise ParamsError(
                        f"{field_name}: expected {_shown(expected)} as in leaf {first!r}, "
                        f"got {_shown(getattr(leaf, field_name))} in leaf {path!r}"
                    )
        if reference.cache_strategy is not KVCacheStrategy.PAGED:
            raise ParamsError(
                f"cache_strategy: expected paged in a tree, got {reference.cache_strategy}"
            )

    @property
    def leaves(self) -> dict[str, KVCacheParams]:
        """Caches by dotted path, in order."""
        return {
            f"{name}.{path}" if path else name: leaf
            for name, child in self.children
            for path, leaf in child.leaves.items()
        }

    @property
    def _first(self) -> KVCacheParams:
        return next(iter(self.leaves.values()))

    @property
    def page_size(self) -> int:
        return self._first.page_size

    @property
    def devices(self) -> Sequence[Device]:
        return self._first.devices

    @property
    def data_parallel_degree(self) -> int:
        return self._first.data_parallel_degree

    @property
    def n_shards(self) -> int:
        return self._first.n_shards

    @property
    def cache_strategy(self) -> KVCacheStrategy:
        return self._first.cache_strategy

    @property
    def enable_prefix_caching(self) -> bool:
        return self._first.enable_prefix_caching

    @property
    def hash_seed(self) -> bytes | None:
        return self._first.hash_seed

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page in every leaf."""
        return sum(leaf.bytes_per_page for leaf in self.leaves.values())

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> list[MultiKVCacheInputSymbols]:
        """One `MultiKVCacheInputSymbols` per device, replica-major; allocates nothing."""
        if num_layers is not None:
            raise ParamsError(f"num_layers: expected None for a tree of caches, got {num_layers}")
        return _tree_symbols(self, devices, "")

    input_symbols = get_symbolic_inputs

    def layout_dict(self) -> dict[str, object]:
        """Layout of each child by name, as JSON values."""
        return {name: child.layout_dict() for name, child in self.children}

    def require_layout(self, layout: Mapping[str, object], *, source: str) -> None:
        """Raise ParamsError at the first cache or layout field that differs from `layout`."""
        names = [name for name, _ in self.children]
        if "dtype" in as_mapping(layout) or list(layout) != names:
            expected = "a single cache" if "dtype" in layout else f"caches {list(layout)}"
            raise ParamsError(f"caches: expected {expected} from {source}, got {names}")
        for name, child in self.children:
            child.require_layout(layout[name], source=f"{source} ({name})")  # type: ignore[arg-type]


class Deployment(TypedDict, total=False):
    """Fields of a cache that an artifact does not fix."""

    devices: Sequence[Device]
    data_parallel_degree: int
    enable_prefix_caching: bool


def params_from_layout(
    layout: Mapping[str, object], **deployment: Unpack[Deployment]
) -> KVCacheParams | MultiKVCacheParams:
    """Inverse of `layout_dict` of a cache or a tree; `deployment` as `from_layout` takes it.

    ParamsError names a field that is missing, unknown or of a wrong type.
    """
    require_named(layout)
    return _of_layout(layout, deployment)


def _of_layout(
    layout: Mapping[str, object], deployment: Deployment
) -> KVCacheParams | MultiKVCacheParams:
    if is_cache(layout):
        return KVCacheParams.from_layout(layout, **deployment)
    inner = cast(Mapping[str, Mapping[str, object]], layout)
    caches = {name: _of_layout(each, deployment) for name, each in inner.items()}
    return MultiKVCacheParams.from_params(caches)


def _tree_symbols(
    tree: MultiKVCacheParams, devices: Sequence[Device] | None, path: str
) -> list[MultiKVCacheInputSymbols]:
    per_child: list[Sequence[KVCacheInputSymbols]] = []
    for name, child in tree.children:
        inner = f"{path}.{name}" if path else name
        if isinstance(child, MultiKVCacheParams):
            per_child.append(_tree_symbols(child, devices, inner))
        else:
            leaf = child if devices is None else replace(child, devices=as_devices(devices))
            per_child.append(paged_symbols(leaf, prefix=inner))
    names = [name for name, _ in tree.children]
    return [
        MultiKVCacheInputSymbols(dict(zip(names, records, strict=True)))
        for records in zip(*per_child, strict=True)
    ]


def _shown(value: object) -> str:
    return str([str(v) for v in value]) if isinstance(value, tuple) else repr(value)
