"""Number of shards of a layout's caches, which is the number of ranks of an artifact."""

from __future__ import annotations

from collections.abc import Mapping

from kvgraph.errors import ParamsError

MOST_SHARDS = 64
"""Most shards of a replica: its ranks exchange data in the memory of one machine."""


def shards_of(layout: Mapping[str, object]) -> int:
    """`n_shards` of the layout of a cache or a tree; ParamsError unless 1 to MOST_SHARDS."""
    inner: object = layout
    while isinstance(inner, Mapping) and "n_shards" not in inner:
        inner = next(iter(inner.values()), None)
    found = inner["n_shards"] if isinstance(inner, Mapping) else None
    if type(found) is not int or not 1 <= found <= MOST_SHARDS:
        raise ParamsError(f"n_shards: expected 1 to {MOST_SHARDS} from the layout, got {found!r}")
    return found
