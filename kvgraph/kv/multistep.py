"""Several steps on the device without a manager call between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass, replace
from typing import Any

import numpy as np

from kvgraph.contract.inputs import (
    Buffer,
    KVCacheInputs,
    KVCacheInputsSequence,
    MultiKVCacheInputs,
    PaddedKVCacheInputs,
    RaggedKVCacheInputs,
)
from kvgraph.errors import RequestError, UnsupportedError


def advance(inputs: Any, prev_model_inputs: Any, num_replicas: int, session: Any) -> Any:
    """Values of the next step in the nesting of `inputs`; see `increment_cache_lengths`.

    Shards and leaves share one `cache_lengths` array, which is incremented once. For memory that
    is not the host's the session is asked: `session.increment(cache_lengths, row_offsets)`.
    """
    offsets = _offsets_per_replica(prev_model_inputs, num_replicas)
    records = _device_records(inputs)
    per_replica = len(records) // num_replicas
    seen: set[int] = set()
    for record in records:
        for leaf in _leaves(record):
            _require_next_step(leaf)
    for i, record in enumerate(records):
        for leaf in _leaves(record):
            padded = isinstance(leaf, PaddedKVCacheInputs)
            lengths = leaf.start_pos if padded else leaf.cache_lengths
            if id(lengths.handle) not in seen:
                seen.add(id(lengths.handle))
                _increment(lengths, offsets[i // per_replica], session)
    return _next_step(inputs)


def _increment(lengths: Buffer, row_offsets: Any, session: Any) -> None:
    """`lengths [batch_size]` or `[1]` grow by each row's new tokens (`[1]`: the first row's)."""
    if isinstance(lengths.handle, np.ndarray):
        new = np.diff(np.asarray(row_offsets)).astype(np.int32)
        lengths.handle += new[: lengths.shape[0]]
    else:
        session.increment(lengths, row_offsets)


def _offsets_per_replica(prev_model_inputs: Any, num_replicas: int) -> list[Any]:
    several = isinstance(prev_model_inputs, (list, tuple))
    given = list(prev_model_inputs) if several else [prev_model_inputs]
    if len(given) != num_replicas:
        raise RequestError(
            f"prev_model_inputs: expected one for each of {num_replicas} replicas, got {len(given)}"
        )
    return [getattr(each, "input_row_offsets", each) for each in given]


def _device_records(inputs: Any) -> Sequence[Any]:
    if isinstance(inputs, KVCacheInputsSequence):
        return [record for child in inputs.kv_cache_inputs for record in child.inputs]
    return inputs.inputs if isinstance(inputs, KVCacheInputs) else inputs


def _leaves(record: Any) -> list[Any]:
    if isinstance(record, MultiKVCacheInputs):
        return [leaf for child in record.children.values() for leaf in _leaves(child)]
    return list(record.inputs)


def _require_next_step(record: Any) -> None:
    if isinstance(record, PaddedKVCacheInputs):
        return  # a rectangle has no `max_lengths`
    for name in ("cache_lengths", "max_lengths"):
        if not hasattr(record, name):
            raise UnsupportedError(
                f"increment_cache_lengths: expected a record with {name}, "
                f"got {type(record).__name__}; override increment_cache_lengths"
            )
    steps = record.max_lengths.shape[0]
    if steps < 2:
        raise RequestError(
            f"increment_cache_lengths: expected values for at least 2 steps "
            f"(`num_steps` of `runtime_inputs`), got {steps}"
        )


def _next_step(inputs: Any) -> Any:
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
        return _next_record(inputs)
    if isinstance(inputs, MultiKVCacheInputs):
        return MultiKVCacheInputs({n: _next_step(c) for n, c in inputs.children.items()})
    if isinstance(inputs, KVCacheInputsSequence):
        return KVCacheInputsSequence([_next_step(child) for child in inputs.kv_cache_inputs])
    if isinstance(inputs, KVCacheInputs):
        return KVCacheInputs([_next_step(record) for record in inputs.inputs])
    return [_next_step(record) for record in inputs]


def _next_record(record: Any) -> Any:
    return replace(record, max_lengths=_behind_first(record.max_lengths))


def _behind_first(maxima: Buffer) -> Buffer:
    """`max_lengths` without the step that has run."""
    rest = maxima.handle[1:]
    return Buffer(maxima.dtype, rest.shape, maxima.device, rest)
