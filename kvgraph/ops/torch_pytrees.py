"""Symbol and input records as pytrees: torch.export and torch.func take them as arguments.

A record's children are its fields that are present, in their order; a tree's are its caches; those
of a leaf on several devices, or of several leaves, are its records. For a record that a user
derives, a dataclass, `torch.export.register_dataclass` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from kvgraph.contract.inputs import (
    KVCacheInputs,
    KVCacheInputsSequence,
    MultiKVCacheInputs,
    PaddedKVCacheInputs,
    RaggedKVCacheInputs,
)
from kvgraph.contract.symbols import (
    ContinuousBatchingKVCacheInputSymbols,
    MultiKVCacheInputSymbols,
    PaddedKVCacheInputSymbols,
    PagedCacheInputSymbols,
)

RECORDS: tuple[type[Any], ...] = (
    PagedCacheInputSymbols,
    ContinuousBatchingKVCacheInputSymbols,
    PaddedKVCacheInputSymbols,
    RaggedKVCacheInputs,
    PaddedKVCacheInputs,
)
TREES: tuple[type[Any], ...] = (MultiKVCacheInputSymbols, MultiKVCacheInputs)
LISTS: tuple[type[Any], ...] = (KVCacheInputs, KVCacheInputsSequence)


def _register(
    kind: type[Any], make: Callable[[dict[Any, Any]], Any], key: Callable[[Any], Any]
) -> None:
    def flatten(node: Any) -> tuple[list[Any], list[Any]]:
        entries = node.entries()
        return list(entries.values()), list(entries)

    def flatten_with_keys(node: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
        entries = node.entries()
        return [(key(name), child) for name, child in entries.items()], list(entries)

    def unflatten(values: Iterable[Any], names: list[Any]) -> Any:
        return make(dict(zip(names, values, strict=True)))

    pytree.register_pytree_node(
        kind,
        flatten,
        unflatten,
        serialized_type_name=f"kvgraph.{kind.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
    )


def _register_all() -> None:
    for kind in RECORDS:
        _register(kind, partial(_of_fields, kind), pytree.GetAttrKey)
    for kind in TREES:
        _register(kind, kind, pytree.MappingKey)
    for kind in LISTS:
        _register(kind, partial(_of_records, kind), pytree.SequenceKey)
    # A saved program holds its example inputs, which torch reads back from a list of safe types.
    torch.serialization.add_safe_globals([*RECORDS, *TREES, *LISTS])


def _of_fields(kind: type[Any], entries: dict[Any, Any]) -> Any:
    return kind(**entries)


def _of_records(kind: type[Any], entries: dict[Any, Any]) -> Any:
    return kind(list(entries.values()))


_register_all()
