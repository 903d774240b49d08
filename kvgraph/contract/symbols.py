"""Input symbols of each cache kind, and the emitters that turn them into a framework's inputs.

A record holds one device's symbols. It is flat in field order under iteration, indexing and
`len`; nothing is allocated. Frameworks are imported inside the emitter that needs them, which
raises MissingDependencyError without it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias, cast

from kvgraph.contract.devices import HOST, Device
from kvgraph.contract.dims import (
    BATCH_SIZE,
    MAX_NUM_PAGES,
    MAX_SEQ_LEN,
    NUM_LOGITS,
    NUM_PAGE_SLOTS,
    NUM_SLOTS,
    NUM_STEPS,
    TOTAL_SEQ_LEN,
    Dim,
    TensorType,
    split_dim,
)
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.loading import require_package
from kvgraph.contract.values import require_integer
from kvgraph.errors import BindingError

if TYPE_CHECKING:
    import torch
    from onnx import ValueInfoProto
    from torch.export import Dim as ExportDim


ExportArguments: TypeAlias = "tuple[tuple[torch.Tensor, ...], tuple[dict[int, ExportDim], ...]]"
"""`args` and `dynamic_shapes` of torch.export.export."""

REPLICA = "replica_"
"""Prefix of a record's dims if there are several replicas; the replica's number follows it."""

INSTALL = "pip install 'kvgraph[compile]'"

MAX_EXTENTS: Mapping[str, int] = {
    BATCH_SIZE: 4096,
    TOTAL_SEQ_LEN: 1 << 20,
    NUM_LOGITS: 1 << 20,
    NUM_STEPS: 1 << 16,
}
"""Upper bounds that an exported program may assume; a dim not listed is unbounded."""


class KVCacheInputSymbols:
    """Base class of records: dataclasses of TensorTypes. A field that is None is absent."""

    def entries(self) -> Mapping[str, TensorType | KVCacheInputSymbols]:
        """Present fields of a record by name, or the children of a tree by name."""
        if not dataclasses.is_dataclass(self):
            raise BindingError(
                f"{type(self).__name__}: expected a dataclass of TensorTypes, got a plain class; "
                "decorate it with @dataclass"
            )
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    def symbols(self) -> tuple[TensorType, ...]:
        return tuple(cast(Mapping[str, TensorType], self.entries()).values())

    def __iter__(self) -> Iterator[TensorType]:
        return iter(self.symbols())

    def __getitem__(self, index: int) -> TensorType:
        return self.symbols()[index]

    def __len__(self) -> int:
        return len(self.symbols())

    def to_torch_export(self) -> ExportArguments:
        return emit_torch_export(self.symbols())

    def to_onnx(self) -> list[ValueInfoProto]:
        return emit_onnx(self.symbols())

    def to_tensorrt_profile(
        self, min: Mapping[str, int], opt: Mapping[str, int], max: Mapping[str, int]
    ) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
        return emit_tensorrt_profile(self.symbols(), min, opt, max)


@dataclasses.dataclass(frozen=True)
class PagedCacheInputSymbols(KVCacheInputSymbols):
    """Symbols of a paged cache on one device.

    - `kv_blocks` buffer `[num_page_slots, kv_dim, L, S, K, D]`: K then V of every layer;
      page slot P (the last) is the null page
    - `cache_lengths` int32 `[batch_size]`: tokens cached before this step
    - `lookup_table` int32 `[batch_size, max_num_pages]`: page ids; unused entries hold P
    - `max_lengths` int32 `[num_steps, 2]` on the host: longest new run, longest context
    - `kv_scales` buffer `[num_page_slots, kv_dim, L, S, K, scales_per_head]`, quantised pools only
    """

    kv_blocks: TensorType
    cache_lengths: TensorType
    lookup_table: TensorType
    max_lengths: TensorType
    kv_scales: TensorType | None = None


@dataclasses.dataclass(frozen=True)
class ContinuousBatchingKVCacheInputSymbols(KVCacheInputSymbols):
    """Symbols of a cache with one slot of `max_seq_len` tokens per sequence, on one device.

    - `kv_blocks` buffer `[num_slots, kv_dim, L, max_seq_len, K, D]`; the last slot is the null slot
    - `cache_lengths` int32 `[batch_size]`, `max_lengths` int32 `[num_steps, 2]` on the host
    - `lookup_table` int32 `[batch_size]`: the slot of each row
    """

    kv_blocks: TensorType
    cache_lengths: TensorType
    lookup_table: TensorType
    max_lengths: TensorType


@dataclasses.dataclass(frozen=True)
class PaddedKVCacheInputSymbols(KVCacheInputSymbols):
    """Symbols of a rectangular cache on one device, for export targets without paging.

    - `k_cache`, `v_cache` buffers `[L, batch_size, max_seq_len, K, D]`
    - `start_pos` int32 `[1]` on the host: tokens cached before this step, in every row
    - `null_op` int32 `[1]` on the host: no meaning
    """

    k_cache: TensorType
    v_cache: TensorType
    start_pos: TensorType
    null_op: TensorType


class MultiKVCacheInputSymbols(KVCacheInputSymbols):
    """Symbols of a tree of caches on one device: the children's, one after the other."""

    def __init__(self, children: Mapping[str, KVCacheInputSymbols]) -> None:
        self.children = dict(children)

    def entries(self) -> Mapping[str, KVCacheInputSymbols]:
        return self.children

    def symbols(self) -> tuple[TensorType, ...]:
        return tuple(symbol for child in self.children.values() for symbol in child)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiKVCacheInputSymbols):
            return NotImplemented
        return list(self.children.items()) == list(other.children.items())

    def __hash__(self) -> int:
        return hash(tuple(self.children.items()))

    def __repr__(self) -> str:
        return f"MultiKVCacheInputSymbols({self.children!r})"


