"""Runtime values in the order of the symbols; a manager hands them to a session each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import GenericAlias
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

import numpy as np
import numpy.typing as npt

from kvgraph.contract.devices import LogicalDevice
from kvgraph.contract.dims import Array, TensorType
from kvgraph.contract.synonyms import also_named
from kvgraph.contract.values import require_integer
from kvgraph.errors import BindingError, RequestError


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory that a session allocated, or a dummy: dtype, shape, logical device, opaque handle.

    Compared by identity: two buffers are two places in memory.

    `handle` is the framework's own object (a NumPy array, a torch tensor), None for a dummy.
    `np.asarray(buffer)` reads a host value.
    """

    dtype: str
    shape: tuple[int, ...]
    device: LogicalDevice
    handle: Any = None

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.asarray(self.handle, dtype=dtype)


Entry: TypeAlias = "Buffer | KVCacheInputs"
"""Value of a record or a tree under one name."""


@runtime_checkable
class KVCacheInputsInterface(Protocol):
    """Common interface of the values of a single cache and of a tree of caches."""

    def __class_getitem__(cls, item: object) -> GenericAlias:
        """Allow `KVCacheInputsInterface[Buffer, Buffer]` in annotations."""
        return GenericAlias(cls, item)

    @property
    def inputs(self) -> Sequence[KVCacheInputs]: ...
    def flatten(self) -> list[Buffer]: ...
    def unflatten(self, values: Sequence[Buffer]) -> KVCacheInputs: ...


@runtime_checkable
class KVCacheBufferInterface(Protocol):
    """The raw pools of one replica, for a single cache or a tree of caches."""

    @property
    def all_buffers(self) -> list[Buffer]: ...


class SessionInterface(Protocol):
    """Source of a device's memory: a manager allocates buffers from it and never reads them.

    What else a session may offer is in `kvgraph/contract/abilities.py`.
    """

    @property
    def identity(self) -> bytes: ...

    def allocate(self, symbol: TensorType, sizes: Mapping[str, int]) -> Buffer: ...


class KVCacheInputs:
    """Values of one leaf: one record per device, replica-major.

    It is the base class of records too: a record is a leaf of one device, so its `inputs` is
    `[itself]`. A dataclass that derives from it is a record; a field that is None is absent.
    """

    _inputs: Sequence[KVCacheInputs] | None = None  # None: a record

    def __init__(self, inputs: Sequence[KVCacheInputs]) -> None:
        self._inputs = inputs

    def __class_getitem__(cls, item: object) -> GenericAlias:
        """Allow `KVCacheInputs[Buffer, Buffer]` in annotations."""
        return GenericAlias(cls, item)

    @property
    def inputs(self) -> Sequence[KVCacheInputs]:
        return [self] if self._inputs is None else self._inputs

    def entries(self) -> Mapping[str, Entry] | Mapping[int, Entry]:
        """Present fields of a record by name, children of a tree by name, or records of several
        devices by position."""
        return _present(self) if self._inputs is None else dict(enumerate(self._inputs))

    def flatten(self) -> list[Buffer]:
        """All values in the order of the symbols, device after device."""
        if self._inputs is None:
            return list(_present(self).values())
        return [value for record in self._inputs for value in record.flatten()]

    def __iter__(self) -> Iterator[Buffer]:
        return iter(self.flatten())

    def __getitem__(self, index: int) -> Buffer:
        return self.flatten()[index]

    def __len__(self) -> int:
        return len(self.flatten())

    def unflatten(self, values: Sequence[Buffer]) -> KVCacheInputs:
        """The same nesting over other `values`; BindingError unless `flatten` returns as many."""
        count = len(self.flatten())
        if len(values) != count:
            raise BindingError(f"unflatten: expected {count} values, got {len(values)}")
        return self._rebuild(iter(values))

    def _rebuild(self, values: Iterator[Buffer]) -> KVCacheInputs:
        if self._inputs is None:
            return _replaced(self, values)
        return KVCacheInputs([record._rebuild(values) for record in self._inputs])


def _replaced(record: KVCacheInputs, values: Iterator[Buffer]) -> KVCacheInputs:
    present = _present(record)
    assert is_dataclass(record)
    rebuilt: KVCacheInputs = replace(record, **{name: next(values) for name in present})
    return rebuilt


def _present(record: KVCacheInputs) -> dict[str, Buffer]:
    """Fields of a dataclass that are not None, by name; BindingError for any other class."""
    if not is_dataclass(record):
        raise BindingError(
            f"{type(record).__name__}: expected a dataclass of values, got a plain class; "
            "decorate it with @dataclass"
        )
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: value for name, value in values.items() if value is not None}


_RAGGED_FIELDS = ("kv_blocks", "cache_lengths", "lookup_table", "max_lengths", "kv_scales")


