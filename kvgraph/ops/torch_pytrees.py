"""Symbol and input records as pytrees, so that torch.export and torch.func take them as arguments.

The children of a record are its present fields, in their order. The children of a tree are its
caches; those of a leaf on several devices, or of several leaves, are its records. For a dataclass
that a user derives, `torch.export.register_dataclass` does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeAlias

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
    KVCacheInputSymbols,
    MultiKVCacheInputSymbols,
    PaddedKVCacheInputSymbols,
    PagedCacheInputSymbols,
)

Name: TypeAlias = str | int
Node: TypeAlias = KVCacheInputSymbols | KVCacheInputs
Make: TypeAlias = Callable[[dict[Name, object]], object]

RECORDS: tuple[type[Node], ...] = (
    PagedCacheInputSymbols,
    ContinuousBatchingKVCacheInputSymbols,
    PaddedKVCacheInputSymbols,
    RaggedKVCacheInputs,
    PaddedKVCacheInputs,
)
TREES = (MultiKVCacheInputSymbols, MultiKVCacheInputs)
LISTS = (KVCacheInputs, KVCacheInputsSequence)
FAKE_TENSOR = "torch._export.serde.serialize._reconstruct_fake_tensor"
"""Name in a saved program of the function that rebuilds an example input, a fake tensor."""


def _register(kind: type[Node], make: Make, key: Callable[..., pytree.KeyEntry]) -> None:
    def flatten(node: Node) -> tuple[list[object], list[Name]]:
        entries = node.entries()
        return list(entries.values()), list(entries)

    def flatten_with_keys(
        node: Node,
    ) -> tuple[list[tuple[pytree.KeyEntry, object]], list[Name]]:
        entries = node.entries()
        return [(key(name), child) for name, child in entries.items()], list(entries)

    def unflatten(values: Iterable[object], names: list[Name]) -> object:
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
        _register(kind, partial(_of_children, kind), pytree.MappingKey)
    for kind in LISTS:
        _register(kind, partial(_of_records, kind), pytree.SequenceKey)
    # A saved program holds its example inputs, which torch reads back from a list of safe types.
    torch.serialization.add_safe_globals([*RECORDS, *TREES, *LISTS, (_fake_tensor, FAKE_TENSOR)])


def _fake_tensor(described: bytes, is_parameter: bool) -> object:
    """Call torch's own function; its module takes a second to import."""
    from torch._export.serde import serialize

    return serialize._reconstruct_fake_tensor(described, is_parameter)


def _of_fields(kind: Callable[..., Node], entries: dict[Name, object]) -> Node:
    return kind(**{str(name): value for name, value in entries.items()})


def _of_children(kind: Callable[..., Node], entries: dict[Name, object]) -> Node:
    return kind(entries)


def _of_records(kind: Callable[..., Node], entries: dict[Name, object]) -> Node:
    return kind(list(entries.values()))


_register_all()
