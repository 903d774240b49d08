"""Records of a tree of caches and the dotted paths of its leaves; a single cache is at ""."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvgraph.contract.inputs import KVCacheInputs, MultiKVCacheInputs


def leaf_at(record: Any, path: str) -> Any:
    """The leaf's record at a dotted path of a tree's record."""
    for name in path.split(".") if path else ():
        record = record.children[name]
    return record


def nested(leaves: Mapping[str, KVCacheInputs]) -> MultiKVCacheInputs:
    """The tree's values from those of its leaves by path."""
    children: dict[str, Any] = {}
    for path, leaf in leaves.items():
        name, _, inner = path.partition(".")
        if inner:
            children.setdefault(name, {})[inner] = leaf
        else:
            children[name] = leaf
    return MultiKVCacheInputs(
        {name: nested(c) if isinstance(c, dict) else c for name, c in children.items()}
    )