class RaggedKVCacheInputs(KVCacheInputs):
    """One device's values of a paged cache, in the fields of `PagedCacheInputSymbols`.

    Decision: by hand, since each step flattens it: 0.1 us, and 1.5 us as a dataclass.
    """

    @also_named(blocks="kv_blocks")
    def __init__(
        self,
        kv_blocks: Buffer,
        cache_lengths: Buffer,
        lookup_table: Buffer,
        max_lengths: Buffer,
        kv_scales: Buffer | None = None,
    ) -> None:
        self.kv_blocks = kv_blocks
        self.cache_lengths = cache_lengths
        self.lookup_table = lookup_table
        self.max_lengths = max_lengths
        self.kv_scales = kv_scales

    @property
    def blocks(self) -> Buffer:
        """Synonym of `kv_blocks`."""
        return self.kv_blocks

    @property
    def inputs(self) -> Sequence[RaggedKVCacheInputs]:
        return [self]

    def entries(self) -> dict[str, Buffer]:
        return dict(zip(_RAGGED_FIELDS, self.flatten(), strict=False))

    def flatten(self) -> list[Buffer]:
        values = [self.kv_blocks, self.cache_lengths, self.lookup_table, self.max_lengths]
        return values if self.kv_scales is None else [*values, self.kv_scales]

    def _rebuild(self, values: Iterator[Buffer]) -> RaggedKVCacheInputs:
        count = len(self.flatten())
        return RaggedKVCacheInputs(*(next(values) for _ in range(count)))


@dataclass(eq=False, repr=False)
class PaddedKVCacheInputs(KVCacheInputs):
    """One device's values of a rectangular cache, in the fields of `PaddedKVCacheInputSymbols`."""

    k_cache: Buffer
    v_cache: Buffer
    start_pos: Buffer
    null_op: Buffer


class MultiKVCacheInputs(KVCacheInputs):
    """A tree's values: `children[name]` is a leaf's `KVCacheInputs` or another tree.

    `inputs[i]` is the tree of device i alone, whose children are single records; `flatten` goes
    device after device, and through the children in order, as the symbols do.
    """

    def __init__(self, children: Mapping[str, KVCacheInputs]) -> None:
        self.children = dict(children)

    @property
    def inputs(self) -> Sequence[MultiKVCacheInputs]:
        per_child = [child.inputs for child in self.children.values()]
        return [
            MultiKVCacheInputs(dict(zip(self.children, records, strict=True)))
            for records in zip(*per_child, strict=True)
        ]

    def entries(self) -> dict[str, KVCacheInputs]:
        return self.children

    def flatten(self) -> list[Buffer]:
        return [
            value
            for record in self.inputs
            for child in record.children.values()
            for value in child.flatten()
        ]

    def _rebuild(self, values: Iterator[Buffer]) -> MultiKVCacheInputs:
        devices = [
            MultiKVCacheInputs({n: c._rebuild(values) for n, c in record.children.items()})
            for record in self.inputs
        ]
        return self._like(devices)

    def _like(self, devices: Sequence[MultiKVCacheInputs]) -> MultiKVCacheInputs:
        """Join the trees of single devices into one tree with this tree's nesting."""
        children: dict[str, KVCacheInputs] = {}
        for name, child in self.children.items():
            records = [device.children[name] for device in devices]
            if isinstance(child, MultiKVCacheInputs):
                children[name] = child._like(cast(Sequence[MultiKVCacheInputs], records))
            else:
                children[name] = (
                    KVCacheInputs(records) if type(child) is KVCacheInputs else records[0]
                )
        return MultiKVCacheInputs(children)


def join_devices(records: Sequence[KVCacheInputs]) -> KVCacheInputs:
    """Join one record per device into the `KVCacheInputs` of a leaf, or into a tree of leaves."""
    first = records[0]
    if not isinstance(first, MultiKVCacheInputs):
        return KVCacheInputs(records)
    trees = cast(Sequence[MultiKVCacheInputs], records)
    return MultiKVCacheInputs(
        {name: join_devices([tree.children[name] for tree in trees]) for name in first.children}
    )


class KVCacheInputsSequence(KVCacheInputs):
    """Flat sequence of the values of several leaves; multistep execution uses it."""

    def __init__(self, kv_cache_inputs: Sequence[KVCacheInputs]) -> None:
        super().__init__(kv_cache_inputs)

    @property
    def kv_cache_inputs(self) -> Sequence[KVCacheInputs]:
        return self.inputs

    def _rebuild(self, values: Iterator[Buffer]) -> KVCacheInputsSequence:
        return KVCacheInputsSequence([child._rebuild(values) for child in self.inputs])


@dataclass(frozen=True, slots=True)
class BatchCharacteristics:
    """Upper bounds of a batch that every replica follows, so that one captured graph serves all.

    `batch_size`: rows. `max_prompt_length`: new tokens of a row. `max_cache_valid_length`: tokens
    of a row's context (cached + new). RequestError if one of them is no integer.
    """

    batch_size: int
    max_prompt_length: int
    max_cache_valid_length: int

    def __post_init__(self) -> None:
        for name in ("batch_size", "max_prompt_length", "max_cache_valid_length"):
            if type(value := getattr(self, name)) is not int:
                own = require_integer(f"batch_characteristics.{name}", value, RequestError)
                object.__setattr__(self, name, own)


@dataclass(slots=True, eq=False)
class ModelInputs:
    """A graph's own inputs of one step, int32 on the host; compared by identity.

    `tokens [total_seq_len]`; `input_row_offsets [batch_size + 1]`: row b owns tokens
    `[offsets[b], offsets[b+1])`; `logits_indices [num_logits]`: rows of `tokens` that get logits.
    """

    tokens: npt.NDArray[np.int32]
    input_row_offsets: npt.NDArray[np.int32]
    logits_indices: npt.NDArray[np.int32]
