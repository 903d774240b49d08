"""Parameters of a KV cache: layout, which an artifact fixes, and deployment, which it does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal, Protocol, TypeAlias, runtime_checkable

from kvgraph.contract.devices import Device
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import ACTIVATIONS, QUANTIZED, itemsize
from kvgraph.contract.layout_fields import as_mapping, require_fields
from kvgraph.contract.shards import shards_of
from kvgraph.contract.symbols import (
    ContinuousBatchingKVCacheInputSymbols,
    KVCacheInputSymbols,
    PaddedKVCacheInputSymbols,
    PagedCacheInputSymbols,
    continuous_symbols,
    padded_symbols,
    paged_symbols,
)
from kvgraph.contract.values import is_one_of, require_boolean, require_integer, shown
from kvgraph.errors import ParamsError, UnsupportedError

CacheSymbols: TypeAlias = (
    list[PagedCacheInputSymbols]
    | list[ContinuousBatchingKVCacheInputSymbols]
    | list[PaddedKVCacheInputSymbols]
)
"""Records of a single cache, one per device; their class follows the cache's strategy."""

DEFAULT_PAGE_SIZE = 128
"""Tokens of a page, by default."""

GRANULARITY = 128
"""Elements of a head with one scale, by default."""


class KVCacheStrategy(StrEnum):
    PAGED = "paged"
    CONTINUOUS = "continuous"
    PADDED = "padded"


@dataclass(frozen=True)
class KVCacheQuantization:
    """Stored type of a quantised pool: one scale per `granularity` elements of a head."""

    dtype: Literal["int8", "float8_e4m3fn"]
    scale_dtype: str = "float32"
    granularity: int = GRANULARITY

    def __post_init__(self) -> None:
        if not is_one_of(self.dtype, QUANTIZED):
            raise ParamsError(f"quantization.dtype: expected one of {QUANTIZED}, got {self.dtype}")
        if not is_one_of(self.scale_dtype, ("float32",)):
            raise ParamsError(
                f"quantization.scale_dtype: expected 'float32', got {self.scale_dtype!r}"
            )
        granularity = require_integer(
            "quantization.granularity", self.granularity, ParamsError, least=1
        )
        object.__setattr__(self, "granularity", granularity)


def as_devices(devices: Iterable[Device]) -> tuple[Device, ...]:
    """`devices` as a tuple; ParamsError if it is no sequence of Devices."""
    if not isinstance(devices, Iterable):
        raise ParamsError(f"devices: expected a sequence of Devices, got {shown(devices)}")
    found = tuple(devices)
    for device in found:
        if not isinstance(device, Device):
            raise ParamsError(f"devices: expected Device, got {shown(device)}")
    return found