class Scales(Protocol):
    """The part of a pool's quantization that symbols need."""

    @property
    def scale_dtype(self) -> str: ...


class CacheShape(Protocol):
    """The part of KVCacheParams that symbols need; the module of KVCacheParams imports this one."""

    @property
    def devices(self) -> Sequence[Device]: ...
    @property
    def data_parallel_degree(self) -> int: ...
    @property
    def n_shards(self) -> int: ...
    @property
    def page_shape(self) -> tuple[int, int, int, int, int]: ...
    @property
    def pool_dtype(self) -> str: ...
    @property
    def quantization(self) -> Scales | None: ...
    @property
    def scales_per_head(self) -> int: ...


def paged_symbols(params: CacheShape, *, prefix: str = "") -> list[PagedCacheInputSymbols]:
    """One record per device, replica-major; shards of a replica share batch and table dims.

    `prefix` is the path of a leaf in a tree of caches: it prefixes binding names and page dims.
    """
    return [
        _paged_record(params, device, prefix, _replica_prefix(params, i // params.n_shards))
        for i, device in enumerate(params.devices)
    ]


def _replica_prefix(params: CacheShape, replica: int) -> str:
    return f"{REPLICA}{replica}_" if params.data_parallel_degree > 1 else ""


def _paged_record(
    params: CacheShape, device: Device, leaf: str, replica: str
) -> PagedCacheInputSymbols:
    path, dims = (f"{leaf}.", leaf.replace(".", "_") + "_") if leaf else ("", "")
    kv, layers, page_size, heads, head_dim = params.page_shape
    page: tuple[Dim, ...] = (dims + NUM_PAGE_SLOTS, kv, layers, page_size, heads)
    batch, width, where = replica + BATCH_SIZE, replica + dims + MAX_NUM_PAGES, device.logical
    scales = None
    if params.quantization:
        scales = TensorType(
            path + "kv_scales",
            params.quantization.scale_dtype,
            (*page, params.scales_per_head),
            where,
            "buffer",
        )
    return PagedCacheInputSymbols(
        TensorType(path + "kv_blocks", params.pool_dtype, (*page, head_dim), where, "buffer"),
        TensorType(path + "cache_lengths", "int32", (batch,), where),
        TensorType(path + "lookup_table", "int32", (batch, width), where),
        TensorType(path + "max_lengths", "int32", (NUM_STEPS, 2), HOST),
        scales,
    )


def continuous_symbols(params: CacheShape) -> list[ContinuousBatchingKVCacheInputSymbols]:
    """One record per device: a paged record in which one page is the slot of a whole sequence."""
    return [
        ContinuousBatchingKVCacheInputSymbols(
            dataclasses.replace(paged.kv_blocks, shape=_slot_shape(paged.kv_blocks.shape)),
            paged.cache_lengths,
            dataclasses.replace(paged.lookup_table, shape=paged.lookup_table.shape[:1]),
            paged.max_lengths,
        )
        for paged in paged_symbols(params)
    ]


def _slot_shape(page: tuple[Dim, ...]) -> tuple[Dim, ...]:
    _, kv, layers, _, heads, head_dim = page
    return (NUM_SLOTS, kv, layers, MAX_SEQ_LEN, heads, head_dim)


def padded_symbols(params: CacheShape) -> list[PaddedKVCacheInputSymbols]:
    """One record per device; each replica has its own batch dim."""
    _, layers, _, heads, head_dim = params.page_shape
    records = []
    for i, device in enumerate(params.devices):
        batch = _replica_prefix(params, i // params.n_shards) + BATCH_SIZE
        shape: tuple[Dim, ...] = (layers, batch, MAX_SEQ_LEN, heads, head_dim)
        records.append(
            PaddedKVCacheInputSymbols(
                TensorType("k_cache", params.pool_dtype, shape, device.logical, "buffer"),
                TensorType("v_cache", params.pool_dtype, shape, device.logical, "buffer"),
                TensorType("start_pos", "int32", (1,), HOST),
                TensorType("null_op", "int32", (1,), HOST),
            )
        )
    return records


def emit_torch_export(symbols: Sequence[TensorType]) -> ExportArguments:
    """Positional `args` and `dynamic_shapes` of `torch.export.export`, one of each per symbol.

    The arguments are fake tensors without storage; a symbolic dim is one named Dim wherever it
    occurs in the call. Example extents are all distinct, so that no two dims are taken for one.
    A module's `*rest` or record parameter is one argument: nest `args` and `dynamic_shapes` alike,
    with a record's shapes as a list.
    """
    require_package("torch", "needed for arguments of torch.export", INSTALL)
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.export import Dim as ExportDim

    names = list(dict.fromkeys(name for s in symbols for name in s.symbolic_dims))
    sizes = {name: 3 + 2 * i for i, name in enumerate(names)}
    dims = {name: ExportDim(name, min=1, max=MAX_EXTENTS.get(name)) for name in names}
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        tensors = tuple(torch.empty(s.extents(sizes), dtype=_torch_dtype(s)) for s in symbols)
    shapes = tuple(
        {axis: _export_dim(dim, dims) for axis, dim in enumerate(s.shape) if isinstance(dim, str)}
        for s in symbols
    )
    return tensors, shapes


def _torch_dtype(symbol: TensorType) -> torch.dtype:
    import torch

    dtype: torch.dtype = getattr(torch, symbol.dtype)
    return dtype


def _export_dim(dim: str, dims: Mapping[str, ExportDim]) -> ExportDim:
    name, offset = split_dim(dim)
    return dims[name] + offset if offset else dims[name]


def emit_onnx(symbols: Sequence[TensorType]) -> list[ValueInfoProto]:
    """One ONNX ValueInfoProto per symbol, its symbolic dims as dim_params."""
    onnx = require_package("onnx", "needed for values of ONNX", INSTALL)
    return [
        onnx.helper.make_tensor_value_info(s.name, DTYPES[s.dtype].onnx, list(s.shape))
        for s in symbols
    ]


def emit_tensorrt_profile(
    symbols: Sequence[TensorType],
    min: Mapping[str, int],
    opt: Mapping[str, int],
    max: Mapping[str, int],
) -> dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(min, opt, max) shape by binding name; BindingError names a dim that is missing, out of
    order, or has no integer extent >= 0."""
    for name, sizes in (("min", min), ("opt", opt), ("max", max)):
        for dim, extent in sizes.items():
            require_integer(f"{name}: {dim}", extent, BindingError, least=0)
    profile = {}
    for symbol in symbols:
        shapes = tuple(symbol.extents(sizes) for sizes in (min, opt, max))
        for axis, (low, mid, high) in enumerate(zip(*shapes, strict=True)):
            if not low <= mid <= high:
                raise BindingError(
                    f"{symbol.name}: dim {axis} ({symbol.shape[axis]}) expected min <= opt <= max, "
                    f"got {low}, {mid}, {high}"
                )
        profile[symbol.name] = (shapes[0], shapes[1], shapes[2])
    return profile
