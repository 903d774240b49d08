"""Several steps on the device without a manager call between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Protocol, TypeAlias, TypeVar, cast

import numpy as np

from kvgraph.contract.abilities import Increments, RowOffsets
from kvgraph.contract.inputs import (
    Buffer,
    KVCacheInputs,
    KVCacheInputsSequence,
    MultiKVCacheInputs,
    PaddedKVCacheInputs,
    RaggedKVCacheInputs,
    SessionInterface,
)
from kvgraph.errors import DeviceError, RequestError, UnsupportedError


class HasRowOffsets(Protocol):
    """Record with row offsets: `ModelInputs`, or a model's own."""

    @property
    def input_row_offsets(self) -> RowOffsets: ...


StepInputs: TypeAlias = HasRowOffsets | RowOffsets
"""Inputs of a step: a record with `input_row_offsets`, or the row offsets themselves."""


Nest = TypeVar("Nest", bound=KVCacheInputs | Sequence[KVCacheInputs])
"""Values of a step, for one cache or a tree, or as a record for each device."""


def advance(
    inputs: Nest,
    prev_model_inputs: StepInputs | Sequence[StepInputs],
    num_replicas: int,
    session: SessionInterface | None,
) -> Nest:
    """Values of the next step in the nesting of `inputs`; see `increment_cache_lengths`.

    Shards and leaves share one `cache_lengths` array, which is incremented once. The session
    increments device memory: `session.increment(cache_lengths, row_offsets)`.
    """
    offsets = _offsets_per_replica(prev_model_inputs, num_replicas)
    records = _device_records(inputs)
    per_replica = len(records) // num_replicas
    growing: dict[int, tuple[Buffer, RowOffsets]] = {}
    for i, record in enumerate(records):
        for leaf in _leaves(record):
            _require_next_step(leaf)
            padded = isinstance(leaf, PaddedKVCacheInputs)
            lengths: Buffer = getattr(leaf, "start_pos" if padded else "cache_lengths")
            growing.setdefault(id(lengths.handle), (lengths, offsets[i // per_replica]))
    for lengths, row_offsets in growing.values():  # check all before any of them changes
        if isinstance(lengths.handle, np.ndarray):
            _require_offsets(row_offsets, lengths.shape[0])
        elif not isinstance(session, Increments):
            raise DeviceError(
                f"session: expected one that increments cache_lengths of {lengths.device} "
                f"(increment), got {type(session).__name__}"
            )
    for lengths, row_offsets in growing.values():
        _increment(lengths, row_offsets, session)
    if isinstance(inputs, KVCacheInputs):
        return cast(Nest, _next_step(inputs))
    return cast(Nest, [_next_step(record) for record in inputs])


def _increment(lengths: Buffer, row_offsets: RowOffsets, session: SessionInterface | None) -> None:
    """Add each row's new tokens to `lengths [batch_size]`; `lengths [1]` gets the first row's."""
    if isinstance(lengths.handle, np.ndarray):
        new = np.diff(np.asarray(row_offsets)).astype(np.int32)
        lengths.handle += new[: lengths.shape[0]]
    else:
        assert isinstance(session, Increments)
        session.increment(lengths, row_offsets)


def _require_offsets(given: object, rows: int) -> None:
    offsets = np.asarray(given)
    is_of_rows = offsets.ndim == 1 and offsets.dtype.kind in "iu" and offsets.size > rows
    if not is_of_rows or offsets[0] or np.diff(offsets.astype(np.int64)).min(initial=0) < 0:
        raise RequestError(
            f"input_row_offsets: expected {rows + 1} integers from 0 on that do not descend, "
            f"got {' '.join(repr(given).split())[:80]}"
        )


def _offsets_per_replica(
    prev_model_inputs: StepInputs | Sequence[StepInputs], num_replicas: int
) -> list[RowOffsets]:
    several = isinstance(prev_model_inputs, (list, tuple))
    given = cast(Sequence[StepInputs], prev_model_inputs if several else [prev_model_inputs])
    if len(given) != num_replicas:
        raise RequestError(
            f"prev_model_inputs: expected one for each of {num_replicas} replicas, got {len(given)}"
        )
    return [cast(RowOffsets, getattr(each, "input_row_offsets", each)) for each in given]


def _device_records(inputs: KVCacheInputs | Sequence[KVCacheInputs]) -> Sequence[KVCacheInputs]:
    if isinstance(inputs, KVCacheInputsSequence):
        return [record for child in inputs.kv_cache_inputs for record in child.inputs]
    return inputs.inputs if isinstance(inputs, KVCacheInputs) else inputs


def _leaves(record: KVCacheInputs) -> list[KVCacheInputs]:
    if isinstance(record, MultiKVCacheInputs):
        return [leaf for child in record.children.values() for leaf in _leaves(child)]
    return list(record.inputs)


def _require_next_step(record: KVCacheInputs) -> None:
    if isinstance(record, PaddedKVCacheInputs):
        return  # a rectangle has no `max_lengths`
    for name in ("cache_lengths", "max_lengths"):
        if not hasattr(record, name):
            raise UnsupportedError(
                f"increment_cache_lengths: expected a record with {name}, "
                f"got {type(record).__name__}; override increment_cache_lengths"
            )
    steps = cast(RaggedKVCacheInputs, record).max_lengths.shape[0]
    if steps < 2:
        raise RequestError(
            f"increment_cache_lengths: expected values for at least 2 steps "
            f"(`num_steps` of `runtime_inputs`), got {steps}"
        )


def _next_step(inputs: KVCacheInputs) -> KVCacheInputs:
    if isinstance(inputs, RaggedKVCacheInputs):
        return RaggedKVCacheInputs(
            inputs.kv_blocks,
            inputs.cache_lengths,
            inputs.lookup_table,
            _behind_first(inputs.max_lengths),
            inputs.kv_scales,
        )
    if isinstance(inputs, PaddedKVCacheInputs):
        return inputs
    if is_dataclass(inputs):
        lengths = _behind_first(cast(RaggedKVCacheInputs, inputs).max_lengths)
        return cast(KVCacheInputs, replace(inputs, max_lengths=lengths))
    if isinstance(inputs, MultiKVCacheInputs):
        return MultiKVCacheInputs({n: _next_step(c) for n, c in inputs.children.items()})
    if isinstance(inputs, KVCacheInputsSequence):
        return KVCacheInputsSequence([_next_step(child) for child in inputs.kv_cache_inputs])
    return KVCacheInputs([_next_step(record) for record in inputs.inputs])


def _behind_first(maxima: Buffer) -> Buffer:
    """`max_lengths` without its first step, which has run."""
    rest = maxima.handle[1:]
    return Buffer(maxima.dtype, rest.shape, maxima.device, rest)