@runtime_checkable
class KVCacheParamInterface(Protocol):
    """Common interface of a single cache (`KVCacheParams`) and a tree of caches."""

    @property
    def page_size(self) -> int: ...
    @property
    def devices(self) -> Sequence[Device]: ...
    @property
    def data_parallel_degree(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def bytes_per_page(self) -> int: ...
    @property
    def n_shards(self) -> int: ...
    @property
    def hash_seed(self) -> bytes | None: ...
    @property
    def leaves(self) -> dict[str, KVCacheParams]: ...
    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> Sequence[KVCacheInputSymbols]: ...
    def layout_dict(self) -> dict[str, object]: ...
    def require_layout(self, layout: Mapping[str, object], *, source: str) -> None: ...


LAYOUT_FIELDS = (
    "dtype",
    "n_kv_heads",
    "head_dim",
    "v_head_dim",
    "num_layers",
    "page_size",
    "window_size",
    "quantization",
    "is_mla",
    "layout",
    "cache_strategy",
    "n_shards",
)
"""Fields that must mean the same in a manager and an artifact; all other fields may differ."""


SIZES = ("n_kv_heads", "head_dim", "v_head_dim", "num_layers", "page_size")
"""Fields of KVCacheParams that are sizes, at least 1."""

WHOLE = (*SIZES, "data_parallel_degree")
"""Fields of KVCacheParams that are whole numbers."""

SWITCHES = ("is_mla", "enable_prefix_caching", "allow_kv_head_replication")
"""Fields of KVCacheParams that are True or False."""


@dataclass(frozen=True)
class KVCacheParams:
    """One cache, paged by default: its layout, and how it is deployed.

    Layout fields (`LAYOUT_FIELDS`) decide what a compiled graph reads and writes. Deployment
    fields (`devices`, `data_parallel_degree`, prefix caching, hash settings) never do, except
    that `n_shards = len(devices) / data_parallel_degree` is part of the layout.

    `dtype` is the stored type of an unquantised pool. `devices` are replica-major.
    Raises ParamsError (a ValueError) naming the field and both values.
    """

    dtype: str
    n_kv_heads: int
    head_dim: int
    num_layers: int
    v_head_dim: int = 0
    page_size: int = DEFAULT_PAGE_SIZE
    window_size: int | None = None
    quantization: KVCacheQuantization | None = None
    is_mla: bool = False
    layout: str = "nhd"
    cache_strategy: KVCacheStrategy = KVCacheStrategy.PAGED
    devices: Sequence[Device] = field(default_factory=lambda: (Device("cpu"),))
    data_parallel_degree: int = 1
    enable_prefix_caching: bool = False
    allow_kv_head_replication: bool = False
    hash_algorithm: str = "sha256"
    hash_seed: bytes | None = None

    def __post_init__(self) -> None:
        self._check_types()
        kinds = [str(kind) for kind in KVCacheStrategy]
        if not is_one_of(self.cache_strategy, kinds):
            raise ParamsError(
                f"cache_strategy: expected one of {kinds}, got {self.cache_strategy!r}"
            )
        object.__setattr__(self, "cache_strategy", KVCacheStrategy(self.cache_strategy))
        if self.v_head_dim == 0:
            object.__setattr__(self, "v_head_dim", self.head_dim)
        self._check_layout()
        self._check_deployment()

    def _check_types(self) -> None:
        """Check types, and turn numbers and booleans into Python's, which manifests can hold."""
        for name in WHOLE:
            object.__setattr__(self, name, require_integer(name, getattr(self, name), ParamsError))
        if self.window_size is not None:
            window = require_integer("window_size", self.window_size, ParamsError)
            object.__setattr__(self, "window_size", window)
        for name in SWITCHES:
            object.__setattr__(self, name, require_boolean(name, getattr(self, name), ParamsError))
        object.__setattr__(self, "devices", as_devices(self.devices))
        for name, kind in (("quantization", KVCacheQuantization), ("hash_seed", bytes)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise ParamsError(f"{name}: expected {kind.__name__}, got {shown(value)}")

    def _check_layout(self) -> None:
        if not is_one_of(self.dtype, ACTIVATIONS):
            raise ParamsError(f"dtype: expected one of {ACTIVATIONS}, got {self.dtype!r}")
        for name in SIZES:
            if getattr(self, name) < 1:
                raise ParamsError(f"{name}: expected >= 1, got {getattr(self, name)}")
        if self.v_head_dim > self.head_dim:
            raise ParamsError(
                f"v_head_dim: expected <= head_dim {self.head_dim}, got {self.v_head_dim}"
            )
        if self.window_size is not None and self.window_size < 1:
            raise ParamsError(f"window_size: expected >= 1 or None, got {self.window_size}")
        if not is_one_of(self.layout, ("nhd",)):
            raise ParamsError(f"layout: expected 'nhd', got {self.layout!r}")
        if self.quantization and self.cache_strategy is not KVCacheStrategy.PAGED:
            raise ParamsError(
                f"quantization: expected None for a {self.cache_strategy} cache, "
                f"got {self.quantization.dtype}"
            )
        widths = {"head_dim": self.head_dim, "v_head_dim": self.v_head_dim}
        for name, width in widths.items() if self.quantization else ():
            if width % self.scale_granularity:
                raise ParamsError(
                    f"quantization.granularity: expected a divisor of {name} {width}, "
                    f"got {self.scale_granularity}"
                )

    def _check_deployment(self) -> None:
        dp, n = self.data_parallel_degree, len(self.devices)
        if dp < 1:
            raise ParamsError(f"data_parallel_degree: expected >= 1, got {dp}")
        if n < dp:
            raise ParamsError(f"devices: expected at least data_parallel_degree={dp}, got {n}")
        if n % dp:
            raise ParamsError(f"devices: expected a multiple of data_parallel_degree={dp}, got {n}")
        if not self.is_mla and self.n_kv_heads % self.n_shards:
            replicable = self.allow_kv_head_replication and self.n_shards % self.n_kv_heads == 0
            if not replicable:
                raise ParamsError(
                    f"n_kv_heads: expected a multiple of the {self.n_shards} shards "
                    f"(or allow_kv_head_replication), got {self.n_kv_heads}"
                )
        if not is_one_of(self.hash_algorithm, ("sha256",)):
            raise ParamsError(f"hash_algorithm: expected 'sha256', got {self.hash_algorithm!r}")
        if self.hash_seed is not None and len(self.hash_seed) != 32:
            raise ParamsError(f"hash_seed: expected 32 bytes, got {len(self.hash_seed)}")

    def require_kernels(self) -> None:
        """Raise UnsupportedError for a cache that can be described but not run."""
        if self.is_mla:
            raise UnsupportedError(
                "is_mla: expected False to compile or run a cache, since no kernel reads MLA pools "
                "yet, got True; symbols, plan_memory and NullKVCacheManager describe such caches"
            )

    @property
    def n_shards(self) -> int:
        """Tensor-parallel degree: devices of one replica."""
        return len(self.devices) // self.data_parallel_degree

    @property
    def n_kv_heads_per_device(self) -> int:
        """KV heads that one shard stores: 1 for MLA, at least 1 with head replication."""
        return 1 if self.is_mla else max(1, self.n_kv_heads // self.n_shards)

    @property
    def kv_dim(self) -> int:
        """Size of a page's first axis: 2 (K then V), or 1 (MLA's joint latent)."""
        return 1 if self.is_mla else 2

    @property
    def pool_dtype(self) -> str:
        return self.quantization.dtype if self.quantization else self.dtype

    @property
    def scale_granularity(self) -> int:
        assert self.quantization is not None
        return min(self.quantization.granularity, self.head_dim)

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """`[kv_dim, num_layers, page_size, heads of a shard, head_dim]`: one page of one shard."""
        return (
            self.kv_dim,
            self.num_layers,
            self.page_size,
            self.n_kv_heads_per_device,
            self.head_dim,
        )

    @property
    def scales_per_head(self) -> int:
        return ceildiv(self.head_dim, self.scale_granularity) if self.quantization else 0

    @property
    def bytes_per_page(self) -> int:
        """Bytes of one page over all shards of a replica, scales included."""
        elements = math.prod(self.page_shape)
        nbytes = elements * itemsize(self.pool_dtype)
        if self.quantization:
            scales = elements // self.head_dim * self.scales_per_head
            nbytes += scales * itemsize(self.quantization.scale_dtype)
        return nbytes * self.n_shards

    @property
    def leaves(self) -> dict[str, KVCacheParams]:
        """Caches by path; a single cache is its own leaf at the empty path."""
        return {"": self}

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> CacheSymbols:
        """One record of input symbols per device, replica-major; allocates nothing.

        The record's class follows `cache_strategy`: `PagedCacheInputSymbols`, or the class of
        continuous or padded caches.
        """
        params = self
        if devices is not None or num_layers is not None:
            params = replace(
                self,
                devices=self.devices if devices is None else as_devices(devices),
                num_layers=self.num_layers if num_layers is None else num_layers,
            )
        return _SYMBOLS[params.cache_strategy](params)

    input_symbols = get_symbolic_inputs

    def layout_dict(self) -> dict[str, object]:
        """Layout fields as JSON values; manifests store them, and managers are compared to them.

        Layouts that mean the same are equal: one scale for a head has one spelling, and only a
        paged cache has a page size.
        """
        values: dict[str, object] = {name: getattr(self, name) for name in LAYOUT_FIELDS}
        values["cache_strategy"] = str(self.cache_strategy)
        if self.cache_strategy is not KVCacheStrategy.PAGED:
            del values["page_size"]
        if self.quantization:
            values["quantization"] = {
                "dtype": self.quantization.dtype,
                "scale_dtype": self.quantization.scale_dtype,
                "granularity": _spelled(self.quantization.granularity, self.head_dim),
            }
        return values

    @classmethod
    def from_layout(
        cls,
        layout: Mapping[str, object],
        *,
        devices: Sequence[Device] | None = None,
        data_parallel_degree: int = 1,
        enable_prefix_caching: bool = False,
    ) -> KVCacheParams:
        """Inverse of `layout_dict`; raises ParamsError if the shard counts differ, or for a field
        that is missing, unknown or of a wrong type.

        `devices`: the default is one CPU for each shard of one replica.
        """
        require_fields(layout)
        data_parallel_degree = require_integer(
            "data_parallel_degree", data_parallel_degree, ParamsError, least=1
        )
        if devices is None:
            devices = [Device(f"cpu:{i}") for i in range(shards_of(layout))]
        devices = as_devices(devices)
        shards, heads = len(devices) // data_parallel_degree, layout.get("n_kv_heads")
        fields = {k: v for k, v in layout.items() if k != "n_shards"}
        if isinstance(fields.get("quantization"), Mapping):
            fields["quantization"] = KVCacheQuantization(**fields["quantization"])  # type: ignore[arg-type]
        params = cls(
            **fields,  # type: ignore[arg-type]
            devices=devices,
            data_parallel_degree=data_parallel_degree,
            enable_prefix_caching=enable_prefix_caching,
            allow_kv_head_replication=isinstance(heads, int) and shards > heads,
        )
        params.require_layout(layout, source="the layout")
        return params

    def require_layout(self, layout: Mapping[str, object], *, source: str) -> None:
        """Raise ParamsError at the first layout field that differs from `layout`."""
        mine, theirs = self.layout_dict(), dict(as_mapping(layout))
        if isinstance(quantization := theirs.get("quantization"), Mapping):
            granularity, width = quantization.get("granularity"), theirs.get("head_dim")
            if isinstance(granularity, int) and isinstance(width, int):
                theirs["quantization"] = {
                    **quantization,
                    "granularity": _spelled(granularity, width),
                }
        for name in ("cache_strategy", *mine):  # the strategy decides which fields there are
            if mine[name] != theirs.get(name):
                raise ParamsError(
                    f"{name}: expected {theirs.get(name)!r} from {source}, got {mine[name]!r}"
                )


def _spelled(granularity: int, head_dim: int) -> int:
    """The granularity as a layout has it. One scale for a head is spelled as by default, since
    identities of pages contain it."""
    return granularity if granularity < head_dim else max(head_dim, GRANULARITY)


_SYMBOLS: Mapping[KVCacheStrategy, Callable[[KVCacheParams], CacheSymbols]] = {
    KVCacheStrategy.PAGED: paged_symbols,
    KVCacheStrategy.CONTINUOUS: continuous_symbols,
    KVCacheStrategy.PADDED: padded_symbols,
}
